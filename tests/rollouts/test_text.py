"""Stop strings are found where all text says so, though most tokens are never decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from groupwise.prompts.generators.small_tokenizer import small_tokenizer
from groupwise.rollouts.text import Ending, decode_all
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Sampling

PIECES = [
    "</",
    "▁</",
    "search",
    "search>",
    ">",
    "▁>",
    "▁",
    "é",
    "▁a",
    "b>",
    "c</search>d",
    "▁▁",
    "</s>",
]
"""Of SentencePiece, beside bytes."""


def sentence_piece() -> PreTrainedTokenizerBase:
    """With bytes for unknown characters, and without the space in front of a text."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    core = Tokenizer(
        models.BPE(
            vocab={token: n for n, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )  # fmt: skip
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


def word_piece() -> PreTrainedTokenizerBase:
    """With a space before a token unless the token says otherwise, and none before full stops."""
    tokens = ["[UNK]", "</", "##search", "search", "##>", ">", ".", "##.", "a", "##a", "n't", "do"]
    core = Tokenizer(models.WordPiece({t: n for n, t in enumerate(tokens)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZERS = {"bytes": small_tokenizer(), "pieces": sentence_piece(), "words": word_piece()}


POLICY = small_policy(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=32)


def ending_at(tokenizer: PreTrainedTokenizerBase, *stops: str) -> Ending:
    policy = replace(POLICY, tokenizer=tokenizer, end_tokens=frozenset())
    return Ending(policy, Sampling(stop=stops), device=torch.device("cpu"))


def first_end(ending: Ending, tokens: list[int], since: int) -> int | None:
    """The first place at which a row ends, token by token as an engine asks."""
    table, rows = torch.tensor([[0], [0]]).repeat(1, len(tokens)), torch.tensor([1])
    table[1] = torch.tensor(tokens)
    for place in range(since, len(tokens)):
        latest = table[1, place : place + 1]
        if bool(ending(latest, table, rows, torch.tensor([place]), {1: since})[0]):
            return place
    return None


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_row_ends_where_its_whole_text_holds_a_stop_string(name: str, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    last = [*range(min(256, len(tokenizer))), *range(len(tokenizer))[-len(PIECES) :]]
    tokens = data.draw(st.lists(st.sampled_from(last), min_size=2, max_size=12))
    since = data.draw(st.integers(0, len(tokens) - 2))
    text = decode_all(tokenizer, [tokens[since:]])[0]
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 5))]
    if not stop or "\N{REPLACEMENT CHARACTER}" in stop:
        return
    ending = ending_at(tokenizer, stop, "</search>")
    texts = decode_all(tokenizer, [tokens[since : n + 1] for n in range(since, len(tokens))])
    wanted = [n for n, each in enumerate(texts, since) if stop in each or "</search>" in each]
    assert first_end(ending, tokens, since) == next(iter(wanted), None)


def test_only_tokens_that_may_end_a_stop_string_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = TOKENIZERS["pieces"]
    names = ["▁a", "é", "</", "search>"]
    tokens = [int(tokenizer.convert_tokens_to_ids(name)) for name in names]  # pyright: ignore[reportArgumentType]
    ending = ending_at(tokenizer, "</search>")
    assert first_end(ending, tokens, 0) == 3
    decoded: list[list[int]] = []

    def noted(_: Any, rows: list[list[int]]) -> list[str]:
        decoded.extend(rows)
        return decode_all(tokenizer, rows)

    monkeypatch.setattr("groupwise.rollouts.text.decode_all", noted)
    assert first_end(ending, tokens, 0) == 3 and decoded == [tokens]


def test_the_tails_of_suspects_are_fetched_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy from a card waits for it."""
    tokenizer = TOKENIZERS["pieces"]
    last, other = (int(tokenizer.convert_tokens_to_ids(name)) for name in ("search>", "▁a"))  # pyright: ignore[reportArgumentType]
    ending = ending_at(tokenizer, "</search>")
    begin = int(tokenizer.convert_tokens_to_ids("</"))  # pyright: ignore[reportArgumentType]
    table = torch.tensor([[begin, last], [other, last], [begin, last], [begin, other]])
    rows, place = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 1, 1, 1])
    copies: list[torch.Tensor] = []
    plain = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        copies.append(tensor)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(torch.Tensor, "__int__", None, raising=False)
    ended = ending(table[:, 1], table, rows, place, {2: 1})
    monkeypatch.undo()
    assert ended.tolist() == [True, False, False, False] and len(copies) == 2

"""The tokenizer of the small model that solves Knights and Knaves: names and set phrases are
tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from groupwise.prompts.generators.puzzles import (
    CLAUSES,
    KNIGHTS_KNAVES_PROMPT,
    NAMES,
    QUIZ,
    SAYINGS,
    roles_text,
)
from groupwise.prompts.generators.small_tokenizer import made_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def puzzles_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Args:
        phrases: further texts that are one token each, such as those of a chain of thought.

    Returns:
        A tokenizer for which `decode(encode(text)) == text` for every text in Unicode normal form
        C, with a chat template, a padding token, and an end token that also ends every turn.

    Example:
        >>> puzzles_tokenizer().tokenize("If Alda is a knave then Bram is a knight")
        ['If ', 'Alda', ' is a knave', ' then ', 'Bram', ' is a knight']
    """
    from tokenizers import pre_tokenizers

    known = dict.fromkeys([*TAGS, *NAMES, *_pieces(), *phrases])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(letters)}
    return made_tokenizer(vocab, [], tags=[*known])


def _pieces() -> Iterator[str]:
    """What stands between the names of a puzzle and of its answer."""
    prompt = KNIGHTS_KNAVES_PROMPT.format(quiz=QUIZ, example=roles_text(("X", "Y"), (True, False)))
    yield from (piece.strip() for piece in _parts(prompt))
    yield from (", ", " is a knight", " is a knave")
    for form in (*SAYINGS, *CLAUSES.values()):
        yield from _parts(form)
        yield from _parts(form[0].upper() + form[1:])


def _parts(form: str) -> list[str]:
    return [text for text in re.split(r"{\w*}", form) if text]

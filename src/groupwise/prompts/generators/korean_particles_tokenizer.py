"""The tokenizer of the small Korean model: words, forms of particles and set phrases are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from groupwise.prompts.generators.korean_particles import RULES, pieces
from groupwise.prompts.generators.small_tokenizer import made_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = ("<context>", "</context>", "<answer>", "</answer>")
MOST = 3
"""Numbers of candidates that are one token each, with the particle that their rule begins with: a
model of three layers learns much later to look up a number that is a token of its own."""


def korean_particles_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Args:
        phrases: further texts that are one token each, such as those between the candidates.

    Returns:
        A tokenizer for which `decode(encode(text)) == text` for every text in Unicode normal form
        C, with a chat template, a padding token, and an end token that also ends every turn.

    Example:
        >>> korean_particles_tokenizer().tokenize("동생을 샀다.")
        ['동생', '을', ' 샀다', '.']
    """
    from tokenizers import pre_tokenizers

    starts = [
        f"{before}{number}. {rule.partition('/')[0]}"
        for number, before in enumerate(["", *["\n"] * (MOST - 1)], start=1)
        for rule in RULES
    ]
    known = dict.fromkeys([*TAGS, *phrases, *starts, *pieces()])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(letters)}
    return made_tokenizer(vocab, [], tags=[*known])

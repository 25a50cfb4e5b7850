"""The tokenizer of the small model that searches: names are read by the syllable.

Names of a closed world are invented, so a model can only copy them. A syllable is one token
wherever it stands, and the space before a name is a token of its own: a name has the same tokens in
a question, in a query, on a page and in an answer. Every other word of the world is one token;
bytes stand for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from groupwise.prompts.generators.closed_world import (
    CONSONANTS,
    RELATIONS,
    UNANSWERABLE,
    VOWELS,
)
from groupwise.prompts.generators.small_tokenizer import made_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = ("<search>", "</search>", "<result>", "</result>", "<answer>", "</answer>")
_SPACE = "Ġ"
"""How byte-level vocabularies write a space."""


def closed_world_tokenizer() -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Returns:
        A tokenizer for which `decode(encode(text)) == text` for every text in Unicode normal form
        C, with a chat template, a padding token, and an end token that also ends every turn.

    Example:
        >>> closed_world_tokenizer().tokenize("The mayor of Bado is Keludi.")
        ['The', 'Ġmayor', 'Ġof', 'Ġ', 'Ba', 'do', 'Ġis', 'Ġ', 'Ke', 'lu', 'di', '.']
    """
    from tokenizers import pre_tokenizers

    merges = list(dict.fromkeys(_merges()))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    return made_tokenizer(vocab, merges, tags=TAGS)


def _merges() -> Iterator[tuple[str, str]]:
    """Syllables first; then each word from left to right, so that no merge joins two syllables of a
    name: those of words begin with a space or with what is no syllable."""
    for consonant in CONSONANTS:
        for vowel in VOWELS:
            yield consonant, vowel
            yield consonant.upper(), vowel
    for word in dict.fromkeys(_words()):
        pieces = re.findall(f"[{CONSONANTS}{CONSONANTS.upper()}][{VOWELS}]|.", word)
        whole = pieces[0]
        for piece in pieces[1:]:
            yield whole, piece
            whole += piece


def _words() -> Iterator[str]:
    """Every word of questions, pages and answers, with the space before it."""
    forms = [form for relation in RELATIONS.values() for form in relation.statements]
    forms += [relation.question for relation in RELATIONS.values()]
    for form in (*forms, "nothing found"):
        for word in re.findall("[a-z]+", re.sub(r"{\w}", "", form)):
            yield _SPACE + word
    yield from ("The", "What", "nothing", UNANSWERABLE)

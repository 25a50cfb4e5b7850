"""The tokenizer of the small model that searches: names are read by the syllable.

Names of a closed world are invented, so a model can only copy them. A syllable is one token
wherever it stands, at the start of a name or inside it, and the space before a name is a token of
its own: a name has the same tokens in a question, in a query, on a page and in an answer. Every
other word of the world is one token, with the space before it and without; bytes stand for the
rest.
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
        >>> closed_world_tokenizer().tokenize("The mayor of bado is keludi.")
        ['The', 'Ġmayor', 'Ġof', 'Ġ', 'ba', 'do', 'Ġis', 'Ġ', 'ke', 'lu', 'di', '.']
    """
    from tokenizers import pre_tokenizers

    merges = list(dict.fromkeys(_merges()))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    return made_tokenizer(vocab, merges, tags=TAGS)


def _merges() -> Iterator[tuple[str, str]]:
    """Syllables first; then each word, before those whose merges would break it: words that begin
    with a syllable before the others, long ones before short ones.

    No merge joins a space or a syllable to a syllable of a name: a word grows from its first piece
    that is not a syllable, first to its start, then to its end, and takes the space before it last.
    """
    for consonant in CONSONANTS:
        for vowel in VOWELS:
            yield consonant, vowel
    pieces_of = {w: re.findall(f"[{CONSONANTS}][{VOWELS}]|.", w) for w in _words()}
    words = sorted(pieces_of, key=lambda word: (-len(pieces_of[word][0]), -len(word)))
    for word in words:
        pieces = pieces_of[word]
        at = next(place for place, piece in enumerate(pieces) if len(piece) == 1)
        whole = pieces[at]
        for piece in reversed(pieces[:at]):
            yield piece, whole
            whole = piece + whole
        for piece in pieces[at + 1 :]:
            yield whole, piece
            whole += piece
    for word in words:
        yield _SPACE, word


def _words() -> Iterator[str]:
    """Every word of questions, pages and answers."""
    forms = [form for relation in RELATIONS.values() for form in relation.statements]
    forms += [relation.question for relation in RELATIONS.values()]
    for form in (*forms, "nothing found"):
        yield from re.findall("[a-z]+", re.sub(r"{\w}", "", form))
    yield from ("The", "What", "the", "nothing", UNANSWERABLE)

"""Prompts that two sets share: evaluation must not ask what training has answered."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt

LOOKED_AT = 20_000
"""So many prompts are read of a data set that is too large to hold."""


def normalised(text: str) -> str:
    """A text without what two copies of one problem may differ in: case, white space, punctuation
    at the ends of words, and forms of the same letter.

    Example:
        >>> normalised("What is  1+1 ?") == normalised("what is 1+1?")
        True
        >>> normalised("What is 1-1?") == normalised("What is 1+1?")
        False
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", re.sub(r"[?!.,;:]+(?=\s|$)", " ", plain)).strip()


def shared_prompts(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """How many held-out prompts are training prompts, by their normalised text.

    System messages do not count. Of a training set that is too large to hold, the first `LOOKED_AT`
    prompts are looked at.

    Example:
        >>> one, two = Prompt(id="a", text="1+1?"), Prompt(id="b", text="2+2?")
        >>> shared_prompts([one], [two, Prompt(id="c", text=" 1+1? ")])
        1
    """
    known = {_question(prompt) for prompt in held_out}
    seen = train[:LOOKED_AT] if isinstance(train, LazySequence) else train
    found = known & {_question(prompt) for prompt in seen}
    return sum(_question(prompt) in found for prompt in held_out)


def contamination_warning(shared: int, held_out: int) -> str:
    """What to say where held-out prompts are training prompts."""
    return (
        f"{shared} of {held_out} held-out prompts are training prompts as well, so figures on them "
        "say little about new problems; give others by data.eval or data.eval_split."
    )


def _question(prompt: Prompt) -> str:
    if prompt.text is not None:
        return normalised(prompt.text)
    return normalised(" ".join(m["content"] for m in prompt.messages if m["role"] != "system"))

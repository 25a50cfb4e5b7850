"""Contamination: held-out prompts that are training prompts too."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt

MAX_READ = 20_000
"""Number of prompts read from a large data set."""


def normalised(text: str) -> str:
    """Text without case, white space, punctuation at word ends, and Unicode variants of letters.

    Example:
        >>> normalised("What is  1+1 ?") == normalised("what is 1+1?")
        True
        >>> normalised("What is 1-1?") == normalised("What is 1+1?")
        False
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", re.sub(r"[?!.,;:]+(?=\s|$)", " ", folded)).strip()


def shared_prompts(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """Number of held-out prompts whose normalised text is that of a training prompt.

    System messages are ignored. Of a large training set, the first `MAX_READ` prompts are compared.

    Example:
        >>> one, two = Prompt(id="a", text="1+1?"), Prompt(id="b", text="2+2?")
        >>> shared_prompts([one], [two, Prompt(id="c", text=" 1+1? ")])
        1
    """
    known = {question(prompt) for prompt in held_out}
    seen = train[:MAX_READ] if isinstance(train, LazySequence) else train
    found = known & {question(prompt) for prompt in seen}
    return sum(question(prompt) in found for prompt in held_out)


def contamination_warning(shared: int, held_out: int) -> str:
    """The warning about held-out prompts that are training prompts."""
    return (
        f"{shared} of {held_out} held-out prompts are also training prompts, so their figures say "
        "little about new problems; choose others by data.eval or data.eval_split."
    )


def question(prompt: Prompt) -> str:
    """The normalised text of a prompt, without system messages."""
    if prompt.text is not None:
        return normalised(prompt.text)
    return normalised(" ".join(m["content"] for m in prompt.messages if m["role"] != "system"))

"""Remarks on training prompts before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt


def remarks(prompts: Sequence[Prompt], tokenizer: Any, *, per_step: int) -> list[str]:
    """Oddities of training prompts, one line each. For rows that are read on access, only their
    number and the first row are checked.

    Args:
        tokenizer: of the policy.
        per_step: prompts that a step draws.

    Example:
        >>> from types import SimpleNamespace
        >>> prompts = [Prompt(id="a", text="1+1?", answer="2"), Prompt(id="b", text="1+2?")]
        >>> for line in remarks(prompts, SimpleNamespace(chat_template=None), per_step=3):
        ...     print(line)
        data.train: has 2 prompts and a step draws 3 (prompts_per_step), so steps repeat prompts
        data.train: 1 of 2 rows have no answer; rewards that need one cannot judge them
    """
    count = len(prompts)
    found = []
    if count < per_step:
        found.append(
            f"data.train: has {count} prompts and a step draws {per_step} (prompts_per_step), so "
            "steps repeat prompts"
        )
    if count and prompts[0].messages and not getattr(tokenizer, "chat_template", None):
        found.append(
            "tokenizer: has no chat template, so the model is given the plain text of the "
            "questions; data.chat = false says so in the recipe"
        )
    if isinstance(prompts, LazySequence):
        return found
    without = sum(prompt.answer is None for prompt in prompts)
    if 0 < without < count:
        found.append(
            f"data.train: {without} of {count} rows have no answer; rewards that need one cannot "
            "judge them"
        )
    rows = Counter((str(prompt), prompt.answer) for prompt in prompts)
    if repeated := count - len(rows):
        found.append(f"data.train: {repeated} of {count} rows are duplicates")
    return found

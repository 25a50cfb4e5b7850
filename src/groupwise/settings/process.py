"""Settings of process rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Location, Name, Section

Separator = Annotated[str, Field(min_length=1)]


class ProcessSettings(Section):
    """Rewards for every step of an answer, for algorithms that use them (`algorithm.name =
    "grpo_process"`); set either `model` or `function`."""

    model: Location | None = None
    """Folder of a token classifier with one label and the policy's tokenizer; the reward of a step
    is σ of the label at its last token."""
    function: Name | None = None
    """`FILE.py:NAME` of a function of (prompt, steps, answer) that returns a number for each step,
    or None if it cannot judge the answer."""
    step_separator: Separator = "\n\n"
    """Text between the steps of an answer."""

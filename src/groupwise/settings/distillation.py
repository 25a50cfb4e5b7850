"""Settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Location, Section


class DistillationSettings(Section):
    """The teacher of an algorithm whose advantages need one (`algorithm.name = "opd"`)."""

    teacher: Location
    """Folder or hub name of the teacher, which has the policy's tokenizer; "self" is the policy as
    it stands, and needs a `prompt`."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The question as the teacher sees it, made of the columns of the data, `{prompt}` and
    `{answer}`: "{prompt} A solution: {solution}". None gives it the policy's prompt."""

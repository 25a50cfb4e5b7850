"""Settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Count, Location, Section, Share


class DistillationSettings(Section):
    """The teacher of an algorithm whose advantages need one (`algorithm.name = "opd"`)."""

    teacher: Location
    """Folder or hub name of the teacher, which has the policy's tokenizer; "self" is the policy as
    it stands, and needs a `prompt`."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The question as the teacher sees it, made of the columns of the data, `{prompt}` and
    `{answer}`: "{prompt} A solution: {solution}". None gives it the policy's prompt."""
    top_k: Count | None = None
    """Compare the teacher's k most likely tokens, and all others as one, at every place, instead of
    the sampled token alone. The whole vocabulary gives the exact divergence."""
    beta: Share = 1.0
    """The divergence over the top k: 1 is the reverse KL from the policy to the teacher, 0 the
    forward KL, a number between a Jensen-Shannon divergence."""

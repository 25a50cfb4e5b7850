"""Settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Count, Location, Section, Share

SELF = "self"
"""The policy as its own teacher, with another prompt."""


class DistillationSettings(Section):
    """The teacher, for algorithms whose advantages need one (`algorithm.name = "opd"`)."""

    teacher: Location
    """Folder or hub name of the teacher, which must have the policy's tokenizer; "self" is the
    current policy, and needs a `prompt`."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Template of the teacher's prompt, with columns of the data, `{prompt}` and `{answer}` as
    fields: "{prompt} A solution: {solution}". None uses the policy's prompt."""
    top_k: Count | None = None
    """At every position, compare probabilities of the teacher's k most likely tokens, and of all
    others as one outcome; None compares those of the sampled token. The size of the vocabulary
    gives the exact divergence."""
    beta: Share = 1.0
    """Divergence with `top_k`: 1 is the reverse KL(policy‖teacher), 0 the forward
    KL(teacher‖policy), and values between give a generalised Jensen-Shannon divergence."""

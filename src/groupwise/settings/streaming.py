"""Settings of sampling while weights change."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Section


class StreamingSettings(Section):
    """Sampling continues while the weights change: running completions switch to new weights."""

    max_staleness: Annotated[int, Field(ge=1, le=64)] = 2
    """Maximum age of a token: the number of steps between the weights that sample it and the update
    that learns from it."""

"""Settings of sampling while weights change."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Section


class StreamingSettings(Section):
    """Completions are written without a break while the weights change."""

    max_staleness: Annotated[int, Field(ge=1, le=64)] = 2
    """Most steps between the weights that draw a token and the update that learns from it."""

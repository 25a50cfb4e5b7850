"""Settings of uploads to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import Section, Whole


class HubSettings(Section):
    """Upload of the trained model to the Hugging Face hub."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """Repository, as "owner/model"."""
    private: bool = True
    """Whether a repository that does not exist yet is created as a private one."""
    every_steps: Whole = 0
    """Steps between uploads during training; 0 uploads `final/` only."""

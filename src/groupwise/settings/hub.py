"""Settings of uploads to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from groupwise.settings.base import SENDS_MODEL, Section, Whole


class HubSettings(Section):
    """Upload of the trained model to the Hugging Face hub."""

    name: Annotated[Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")], SENDS_MODEL]
    """Repository, as "owner/model". Uploads are commits on its main branch."""
    private: Annotated[bool, SENDS_MODEL] = True
    """Whether a new repository is private; an existing one keeps its visibility."""
    every_steps: Whole = 0
    """Steps between uploads during RL training; 0 uploads `final/` only."""

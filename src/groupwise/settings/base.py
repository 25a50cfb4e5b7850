"""The base of all settings: frozen, strictly typed, with metadata on the fields."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _expanded(path: str) -> str:
    """A path with `~` expanded."""
    if not path.isprintable():
        raise ValueError("must not contain control characters")
    return os.path.expanduser(path)


MOST = 2**31 - 1
Whole = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Minutes = Annotated[float, Field(gt=0, le=525_600, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Location = Annotated[str, Field(min_length=1), AfterValidator(_expanded)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]

FREE = Field(json_schema_extra={"free_to_change": True})
"""Metadata of a field: a resumed run may change the setting, or the whole section, because results
stay the same up to rounding."""
CODE = "can run code"
"""Reason why a recipe file may not change a setting."""
RUNS_CODE = Field(json_schema_extra={"free_to_change": True, "needs_trust": CODE})
"""Like `FREE`, for a field whose value can run code: the command line and Python may set it, a
recipe file only if it is trusted."""
SENDS_MODEL = Field(
    json_schema_extra={"free_to_change": True, "needs_trust": "sends the model to the hub"}
)
"""Like `RUNS_CODE`, for the repository that a model is uploaded to and its visibility."""


class Section(BaseModel):
    """A frozen group of settings without unknown keys or silent conversions (an int is a float)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

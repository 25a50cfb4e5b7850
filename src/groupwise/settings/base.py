"""The base of all settings: frozen, strictly typed, with metadata on the fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]

FREE = Field(json_schema_extra={"free_to_change": True})
"""Metadata of a field: a resumed run may change the setting, or the whole section, because results
stay the same up to rounding."""


class Section(BaseModel):
    """A frozen group of settings without unknown keys or silent conversions (an int is a float)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )

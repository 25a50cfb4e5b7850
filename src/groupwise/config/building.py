"""A configuration from plain values, with one clear line where that fails."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from groupwise.config.sections import Config
from groupwise.errors import UsageError, suggest

Model = TypeVar("Model", bound=BaseModel)

WANTED = {
    "model_type": "must be a section (a table of settings)",
    "tuple_type": "must be a list",
    "dict_type": "must be a table of settings",
    "string_too_short": "must not be empty",
}
"""What must hold, for the kinds of error whose own words speak of Python."""


def build(values: Mapping[str, Any]) -> Config:
    """A configuration from plain nested values; what is left out keeps its default.

    Raises:
        UsageError: the first value that cannot be used: dotted path, value, what must hold.

    Example:
        >>> build({"group_size": 0})
        Traceback (most recent call last):
        ...
        groupwise.errors.UsageError: group_size = 0: must be greater than or equal to 1.
    """
    return checked(Config, values)


def checked(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Any model of settings from plain nested values, in the way of `build`.

    Raises:
        UsageError: the first value that cannot be used: dotted path, value, what must hold.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(_explained(error, model)) from None


def _explained(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a pydantic error as `where = value: what must hold`."""
    problem = error.errors(include_url=False)[0]
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, UsageError):
        return str(reason)
    where = ".".join(_shown(step) for step in problem["loc"])
    value = _shortened(repr(problem["input"]))
    if problem["type"] == "missing":
        return f"{where}: must be given."
    if problem["type"] == "extra_forbidden":
        *section, key = problem["loc"]
        known = _section_at(section, model).model_fields
        return f"{where} = {value}: no such setting; {suggest(str(key), known)}"
    wanted = WANTED.get(problem["type"]) or problem["msg"].replace("Input should", "must")
    return f"{where} = {value}: {wanted[0].lower()}{wanted[1:]}."


def _shown(step: int | str) -> str:
    """A step of a path; quoted where it holds what would break the line."""
    return _shortened(str(step) if str(step).isprintable() else repr(step))


def _shortened(text: str, *, longest: int = 200) -> str:
    return text if len(text) <= longest else text[:longest] + "…"


def _section_at(steps: list[int | str], section: type[BaseModel]) -> type[BaseModel]:
    """The model of the section that a path leads to."""
    for step in steps:
        if isinstance(step, int):
            continue
        annotation = section.model_fields[step].annotation
        options = (annotation, *typing.get_args(annotation))
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return section

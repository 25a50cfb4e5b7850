"""A configuration from plain values; errors are one line."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from groupwise.config.schema import Config
from groupwise.errors import UsageError, suggest

Model = TypeVar("Model", bound=BaseModel)

SHOWN = 200
"""Characters of a refused value or of a path that a message shows."""
WANTED = {
    "model_type": "must be a section (a table of settings)",
    "tuple_type": "must be a list",
    "dict_type": "must be a table of settings",
    "string_too_short": "must not be empty",
}
"""Replacements for pydantic's messages in terms of Python."""

OTHER_NAMES = {
    "batch_size": "prompts_per_step",
    "beta": "algorithm.divergence.coefficient",
    "epsilon": "algorithm.surrogate.low",
    "epsilon_high": "algorithm.surrogate.high",
    "loss_type": "algorithm.name",
    "lr": "optimizer.learning_rate",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_steps": "steps",
    "num_generations": "group_size",
    "num_iterations": "update.epochs",
    "output_dir": "output",
}
"""Paths of settings that other projects name differently."""


def build(values: Mapping[str, Any]) -> Config:
    """A configuration from plain nested values; missing settings keep their defaults.

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
    """Any model of settings from plain nested values, with the errors of `build`.

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
        hint = suggest(str(key), known, meant=" or ".join(paths_of(str(key), model)))
        return f"{where} = {value}: no such setting; {hint}"
    wanted = WANTED.get(problem["type"]) or problem["msg"].replace("Input should", "must")
    return f"{where} = {value}: {wanted[0].lower()}{wanted[1:]}."


def paths_of(key: str, model: type[BaseModel] = Config) -> list[str]:
    """The paths, at most three, of a setting that was given in the wrong section or under its name
    in TRL; those with the fewest sections first.

    Example:
        >>> paths_of("learning_rate")[0], paths_of("lr")
        ('optimizer.learning_rate', ['optimizer.learning_rate'])
    """
    paths = [path for path in _paths(model) if path.rpartition(".")[2] == key]
    if not paths and model is Config and key in OTHER_NAMES:
        paths = [OTHER_NAMES[key]]
    return sorted(paths, key=lambda path: path.count("."))[:3]


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every setting outside of lists, of a section and of those inside it."""
    for name, described in section.model_fields.items():
        inner = _section_in(described.annotation)
        if inner is None or typing.get_origin(described.annotation) is tuple:
            yield f"{prefix}{name}"
        else:
            yield from _paths(inner, f"{prefix}{name}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, may hold, or holds a list of; None for a plain value."""
    options = (annotation, *typing.get_args(annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _shown(step: int | str) -> str:
    """A part of a dotted path; quoted if it contains characters that would break the line."""
    return _shortened(str(step) if str(step).isprintable() else repr(step))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _section_at(steps: list[int | str], section: type[BaseModel]) -> type[BaseModel]:
    """The model of the section that a path leads to."""
    for step in steps:
        if isinstance(step, int):
            continue
        inner = _section_in(section.model_fields[step].annotation)
        section = section if inner is None else inner
    return section

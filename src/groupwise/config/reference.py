"""Descriptions of all settings, generated from the models: meaning, values, default."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from groupwise.config.schema import Config, free_to_change, needs_trust
from groupwise.settings.base import MOST

_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "table"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The description of a setting.

    Attributes:
        path: dotted, as `--set` takes it; N stands for an index of a list.
        legal: allowed values.
        default: in TOML; "null" for None, "required" if there is none.
        about: meaning and unit.
        may_change: whether a resumed run may change it.
        trust: why a recipe file must be trusted to set it, such as "can run code"; "" if it need
            not be.
    """

    path: str
    legal: str
    default: str
    about: str
    may_change: bool
    trust: str


def reference() -> dict[str, Setting]:
    """Every setting by its path, in the order of the sections.

    Example:
        >>> found = reference()["optimizer.learning_rate"]
        >>> found.legal, "rewards.N.weight" in reference()
        ('number, ≥ 0', True)
    """
    return {setting.path: setting for setting in _settings(Config, "")}


def sections() -> dict[str, str]:
    """The description of every section by its path; the top level is ""."""
    return {"": _first(Config), **dict(_sections(Config, ""))}


def _settings(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    free, guarded = free_to_change(), needs_trust()
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        section, many = _section(field.annotation)
        if section is not None:
            yield from _settings(section, f"{path}.N." if many else f"{path}.")
            continue
        above = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]
        yield Setting(
            path=path,
            legal=_legal(field),
            default=_default(field),
            about=" ".join((field.description or "").split()),
            may_change=any(each in free for each in above),
            trust=guarded.get(path, ("",))[0],
        )


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        section, many = _section(field.annotation)
        if section is not None:
            path = f"{prefix}{name}.N" if many else f"{prefix}{name}"
            yield path, _first(section)
            yield from _sections(section, f"{path}.")


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model of a section, and whether it is a list of them."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if origin is tuple and inside and _section(inside[0])[0] is not None:
        return _section(inside[0])[0], True
    if origin is typing.Annotated:
        return _section(inside[0])
    if origin in (typing.Union, types.UnionType):
        found = [each for each in map(_section, inside) if each[0] is not None]
        return found[0] if found else (None, False)
    return None, False


def _legal(field: FieldInfo) -> str:
    """The allowed values of a field, in words."""
    bounds = [_bound(each) for each in field.metadata]
    return ", ".join(filter(None, [accepted(field.annotation), *bounds]))


def accepted(annotation: Any) -> str:
    """The values that a type allows, in words.

    Example:
        >>> accepted(typing.Literal["a", "b"]), accepted(float | None), accepted(list[float])
        ('"a" or "b"', 'number or null', 'list of numbers')
    """
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(json.dumps(value) for value in inside)
    if origin is typing.Annotated:
        # A nested Field keeps its bounds in metadata of its own.
        more = [m for each in inside[1:] for m in getattr(each, "metadata", [each])]
        return ", ".join(filter(None, [accepted(inside[0]), *map(_bound, more)]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if each is type(None) else accepted(each) for each in inside)
    if origin in (tuple, list):
        if not inside:
            return "list"
        return "list of " + re.sub(r"^(list|integer|number|text)\b", r"\1s", accepted(inside[0]))
    if origin in (dict, Mapping):
        return "table"
    return _NAMES.get(annotation, "any value")


def _bound(each: Any) -> str:
    """A limit in words; "" for the limit that only keeps integers in 32 bits."""
    limits = {text: getattr(each, key, None) for key, text in _BOUNDS.items()}
    return " ".join(
        text.format(f"{limit:,}")
        for text, limit in limits.items()
        if isinstance(limit, int | float) and limit != MOST
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return json.dumps(field.get_default(), ensure_ascii=False, default=str)


def _first(model: type[BaseModel]) -> str:
    """The first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(model.__doc__ or "").split("\n\n", 1)[0].split())

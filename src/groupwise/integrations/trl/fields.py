"""The treatment of each field of TRL's configuration, declared once in the type of the field.

The refusals at construction and the table in the docs are generated from it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from groupwise.errors import UsageError, warn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """The treatment of a field.

    Attributes:
        becomes: the setting of groupwise that it sets; None for a field that only its default fits.
        note: how the effect differs from TRL's, or why the field is refused.
        instead: what to do in place of a refused field.
        same: further values that ask for the same as the default of a refused field.
        of: the losses for which the field means anything; None for all.
        warned: a value other than the default has no effect, and a warning says so.
    """

    becomes: str | None = None
    note: str = ""
    instead: str = ""
    same: tuple[Any, ...] = ()
    of: tuple[str, ...] | None = None
    warned: bool = False


def honoured(becomes: str, note: str = "", *, of: tuple[str, ...] | None = None) -> Treatment:
    """Marks a field that groupwise supports.

    Args:
        becomes: what it sets.
        note: where the effect is not quite TRL's.
        of: the losses that read it.
    """
    return Treatment(becomes=becomes, note=note, of=of)


def ignored(note: str) -> Treatment:
    """Marks a field that only changes what is displayed; setting it is warned about.

    Args:
        note: why it has no effect.
    """
    return Treatment(becomes="no effect", note=note, warned=True)


def refused(note: str, instead: str = "", *, same: tuple[Any, ...] = ()) -> Treatment:
    """Marks a field of which only the default is accepted.

    Args:
        note: why anything else is refused.
        instead: what to do.
        same: values that mean what the default means.
    """
    return Treatment(note=note, instead=instead, same=same)


def treatments(config: type) -> dict[str, tuple[Any, Treatment]]:
    """Default and treatment of every field, in order."""
    hints = typing.get_type_hints(config, include_extras=True)
    fields = dataclasses.fields(config)  # pyright: ignore[reportArgumentType]
    return {field.name: (field.default, hints[field.name].__metadata__[0]) for field in fields}


def check(config: Any, *, loss_type: str) -> None:
    """Refuse every value that would have no effect, or warn where it only concerns the display.

    Raises:
        UsageError: the field, its value, why, and what to do instead.
    """
    for name, (default, treatment) in treatments(type(config)).items():
        value = getattr(config, name)
        if _equal(value, default) or any(_equal(value, other) for other in treatment.same):
            continue
        where = f"GRPOConfig.{name} = {value!r}"
        if treatment.becomes is None:
            instead = f"; {treatment.instead}" if treatment.instead else ""
            raise UsageError(f"{where}: {treatment.note}{instead}.")
        if treatment.warned:
            warn(f"{where}: has no effect: {treatment.note}.")
        if treatment.of is not None and loss_type not in treatment.of:
            losses = ", ".join(treatment.of)
            raise UsageError(
                f"{where}: loss_type = {loss_type!r} does not read it; remove it. Read by: "
                f"{losses}."
            )


def _equal(value: Any, other: Any) -> bool:
    """Equal, where True is not 1 and an empty list is not a setting at all."""
    if isinstance(value, bool) != isinstance(other, bool):
        return False
    return value == other or (value in ([], {}, ()) and other in (None, (), [], {}))


def markdown(config: type) -> str:
    """The table of the docs: every field with its default and what becomes of it."""
    supported = ["| field | default | becomes | |", "|---|---|---|---|"]
    refuse = ["| field | only value | why | instead |", "|---|---|---|---|"]
    for name, (default, treatment) in treatments(config).items():
        if treatment.becomes is None:
            also = "".join(f", `{value!r}`" for value in treatment.same)
            row = f"`{default!r}`{also} | {treatment.note} | {treatment.instead}"
            refuse.append(_row(name, row))
        else:
            only = f"only with {', '.join(treatment.of)}" if treatment.of else ""
            notes = "; ".join(text for text in (only, treatment.note) if text)
            supported.append(_row(name, f"`{default!r}` | {treatment.becomes} | {notes}"))
    return "\n".join(["### Supported", "", *supported, "", "### Refused", "", *refuse, ""])


def _row(name: str, rest: str) -> str:
    return f"| `{name}` | {rest} |"

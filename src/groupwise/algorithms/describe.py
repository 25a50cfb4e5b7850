"""Descriptions of algorithms, generated from their rows and the docstrings of their functions."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.algorithms.binding import SLOTS, Algorithm, settings_of
from groupwise.algorithms.table import ALGORITHMS
from groupwise.registry import FunctionSpec, Registry

WIDTH = 100
INDENT = " " * 13

_CLIPPED = (
    "At the first optimizer step of a batch, every ratio is 1, so the bounds of the surrogate "
    "act only with several steps (update.minibatches, update.epochs)."
)
ONE_STEP = dict.fromkeys(("ppo_clip", "dual_clip", "cispo", "gmpo", "sapo", "dppo"), _CLIPPED) | {
    "mirror_descent": "With one optimizer step per batch, x is 0 and the row is REINFORCE with "
    "a centred reward; tau acts with several steps (update.minibatches)."
}
"""By surrogate: what of it does not act with one optimizer step per batch."""


def formula(function: Callable[..., Any]) -> str:
    """The formula of a registered function: the indented lines of its docstring's head.

    Example:
        >>> from groupwise import ADVANTAGES
        >>> formula(ADVANTAGES.get("centered"))
        'A_i = r_i − mean(r)'
    """
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")[1:]
    found = next((text for text in paragraphs if text.startswith("    ")), "")
    return textwrap.dedent(found)


def summary(function: Callable[..., Any]) -> str:
    """The first line of a registered function's docstring."""
    return inspect.cleandoc(function.__doc__ or "").split("\n", 1)[0]


def table() -> list[dict[str, str]]:
    """One line per algorithm: its name, the part in every slot, its paper.

    Example:
        >>> next(row for row in table() if row["name"] == "dr_grpo")["advantage"]
        'centered'
    """
    return [
        {
            "name": name,
            **{slot: _cell(ALGORITHMS.get(name), slot) for slot in SLOTS},
            "paper": ALGORITHMS.get(name).paper,
        }
        for name in ALGORITHMS
    ]


def _cell(row: Algorithm, slot: str) -> str:
    chosen = getattr(row, slot)
    if slot != "divergence" or chosen.name == "none":
        return str(chosen)
    return f"{row.divergence_coefficient:g}·{chosen} in the {row.divergence_in}"


def describe(name: str) -> str:
    """Everything about one algorithm: slots with settings and formulas, paper, known differences.

    Raises:
        UsageError: no such row.

    Example:
        >>> print(describe("dr_grpo").splitlines()[0])
        dr_grpo · Dr. GRPO, Understanding R1-Zero-Like Training (2503.20783)
    """
    row = ALGORITHMS.get(name)
    lines = [f"{row.name} · {row.paper}", ""]
    for slot, registry in SLOTS.items():
        lines += _slot(slot, registry, getattr(row, slot))
        if slot == "divergence" and row.divergence.name != "none":
            lines.append(f"{INDENT}coefficient {row.divergence_coefficient:g}, ")
            lines[-1] += f"in the {row.divergence_in}"
    over = ", mean over the tokens of the step" if row.entropy_over == "tokens" else ""
    lines.append(f"{'entropy':<13}coefficient {row.entropy:g}{over}")
    notes = [*row.differs, *filter(None, [ONE_STEP.get(row.surrogate.name)])]
    if notes:
        lines += ["", "differs"]
        for text in notes:
            lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class SlotSetting:
    """A setting of a function that fills a slot: `algorithm.SLOT.KEY` of a recipe.

    Attributes:
        slot, function, key: the slot, its function, and the name of the setting.
        annotation: its type.
        default: of the function.
        about: its meaning, from the docstring.
        rows: the value that each row of the table with this function has.
    """

    slot: str
    function: str
    key: str
    annotation: Any
    default: Any
    about: str
    rows: Mapping[str, Any]

    @property
    def default_text(self) -> str:
        """The default as JSON."""
        required = self.default is inspect.Parameter.empty
        return "required" if required else json.dumps(self.default, default=str)


def slot_settings() -> dict[str, list[SlotSetting]]:
    """The settings of all functions of the slots, by the path that a recipe gives them.

    Example:
        >>> [s.function for s in slot_settings()["algorithm.surrogate.bound"]]
        ['dual_clip']
    """
    found: dict[str, list[SlotSetting]] = {}
    for slot, registry in SLOTS.items():
        for name in registry:
            users = [
                row for row in map(ALGORITHMS.get, ALGORITHMS) if getattr(row, slot).name == name
            ]
            for key, parameter in registry.settings(name).items():
                setting = SlotSetting(
                    slot=slot,
                    function=name,
                    key=key,
                    annotation=parameter.annotation,
                    default=parameter.default,
                    about=argument(registry.get(name), key),
                    rows={r.name: settings_of(registry, getattr(r, slot))[key] for r in users},
                )
                found.setdefault(f"algorithm.{slot}.{key}", []).append(setting)
    return found


def argument(function: Callable[..., Any], name: str) -> str:
    """What a docstring says of an argument, as one line; "" where it says nothing.

    Example:
        >>> from groupwise import ADVANTAGES
        >>> argument(ADVANTAGES.get("gae"), "gamma")
        'discount per token, in [0, 1].'
    """
    said = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2].split("\n\n")[0]
    for entry in re.split(r"\n(?= {4}\S)", said):
        names, _, about = entry.partition(":")
        if name in names.replace(",", " ").split():
            return " ".join(about.split())
    return ""


def _slot(slot: str, registry: Registry, chosen: FunctionSpec) -> list[str]:
    """The lines of one slot: the part with every setting, what it is, its formula."""
    function = registry.get(chosen.name)
    whole = FunctionSpec(name=chosen.name, settings=settings_of(registry, chosen))
    said = [summary(function), *formula(function).splitlines()]
    return [f"{slot:<13}{whole}", *(f"{INDENT}{line}" for line in said)]

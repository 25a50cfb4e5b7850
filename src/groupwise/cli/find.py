"""Commands that find things: recipes, show, runs."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import JsonFile, write_json
from groupwise.cli.output import print_table
from groupwise.errors import UsageError

WIDTH = 96


def recipes(json_file: JsonFile = None) -> None:
    """List the recipes that ship with groupwise."""
    from groupwise.config import packaged

    found = {name: _about(path.read_text(encoding="utf-8")) for name, path in packaged().items()}
    print_table(("recipe", "about"), list(found.items()))
    write_json(json_file, found)


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A recipe, algorithm, advantage, reward, environment, setting or metric.",
            autocompletion=lambda incomplete: [n for n in _names() if n.startswith(incomplete)],
        ),
    ],
    json_file: JsonFile = None,
) -> None:
    """Show what a name means: a recipe, algorithm, reward, environment, setting or metric."""
    from groupwise.config.building import paths_of

    found = {kind: text for kind, known in _known().items() if (text := known(name)) is not None}
    if not found:
        near = paths_of(name) or difflib.get_close_matches(name, _names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(
            f"name = {name!r}: no recipe, algorithm, reward, environment, setting or metric has "
            f"this name{hint} Lists: groupwise recipes, groupwise algorithms, "
            "groupwise reward list, groupwise config RECIPE --explain."
        )
    for place, (kind, text) in enumerate(found.items()):
        print("\n" if place else "", f"{kind} {name}\n\n{text}", sep="")
    write_json(json_file, found)


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder with run directories.")] = Path("runs"),
    json_file: JsonFile = None,
) -> None:
    """List the runs in a folder: state, step, reward, held-out accuracy, time."""
    from groupwise.rundir.overview import overview
    from groupwise.training.monitor.progress import duration

    found = overview(folder)
    if not found:
        raise UsageError(f"folder = {str(folder)!r}: contains no run directory.")
    rows = [
        [
            run.name,
            run.algorithm,
            run.state,
            f"{run.step}/{run.steps or '?'}",
            _number(run.reward),
            _number(run.held_out),
            duration(run.seconds),
        ]
        for run in found
    ]
    print_table(("run", "algorithm", "state", "step", "reward", "held-out", "time"), rows)
    write_json(json_file, [vars(run) for run in found])


def _known() -> dict[str, Any]:
    """For each kind, a function that returns the text about a name, or None."""
    from groupwise import extensions
    from groupwise.algorithms import ALGORITHMS, describe
    from groupwise.algorithms.binding import SLOTS
    from groupwise.config import packaged
    from groupwise.config.reference import reference
    from groupwise.environments import ENVIRONMENTS
    from groupwise.report.metrics import metric
    from groupwise.rewards import COMBINATIONS, REWARDS

    extensions.discover()
    registries = {**SLOTS, "reward": REWARDS, "combination": COMBINATIONS}
    registries["environment"] = ENVIRONMENTS
    functions = {
        kind: lambda name, registry=registry: (
            _function(registry, name) if name in registry else None
        )
        for kind, registry in registries.items()
    }
    recipes = packaged()
    return {
        "recipe": lambda name: (
            recipes[name].read_text(encoding="utf-8").rstrip() if name in recipes else None
        ),
        "algorithm": lambda name: describe(name) if name in ALGORITHMS else None,
        **functions,
        "setting": _setting,
        "metric": lambda name: (
            found.meaning if (found := metric(name)) and name not in reference() else None
        ),
    }


def _function(registry: Any, name: str) -> str | None:
    """The docstring and settings of a registered function."""
    from groupwise.config.reference import accepted

    if name not in registry:
        return None
    function = registry.get(name)
    settings = [
        f"{key}: {accepted(p.annotation)}; "
        + ("required" if p.default is p.empty else f"default {json.dumps(p.default, default=str)}")
        for key, p in registry.settings(name).items()
    ]
    said = inspect.cleandoc(function.__doc__ or "no description")
    return "\n".join([said, "", "Settings:", *(f"    {each}" for each in settings or ["none"])])


def _setting(name: str) -> str | None:
    """A setting, the settings of a section, or the settings whose path ends in a name."""
    from groupwise.algorithms.describe import slot_settings
    from groupwise.config.reference import reference, sections

    path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1N", name)
    settings = reference()
    if path in settings:
        return "\n".join([*explained(settings[path]), *_of_slot(path)])
    if path in (of_slots := slot_settings()):
        return "\n".join(line for each in of_slots[path] for line in _explained(each))
    inside = [s for key, s in settings.items() if key.startswith((f"{path}.", f"{path}.N."))]
    if not inside:
        return "\n".join(_ending_in(path)) or None
    known = sections()
    said = known.get(path) or known.get(f"{path}.N") or ""
    return "\n".join([said, "", *(line for each in inside for line in explained(each, path=True))])


def _ending_in(name: str) -> Iterator[str]:
    """The lines that describe every setting whose path ends in a name."""
    from groupwise.algorithms.describe import slot_settings
    from groupwise.config.reference import reference

    for path, setting in reference().items():
        if path.endswith(f".{name}"):
            yield from explained(setting, path=True)
    for path, of_slot in slot_settings().items():
        if path.endswith(f".{name}"):
            yield path
            yield from (f"    {line}" for each in of_slot for line in _explained(each))


def _of_slot(path: str) -> Iterator[str]:
    """The functions that can fill a slot, for the setting that names one."""
    from groupwise.algorithms.binding import SLOTS

    section, _, slot = path.rpartition(".")
    if section == "algorithm" and slot in SLOTS:
        yield from textwrap.wrap(f"names: {', '.join(SLOTS[slot])}", WIDTH)


def _explained(setting: Any) -> Iterator[str]:
    """The lines that describe a setting of a slot's function, with its value in each algorithm."""
    from groupwise.config.reference import accepted

    said = f"{setting.slot} {setting.function}: {setting.about}"
    yield from textwrap.wrap(said, WIDTH)
    values = f"values: {accepted(setting.annotation)}; default: {setting.default_text}"
    yield f"    {values}"
    if setting.rows:
        rows = ", ".join(f"{name} {json.dumps(v)}" for name, v in setting.rows.items())
        yield from textwrap.wrap(
            f"rows: {rows}", WIDTH, initial_indent="    ", subsequent_indent="    "
        )


def explained(setting: Any, *, path: bool = False) -> Iterator[str]:
    """The lines that describe a setting."""
    if path:
        yield setting.path
    indent = "    " if path else ""
    yield from textwrap.wrap(setting.about, WIDTH, initial_indent=indent, subsequent_indent=indent)
    notes = [f"values: {setting.legal}", f"default: {setting.default}"]
    notes += ["can be changed when a run is resumed"] if setting.may_change else []
    notes += ["needs --trust-recipe in a recipe file"] if setting.trust else []
    yield from textwrap.wrap(
        "; ".join(notes), WIDTH, initial_indent=indent, subsequent_indent=indent
    )


def _names() -> list[str]:
    from groupwise.algorithms import ALGORITHMS
    from groupwise.algorithms.describe import slot_settings
    from groupwise.config import packaged
    from groupwise.config.reference import reference
    from groupwise.environments import ENVIRONMENTS
    from groupwise.rewards import REWARDS

    return [*packaged(), *ALGORITHMS, *REWARDS, *ENVIRONMENTS, *reference(), *slot_settings()]


def _about(text: str) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#") or not line.strip("# ") or line.startswith("#  "):
            break
        lines.append(line.strip("# "))
    first = re.split(r"(?<=[^D][^r]\.)\s", " ".join(lines), maxsplit=1)[0]
    return re.sub(r":$", ".", first)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

"""Options that several commands share, and the file that `--json` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.errors import UsageError


def recipe_names(incomplete: str) -> list[str]:
    """Completions from the packaged recipes; the shell completes files."""
    from groupwise.config import packaged

    return [name for name in packaged() if name.startswith(incomplete)]


def task_names(incomplete: str) -> list[str]:
    """Completions from the packaged recipes, of the last one in a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in recipe_names(last)]


def algorithm_names(incomplete: str) -> list[str]:
    """Completions from the names of algorithms, of the last one in a list with commas."""
    from groupwise.algorithms import ALGORITHMS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in ALGORITHMS if name.startswith(last)]


def pipeline_names(incomplete: str) -> list[str]:
    """Completions from the packaged pipelines; the shell completes files."""
    from groupwise.config.recipes import packaged_pipelines

    return [name for name in packaged_pipelines() if name.startswith(incomplete)]


def setting_names(incomplete: str) -> list[str]:
    """Completions from the settings of recipes, as `KEY=`."""
    from groupwise.config.reference import reference

    return [f"{path}=" for path in reference() if path.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        help="A packaged recipe by name, or the path of a TOML or YAML file.",
        autocompletion=recipe_names,
    ),
]
MaybeRecipe = Annotated[
    str | None,
    typer.Argument(
        help="A packaged recipe by name, or the path of a TOML or YAML file.",
        autocompletion=recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting: section.field=value; repeatable.",
        autocompletion=setting_names,
    ),
]
TrustRecipe = Annotated[
    bool,
    typer.Option(
        "--trust-recipe", help="Accept settings of the recipe file that run code or upload a model."
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the output as JSON."),
]


def write_json(path: Path | None, values: Any) -> None:
    """Write the values to the file that `--json` names."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json = {str(path)!r}: cannot be written ({error.strerror}).") from None

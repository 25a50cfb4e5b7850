"""Commands that inspect and check before a run: algorithms, config, doctor."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated

import typer

from groupwise.cli.find import explained
from groupwise.cli.options import (
    JsonFile,
    Overrides,
    Recipe,
    TrustRecipe,
    algorithm_names,
    recipe_names,
    write_json,
)
from groupwise.cli.output import print_table, visible, wrapped


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of an algorithm; default: list all.", autocompletion=algorithm_names
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List the algorithms, or describe one.

    The description has formulas, settings, and differences from the paper and other projects.
    """
    from groupwise.algorithms import ALGORITHMS, describe, table

    if name is not None:
        print(describe(name))
        write_json(json_file, dataclasses.asdict(ALGORITHMS.get(name)))
        return
    rows = table()
    slots = ("name", "advantage", "surrogate", "weighting", "paper")
    print_table(slots, [[row[slot] for slot in slots] for row in rows])
    write_json(json_file, rows)


def config(
    recipe: Recipe,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Describe every setting: meaning, values, default.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Print every setting of a recipe with its origin."""
    from groupwise.config import flat, reference, resolve

    resolved = resolve(recipe, overrides or [], trust_recipe=trust_recipe)
    values = flat(resolved.config)
    rows = [
        (path, json.dumps(v, ensure_ascii=False), resolved.origins[path])
        for path, v in values.items()
    ]
    if explain:
        known = reference()
        for path, value, origin in rows:
            setting = known.get(re.sub(r"\.\d+(?=\.|$)", ".N", path))
            print(visible(f"{path} = {value}  ({origin})"))
            for line in explained(setting) if setting else ():
                print(f"    {visible(line)}")
    else:
        print_table(("setting", "value", "from"), rows)
    print()
    print_table(("derived", "value"), list(resolved.derived.items()))
    write_json(
        json_file,
        {
            "config": json.loads(resolved.config.to_json()),
            "origins": dict(resolved.origins),
            "derived": dict(resolved.derived),
        },
    )


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe; default: check only the installation.", autocompletion=recipe_names
        ),
    ] = None,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    fit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="GB",
            help="Propose settings that fit into this much memory, in GiB; default: free memory.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Check a recipe and this machine before a run starts."""
    from groupwise.config import load

    config = None
    if recipe is not None:
        config = load(recipe, overrides or [], trust_recipe=trust_recipe)

    from groupwise.cli.doctor import examine, passed
    from groupwise.rundir.files import printable

    checks = examine(config, fit_gb=fit)
    for check in checks:
        for line in printable(str(check)).splitlines():
            print(wrapped(line, indent=6))
    write_json(json_file, [dataclasses.asdict(check) for check in checks])
    return 0 if passed(checks) else 1

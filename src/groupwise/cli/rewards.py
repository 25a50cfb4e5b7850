"""The command `reward`: list rewards, and try those of a recipe."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from groupwise.cli.options import JsonFile, Overrides, Recipe, TrustRecipe, write_json

app = typer.Typer(help="List and try rewards.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def rewards(context: typer.Context) -> None:
    """List and try rewards."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def reward_list(json_file: JsonFile = None) -> None:
    """List the registered rewards with their settings and what they score."""
    from groupwise.rewards.listing import listing

    found = listing()
    for name, paid_for in found.items():
        print(name, *textwrap.wrap(paid_for, 96), sep="\n    ")
    write_json(json_file, found)


@app.command("try")
def reward_try(
    recipe: Recipe,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with your own completions: rows with `prompt` and `text`."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of training prompts.")] = 4,
    json_file: JsonFile = None,
) -> int:
    """Score reference answers, garbage and your own completions with each component of the
    reward."""
    from groupwise.config import load

    config = load(recipe, overrides or [], trust_recipe=trust_recipe)

    from groupwise.evaluation.reward_check import try_reward
    from groupwise.rundir.files import printable

    check = try_reward(config, prompts=prompts, samples=data)
    print(printable(str(check)))
    write_json(json_file, {"rows": check.table(), "problems": list(check.problems)})
    return 0 if check.passed else 1

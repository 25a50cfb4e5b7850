"""Commands that train and merge models: train, sft, merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import Overrides, Recipe, TrustRecipe
from groupwise.cli.output import command_name, drop_output
from groupwise.errors import UsageError


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Resume from the newest checkpoint in this run directory; start if it has none.",
        ),
    ] = None,
    trust_recipe: TrustRecipe = False,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Resume even if settings that affect results have changed."
        ),
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="With --resume: start again from step 0 if no checkpoint is intact.",
        ),
    ] = False,
) -> None:
    """Train a model with a recipe."""
    from groupwise.config import load

    given = list(overrides or [])
    if resume is not None:
        if other := [item for item in given if _other_output(item, resume)]:
            raise UsageError(f"--set = {other[0]!r}: --resume names the run directory; drop it.")
        given.append(f"output={json.dumps(resume)}")
    config = load(recipe, given, trust_recipe=trust_recipe)

    from groupwise.training.run import train_config

    run = train_config(
        config, resume=resume is not None, allow_changes=allow_changes, restart=restart
    )
    try:
        print(f"model   {run.folder / 'final'}")
        print(f"report  {command_name()} report {run.folder}")
        print(f"chat    {command_name()} chat {run.folder / 'final'}", flush=True)
    except OSError:
        drop_output()  # the terminal was closed during the run


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of the model; default: `sft` in the run directory."
        ),
    ] = None,
) -> None:
    """Fine-tune a model on worked answers (supervised).

    Uses the [warmup] section of RECIPE; word-problems-base retrains the bundled model.
    """
    from groupwise.training.stages.recipe import supervise

    print(supervise(recipe, overrides or [], output=output))


def merge(
    adapter: Annotated[
        str, typer.Argument(help="Folder of an adapter or of a run that trained one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the merged model.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: that of the base model."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/MODEL", help="Upload it to the Hugging Face hub."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the base model.")
    ] = False,
) -> None:
    """Merge an adapter into its base model."""
    from groupwise.training.stages.merge import merge, push

    print(merge(adapter, output, dtype=dtype, trust_remote_code=trust_remote_code))
    if name is not None:
        print(push(output, name))


def _other_output(override: str, folder: str) -> bool:
    """Whether an override sets `output` to another folder."""
    name, _, value = override.partition("=")
    given = Path(value.strip().strip("\"'")).expanduser()
    return name.strip() == "output" and given.resolve() != Path(folder).expanduser().resolve()

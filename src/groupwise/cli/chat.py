"""The command `chat`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import Overrides

if TYPE_CHECKING:
    from groupwise.config import Config


def chat(
    model: Annotated[str, typer.Argument(help='Model folder, hub name, or "bundled".')],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 decodes greedily.")
    ] = 0.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer in tokens.")
    ] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            "--recipe",
            help="Recipe whose [environment] replies to tool calls; its data.system and "
            "data.wording apply too.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Chat with a model; an empty line or Ctrl-D ends it. Lines may also come from a pipe."""
    from groupwise.config.connect import configured_engine
    from groupwise.rollouts.chat import chat
    from groupwise.rundir.files import printable
    from groupwise.types import Sampling

    recipe = None if task is None else _recipe(task, overrides or [])
    wording = None
    if recipe is not None:
        system = recipe.data.system if system is None else system
        wording = recipe.data.wording
    answers = chat(
        model,
        iter(_line, ""),
        system=system,
        wording=wording or "{question}",
        plain=recipe is not None and not recipe.data.chat,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
        seed=seed,
        trust_remote_code=trust_remote_code,
        tools=None if recipe is None else functools.partial(configured_engine, recipe),
    )
    for answer in answers:
        print(printable(answer), flush=True)


def _recipe(task: str, overrides: Sequence[str]) -> Config:
    """A recipe with an environment."""
    from groupwise.config import load
    from groupwise.errors import UsageError

    config = load(task, overrides)
    if config.environment is None:
        raise UsageError(
            f"--task = {task!r}: must be a recipe with a section [environment]; without tools, "
            "leave --task out and give the system message as --system."
        )
    return config


def _line() -> str:
    """The next line the user types; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True, file=sys.stderr)
    return sys.stdin.readline().strip()

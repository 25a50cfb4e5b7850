"""Supervised training by a recipe, as the command `groupwise sft` runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from groupwise.config import Config, load, read
from groupwise.config.connect import best_device, load_configured
from groupwise.errors import UsageError, suggest
from groupwise.training.checkpoint.files import replace_folder
from groupwise.training.monitor.progress import show_progress
from groupwise.training.stages.base_model import WORD_PROBLEMS, Base
from groupwise.training.stages.korean_base import KOREAN_PARTICLES
from groupwise.training.stages.puzzles_base import KNIGHTS_KNAVES
from groupwise.training.stages.search_base import CLOSED_WORLD
from groupwise.training.stages.sft import save
from groupwise.training.stages.warmup import warm_up
from groupwise.types import Update

BASES: Mapping[str, Base] = {
    "word_problems": WORD_PROBLEMS,
    "closed_world": CLOSED_WORLD,
    "korean_particles": KOREAN_PARTICLES,
    "knights_knaves": KNIGHTS_KNAVES,
}
"""Kinds of base models, by the name in the recipe's `base`."""


def supervise(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    output: str | None = None,
    trust_recipe: bool = False,
) -> Path:
    """Train by the `[warmup]` section of a recipe, or by the phases of a base model's recipe.

    Args:
        recipe: path or name.
        overrides: `section.field=value`, for a recipe with a warm-up.
        output: folder of the model; `sft` in the run directory of the recipe where None.
        trust_recipe: accept settings of the recipe file that can run code.

    Returns:
        The folder, a plain Hugging Face model.

    Raises:
        UsageError: the recipe has neither, or cannot be used, or the folder is not empty.
    """
    values = read(recipe)
    if "phases" not in values:
        config = load(recipe, overrides, trust_recipe=trust_recipe)
        if config.hub is not None:
            raise UsageError(
                f"hub.name = {config.hub.name!r}: a model made by [warmup] is not uploaded; "
                f"hf upload {config.hub.name} FOLDER does that."
            )
        folder = _unused(Path(output or Path(config.output) / "sft"))
        supervise_config(config, folder)
        return folder
    if overrides:
        raise UsageError(f"--set = {overrides[0]!r}: {recipe} takes no settings; copy and edit it.")
    folder = _unused(Path(output or f"runs/{Path(recipe).stem}"))
    make_base(values, folder)
    return folder


def base_phases(recipe: str, *, seed: int | None = None) -> Mapping[str, Any]:
    """The recipe of a base model.

    Args:
        recipe: path or name.
        seed: added to the seeds of the recipe and of its phases; None leaves them.

    Raises:
        UsageError: the recipe has no phases, names no known base, lacks a setting or has one that
            is not known.
    """
    values = read(recipe)
    if "phases" not in values:
        raise UsageError(f"phases = {recipe!r}: must have [[phases]], as korean-base has.")
    base_of(values).check(values)
    if seed is None:
        return values
    phases = [_shifted(phase, seed) for phase in values["phases"]]
    return _shifted(values, seed) | {"phases": phases}


def _shifted(table: Mapping[str, Any], by: int) -> dict[str, Any]:
    return {key: each + by if key == "seed" else each for key, each in table.items()}


def base_of(values: Mapping[str, Any]) -> Base:
    """The kind of base model that a recipe makes.

    Raises:
        UsageError: it names no known one.
    """
    name = values.get("base", "word_problems")
    if name not in BASES:
        raise UsageError(f"base = {name!r}: no such base; {suggest(name, BASES)}")
    return BASES[name]


def make_base(values: Mapping[str, Any], folder: str | Path) -> None:
    """Train a base model from nothing by the phases of a recipe, and save it.

    The folder appears when it is complete.

    Raises:
        UsageError: no such base, or a setting that the recipe lacks or that is not known.
    """
    base = base_of(values)
    totals = {f"phase {n}": phase["steps"] for n, phase in enumerate(values["phases"], start=1)}
    with closing(show_progress(totals)) as progress:

        def on_step(phase: int, step: int, update: Update) -> None:
            shown = {"supervised_loss": update.loss, "grad_norm": update.grad_norm}
            progress.step(f"phase {phase}", step, shown)

        def write(place: str) -> None:
            base.make(place, recipe=values, on_step=on_step)

        replace_folder(Path(folder), write)


def supervise_config(config: Config, folder: str | Path) -> float:
    """Train the model of a configuration by its `[warmup]` section and save it.

    The folder appears when it is complete.

    Returns:
        The mean loss per token over the last tenth of the steps.
    """
    with closing(show_progress({})) as progress:
        policy = load_configured(config)
        policy.model.to(best_device())
        loss = warm_up(config, policy, progress=progress)
        replace_folder(Path(folder), lambda place: save(policy, place))
    return loss


def _unused(folder: Path) -> Path:
    """The folder, which must be empty: files of another model would mix with the new ones."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output = {str(folder)!r}: is not empty; choose another folder.")
    return folder

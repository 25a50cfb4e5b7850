"""Commands that compare algorithms: compare, variance."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import (
    JsonFile,
    MaybeRecipe,
    Overrides,
    Recipe,
    TrustRecipe,
    algorithm_names,
    write_json,
)
from groupwise.errors import UsageError

Rows = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        help="Algorithms, separated by commas; NAME=ROW renames one, NAME=@MODEL adds a model "
        "that is only evaluated.",
        autocompletion=algorithm_names,
    ),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="An experiment file that replaces the options above."),
]


Seeds = Annotated[int, typer.Option(min=1, help="Number of paired runs of each algorithm.")]
Match = Annotated[str, typer.Option(help="Budget that all runs share: samples, tokens or seconds.")]
Tune = Annotated[
    bool, typer.Option("--tune-lr", help="Tune each learning rate on two separate seeds.")
]
MatchedRms = Annotated[
    bool, typer.Option("--matched-rms", help="Scale advantages to a root mean square of 1.")
]
Against = Annotated[
    str | None, typer.Option(metavar="A", help="Baseline of the comparison; default: the last.")
]
Threshold = Annotated[float, typer.Option(help="Accuracy at which a run counts as successful.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Parallel runs; default: one per core.")]
Only = Annotated[
    str,
    typer.Option(
        metavar="advantage", help="Use the baseline's settings for everything but the advantage."
    ),
]
PlanOnly = Annotated[
    bool, typer.Option("--plan-only", help="Write the plan, experiment.toml, and stop.")
]
Folder = Annotated[
    Path, typer.Option(metavar="DIR", help="Output folder; an experiment in it is continued.")
]


def compare(
    context: typer.Context,
    recipe: MaybeRecipe = None,
    algorithms: Rows = "softrank,grpo",
    seeds: Seeds = 5,
    match: Match = "samples",
    tune_lr: Tune = False,
    matched_rms: MatchedRms = False,
    against: Against = None,
    threshold: Threshold = 0.6,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    jobs: Jobs = None,
    plan: ExperimentFile = None,
    only: Only = "",
    plan_only: PlanOnly = False,
    output: Folder = Path("runs/compare"),
    json_file: JsonFile = None,
) -> None:
    """Compare algorithms on paired seeds, with intervals of every difference."""
    from rich.console import Console

    from groupwise import experiments
    from groupwise.config import trusted_overrides
    from groupwise.evaluation import terminal_table

    given = overrides or []
    if (plan is None) == (recipe is None):
        raise UsageError("compare: must be given either a recipe or --plan FILE.")
    if plan is not None:
        _refuse_beside_plan(context)
        chosen = experiments.read_plan(plan)
    else:
        chosen = experiments.planned(
            str(recipe),
            algorithms=[name.strip() for name in algorithms.split(",")],
            seeds=seeds,
            match=match,
            tune_lr=tune_lr,
            matched_rms=matched_rms,
            against=against,
            threshold=threshold,
            only=only,
            overrides=[*(trusted_overrides(str(recipe)) if trust_recipe else []), *given],
        )
    differences = chosen.differences()
    for line in differences:
        print(line, file=sys.stderr)
    if differences:
        option = "--only advantage" if plan is None else 'only = "advantage" in the file'
        print(f"{option} removes the differences between algorithms.", file=sys.stderr)
    if plan_only:
        print(experiments.write_plan(chosen, output))
        return
    found = experiments.run_plan(chosen, output=output, jobs=jobs)
    analysis = found.analysis
    said = [*analysis.comparison.verdicts, *analysis.remarks()]
    Console().print(terminal_table(analysis.table(), verdicts=said))
    print(f"\nreport  {found.folder / 'report.html'}")
    write_json(json_file, analysis.as_dict())


def variance(
    recipe: Recipe,
    advantages: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Advantages to measure, separated by commas; default: all."
        ),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Algorithms to measure, separated by commas, or all."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Number of groups.")] = 64,
    group: Annotated[
        int | None, typer.Option(min=2, help="Completions per group; default: as in the recipe.")
    ] = None,
    batches: Annotated[int, typer.Option(min=2, help="Batches for the reference gradient.")] = 16,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    json_file: JsonFile = None,
    picture: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Plot the result (png, svg or pdf)."),
    ] = None,
) -> None:
    """Measure signal and noise of gradient estimators at a fixed policy.

    All estimators see the same rollouts and exact gradients of the model; nothing is trained.
    """
    from rich.console import Console

    from groupwise.config import load
    from groupwise.experiments.variance import variance
    from groupwise.experiments.variance_view import variance_table, write_variance_png

    sized = [*(overrides or []), *([f"group_size={group}"] if group else [])]
    console = Console(stderr=True)
    with console.status("loading") as status:
        found = variance(
            load(recipe, sized, trust_recipe=trust_recipe),
            advantages=_names(advantages) or ([] if algorithms else ["all"]),
            algorithms=_names(algorithms),
            prompts=prompts,
            batches=batches,
            heartbeat=status.update,
        )
    Console().print(variance_table(found))
    if picture is not None:
        print(f"\npicture  {write_variance_png(found, picture)}")
    write_json(json_file, found.as_dict())


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in (listed or "").split(",") if name.strip()]


def _refuse_beside_plan(context: typer.Context) -> None:
    """Raise an error for options that the experiment file sets."""
    for name in context.params.keys() - {"plan", "plan_only", "jobs", "output", "json_file"}:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = {"overrides": "set"}.get(name, name).replace("_", "-")
            raise UsageError(f"--{option}: is set by the experiment file; remove the option.")

"""The command `pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import pipeline_names
from groupwise.cli.output import print_table

if TYPE_CHECKING:
    from groupwise.pipelines import StageState


def pipeline(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|NAME]",
            help="A pipeline file (TOML) or the name of a packaged one; default: list them.",
            autocompletion=pipeline_names,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="STAGE.KEY=VALUE",
            help="Override a setting of a stage or of its recipe; * for every stage; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder of all stages.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every stage.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Run with this many seeds, and report results over them."),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Repeat this stage and all later ones."),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="STAGE", help="Run only this stage.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")
    ] = False,
) -> None:
    """Run stages one after the other: sft, sample, select, train, average, eval and others.

    Stages that are up to date are skipped; an interrupted pipeline continues where it stopped.
    """
    from groupwise.pipelines import packaged_pipelines, plan_table, read_pipeline, run_pipeline
    from groupwise.pipelines.over_seeds import of_seeds, run_seeds

    if file is None:
        print_table(("pipeline", "file"), [(n, str(p)) for n, p in packaged_pipelines().items()])
        return
    found = read_pipeline(file, overrides or [], output=output, seed=seed)
    if dry_run:
        for run in [found] if seeds is None else of_seeds(found, seeds):
            _print_plan(run.title, run.output, plan_table(run))
        return
    if seeds is not None:
        report = run_seeds(found, seeds=seeds, first=first, only=only)
    else:
        report = run_pipeline(found, first=first, only=only)
    print(report.read_text(encoding="utf-8"))
    print(report)


def _print_plan(title: str, output: Path, states: Sequence[StageState]) -> None:
    """One line per stage: inputs, outputs and state."""
    print(f"{title}\n{output}")
    rows = [
        (
            str(number),
            state.stage.name,
            state.stage.kind.shown,
            ", ".join(dict.fromkeys(state.stage.takes.values())) or "-",
            state.stage.kind.output,
            state.state,
            ("missing: " + ", ".join(state.missing)) if state.missing else "",
        )
        for number, state in enumerate(states, start=1)
    ]
    print_table(("", "stage", "kind", "takes", "leaves", "state", "note"), rows)

"""The stage that reports on training runs: curves, tables and rollouts as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.pipelines.stages import OUTPUTS, Figures, stage
from groupwise.rundir.files import replace_text


@stage("figures")
def report(work: Any, *, models: Sequence[str], figure: str = "") -> Figures:
    """Report on the runs that trained models, side by side: `groupwise report`.

    Args:
        models: outputs of the stages whose runs are shown.
        figure: also draw this metric, or "paper", as a picture.

    Raises:
        UsageError: a model that no run trained, or no such metric.
    """
    from groupwise.report import read_runs, write_comparison_report, write_png, write_run_report

    folders = [Path(model).parent for model in models]
    names = [work.names.get(model, model) for model in models]
    page = work.folder / "report.html"
    if len(folders) == 1:
        write_run_report(folders[0], page)
    else:
        title = " against ".join(names)
        write_comparison_report(read_runs(folders), title=title, output=page)
    if figure:
        write_png(read_runs(folders), work.folder / f"figure-{figure}.png", figure=figure)
    figures = {"runs": names}
    replace_text(work.folder / OUTPUTS["figures"], json.dumps(figures) + "\n")
    return figures

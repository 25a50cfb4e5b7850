"""The report page: one self-contained HTML file without network access or foreign code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from groupwise.errors import RunError, UsageError
from groupwise.report import sections
from groupwise.report.comparison import changes, compare_runs, results_table
from groupwise.report.curves import (
    Chart,
    evaluation_charts,
    labels_of,
    metric_charts,
    seeds_of,
)
from groupwise.report.data import RunData
from groupwise.report.rollouts import payload
from groupwise.report.text import embedded, escaped
from groupwise.report.timeline import timeline
from groupwise.rundir.files import replace_text

SCRIPTS = ("charts.js", "rollouts.js", "page.js")
# Shown at once; other metrics are under "more curves".
FIRST = ("reward", "signal_share", "entropy", "grad_norm", "length", "tokens_per_second")
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M2 13 6 7l3 3 5-8' fill='none' stroke='%232563a8' stroke-width='2'/%3E%3C/svg%3E"
)


def write_run_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of one run.

    Args:
        run_dir: the run directory.
        output: the file to write; `report.html` in the run directory where None.

    Returns:
        The file written.

    Raises:
        UsageError: no such run.
        RunError: the file cannot be written.
    """
    run = RunData.read(run_dir)
    table = results_table([run])
    told = {"verdicts": changes(table)}
    page = _page([run], title=_name(run, Path(run_dir)), kind="run", comparison=told)
    return _written(page, Path(output) if output else Path(run_dir) / "report.html")


def write_comparison_report(
    runs: Sequence[RunData],
    *,
    title: str,
    output: str | Path,
    comparison: Mapping[str, Any] | None = None,
    magnified: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report of several runs side by side.

    Args:
        runs: at least one; colours follow the order of their labels.
        title: heading.
        output: the file to write.
        comparison: `{"verdicts": [sentence], "note": str, "contrasts": [...]}` as
            `Comparison.as_dict()` gives it; made from the runs where None.
        magnified: one group, `{"prompt", "completions", "advantages": {label: [A]}, "step"}`.

    Returns:
        The file written.

    Raises:
        UsageError: no runs.
        RunError: the file cannot be written.
    """
    if not runs:
        raise UsageError("runs: must contain at least one run.")
    found = compare_runs(runs).as_dict() if comparison is None else comparison
    page = _page(
        runs,
        title=title,
        kind="comparison",
        comparison=found,
        magnified=magnified,
    )
    return _written(page, Path(output))


def _page(
    runs: Sequence[RunData],
    *,
    title: str,
    kind: str,
    comparison: Mapping[str, Any],
    magnified: Mapping[str, Any] | None = None,
) -> str:
    labels = labels_of(runs)
    held_out = evaluation_charts(runs)
    charts = metric_charts(runs) + held_out
    packed = payload(runs)
    body = "".join(
        (
            sections.header(title, kind, runs),
            sections.findings(comparison, seeds=seeds_of(runs) if kind == "comparison" else 0),
            sections.alerts(runs),
            _curves(charts, seeds_of(runs)),
            sections.results(results_table(runs), labels),
            sections.magnifier(magnified, labels),
            sections.before_after(runs),
            _more_curves(charts, [chart.key for chart in held_out]),
            sections.timings(runs),
            timeline(runs[0]) if kind == "run" else "",
            sections.browser(packed, sum(run.unread for run in runs)),
            sections.footer(runs),
        )
    )
    data = {
        "labels": labels,
        "charts": [chart.as_dict() for chart in charts],
        "runs": [{"label": label, "seed": seed} for label, seed in packed.runs] if packed else [],
    }
    blocks = _block("report-data", embedded(data))
    if packed:
        blocks += _block("rollout-data", packed.text, compressed=packed.compressed)
    return _document(title, body + blocks)


def _document(title: str, body: str) -> str:
    """The HTML file; its content security policy allows the inline style and script alone."""
    style = _asset("report.css")
    script = '"use strict";\n' + "\n".join(_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{content_hash(style)}'; "
        f"script-src '{content_hash(script)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="{_ICON}"><title>{escaped(title)}</title>'
        f"<style>{style}</style></head><body><main>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _curves(charts: Sequence[Chart], seeds: int) -> str:
    """The main curve, full width."""
    hero = _hero(charts)
    if hero is None:
        return ""
    how = (
        "bold: mean over seeds; thin: single seeds, moving average of 5 points; "
        "band: 95 % Student's t interval of the mean"
        if seeds > 1
        else "bold: moving average of 5 points; thin: raw values"
    )
    over = "per step" if hero.axis == "steps" else f"over {hero.axis}"
    return (
        f'<section id="curves"><h2>{escaped(hero.title)} {escaped(over)}</h2>'
        f'{sections.chart_places([hero.key], hero=True)}<p class="note">Training rollouts, {how}.'
        "</p></section>"
    )


def _more_curves(charts: Sequence[Chart], evaluated: Sequence[str]) -> str:
    """The other curves: the main metrics and first held-out figures, the rest on demand."""
    hero = _hero(charts)
    rest = [chart.key for chart in charts if hero is None or chart.key != hero.key]
    first = [*(key for key in rest if key in FIRST), *evaluated[:3]]
    others = [key for key in rest if key not in first]
    if not rest:
        return ""
    more = f"<details><summary>{len(others)} more curves</summary>"
    more += f'<div class="grid">{sections.chart_places(others)}</div></details>'
    return (
        '<section id="diagnostics"><h2>Diagnostics</h2>'
        f'<div class="grid">{sections.chart_places(first)}</div>{more if others else ""}</section>'
    )


def _hero(charts: Sequence[Chart]) -> Chart | None:
    ranked = [chart for key in ("accuracy", "reward") for chart in charts if chart.key == key]
    return (ranked or [*charts, None])[0]


def _name(run: RunData, folder: Path) -> str:
    return f"{run.algorithm} · {folder.resolve().name}"


def _block(name: str, text: str, *, compressed: bool = False) -> str:
    kind = "application/octet-stream" if compressed else "application/json"
    return f'<script type="{kind}" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (resources.files("groupwise.report") / "assets" / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """What a content security policy calls an inline style or script."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _written(page: str, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None
    replace_text(path, page)
    return path

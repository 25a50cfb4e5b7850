"""The report of a pipeline: the figures of every stage and model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.evaluation import title_of
from groupwise.evaluation.tables import is_share
from groupwise.pipelines.eval_stage import sections_of
from groupwise.rundir.files import replace_text


def write_report(title: str, folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write `report.json` and `report.md` of the finished stages.

    Args:
        title: heading.
        folder: of the pipeline.
        records: of the stages, as `stage.json` holds them.

    Returns:
        The page, `report.md`.
    """
    values = {"title": title, "stages": [dict(record) for record in records]}
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_text(folder / "report.json", text)
    path = folder / "report.md"
    replace_text(path, page(title, records))
    return path


def page(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The report as Markdown."""
    lines = [f"# {title}", "", "| stage | kind | takes | result |", "|---|---|---|---|"]
    for record in records:
        takes = ", ".join(record["inputs"]) or "–"
        lines.append(
            f"| {record['stage']} | {record['kind']} | {takes} | {_brief(record['figures'])} |"
        )
    for record in records:
        sections = sections_of(record["figures"], record["stage"])
        for name, models in sections.items():
            lines += ["", f"## {name}", "", *table_lines(models)]
        if sections:
            lines += ["", *(f"* {verdict}" for verdict in record["figures"]["verdicts"])]
    return "\n".join(lines) + "\n"


def _brief(figures: Mapping[str, Any]) -> str:
    """The figures of a stage in one cell."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            if name in ("models", "sections"):
                parts.append(f"{len(value)} {name}")
            else:
                inside = ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
                parts.append(f"{title_of(name)}: {inside}")
        elif not isinstance(value, list) and value is not None:
            parts.append(f"{title_of(name)} {_shown(value)}")
    return "; ".join(parts).replace("|", "\\|") or "–"


def table_lines(models: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[str]:
    """The figures of several models, each with its interval."""
    names = list(dict.fromkeys(name for figures in models.values() for name in figures))
    lines = ["| | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for name in names:
        cells = [figures.get(name) for figures in models.values()]
        known = [cell["value"] for cell in cells if cell and cell["value"] is not None]
        percent = is_share(name, [float(value) for value in known])
        unit = " %" if percent else ""
        lines.append(
            f"| {title_of(name)}{unit} | " + " | ".join(_cell(c, percent) for c in cells) + " |"
        )
    return lines


def _cell(cell: Mapping[str, float | None] | None, percent: bool) -> str:
    if cell is None or cell["value"] is None:
        return "–"
    scale = 100 if percent else 1
    low, high = cell["low"], cell["high"]
    interval = "" if low is None or high is None else f" [{scale * low:.3g}, {scale * high:.3g}]"
    return f"{scale * cell['value']:.3g}{interval}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

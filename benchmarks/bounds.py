"""Draws bounds.png: the time of each stage of a step over the least time the machine could take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.report.png import ACCENTS, INK, RULE, SOFT, STYLE

STAGES = {
    "decode-fp32": ("Decoding step\nfloat32", "over_bound"),
    "decode-bf16": ("Decoding step\nbfloat16", "over_bound"),
    "update-fp32": ("Update\nfloat32", "over_bound"),
    "update-bf16": ("Update\nbfloat16", "over_bound"),
    "long-prompt-fp32": ("Update, long prompts\nfloat32", "with_attention"),
    "long-prompt-bf16": ("Update, long prompts\nbfloat16", "with_attention"),
}
"""The cases of update.py that have a target: their name in the picture, and the figure of it."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stage: its time over its bound with the range, the time in seconds, and the target."""

    name: str
    ratio: Mapping[str, float]
    seconds: float
    target: float


def bars(rows: Sequence[Mapping[str, Any]], targets: Mapping[str, float]) -> list[Bar]:
    """The stages that were measured, in the order of `STAGES`.

    Args:
        rows: figures of update.py; of several rows of a case, the first counts.
        targets: the most that time may be over the bound, by case.
    """
    first = {row["case"]: row for row in reversed(rows)}
    return [
        Bar(
            name=name,
            ratio=first[case][figure],
            seconds=first[case]["ours_seconds"],
            target=targets[case],
        )
        for case, (name, figure) in STAGES.items()
        if figure in first.get(case, {})
    ]


def draw(found: Sequence[Bar], output: Path) -> None:
    """Draw the stages as bars, with the range of the repeats, the bound and the targets."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.62 * len(found) + 1.1), layout="constrained")
        axes = figure.subplots()
        for place, bar in enumerate(found):
            middle, low, high = (bar.ratio[name] for name in ("median", "low", "high"))
            axes.barh(place, 1, height=0.5, color=ACCENTS[0])
            axes.barh(place, middle - 1, left=1, height=0.5, color=ACCENTS[0], alpha=0.35)
            axes.plot([low, high], [place, place], color=INK, linewidth=1)
            axes.plot([bar.target] * 2, [place - 0.34, place + 0.34], color=ACCENTS[1], linewidth=2)
            said = f"{middle:.2f}   {_seconds(bar.seconds)} of {_seconds(bar.seconds / middle)}"
            axes.text(max(high, bar.target) + 0.04, place, said, va="center", color=INK)
        axes.set_yticks(range(len(found)), [bar.name for bar in found])
        axes.invert_yaxis()
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_xlim(0, max(max(bar.ratio["high"], bar.target) for bar in found) + 0.7)
        axes.set_xlabel("time / bound; red: target, thin line: range of the repeats", color=SOFT)
        axes.set_title("Time of each stage against its bound", loc="left", color=INK)
        axes.tick_params(length=0, colors=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(RULE)
        figure.savefig(output, dpi=150, metadata={"Software": None})


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.1f} ms"

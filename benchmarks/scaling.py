"""How the time and the memory of a step grow with each of its sizes, one at a time.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json

From a base step, one size is changed at a time; every point is a fresh process. `growth` is the
exponent between a point and the one before it, of time and of memory: 1 is proportional growth. The
batch is the number of prompts; the model is named by its shape.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import harness
from harness import Report, of, say, spread
from shapes import SHAPES, Shape, as_text, random_prompts, save_model

COLUMNS = (
    "case", "value", "precision", "ours_seconds", "ours_range", "ours_peak_mb", "growth", "stages",
)  # fmt: skip
BASE_SHAPE = Shape(
    hidden=256, feed_forward=1024, layers=4, heads=8, key_value_heads=4, vocab=8192, context=4096
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step."""

    shape: Shape = BASE_SHAPE
    prompts: int = 8
    group: int = 8
    prompt: int = 128
    completion: int = 64

    @property
    def parameters(self) -> int:
        """Of embeddings and matrices."""
        s = self.shape
        dim = s.hidden // s.heads
        attention = 2 * s.hidden * s.hidden + 2 * s.hidden * dim * s.key_value_heads
        layer = attention + 3 * s.hidden * s.feed_forward
        return s.vocab * s.hidden + s.layers * layer


def _axes() -> dict[str, list[tuple[int, Point]]]:
    base = Point()
    shapes = (SHAPES["1m"], BASE_SHAPE, SHAPES["42m"], SHAPES["qwen2.5-0.5b"])
    models = [Point(shape=shape) for shape in shapes]
    return {
        "group": [(n, replace(base, group=n)) for n in (4, 8, 16, 32, 64)],
        "prompt": [(n, replace(base, prompt=n)) for n in (64, 128, 256, 512, 1024, 2048)],
        "completion": [(n, replace(base, completion=n)) for n in (32, 64, 128, 256, 512, 1024)],
        "batch": [(n, replace(base, prompts=n)) for n in (2, 4, 8, 16, 32)],
        "vocabulary": [
            (n, replace(base, shape=replace(BASE_SHAPE, vocab=n)))
            for n in (2048, 8192, 32768, 151936)
        ],
        "model": [(point.parameters, point) for point in models],
    }


AXES = _axes()


def shrunk(point: Point) -> Point:
    return replace(point, prompts=2, group=2, prompt=16, completion=8)


def measure(point: Point, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """One point in a fresh process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prompts = random_prompts(point.shape, count=point.prompts, tokens=point.prompt)
        spec = {
            "model": save_model(point.shape, folder),
            "endless": True,
            "precision": "float32",
            "prompts": [as_text(tokens) for tokens in prompts],
            "answers": [""] * point.prompts,
            "reward": "checksum",
            "group": point.group,
            "max_tokens": point.completion,
            "learning_rate": 1e-6,
            "threads": options.threads,
            "seed": 0,
            "rank": None,
            "quantized": False,
            "settings": {},
        }
        worker, versions = harness.start(stack, "ours/step.py", spec)
        report.version("ours", versions)
        first = worker.ask("step")
        answers = [worker.ask("step") for _ in range(options.repeats)]
    seconds = of(answers, "seconds")
    return {
        "precision": "float32",
        "ours_seconds": statistics.median(seconds),
        "ours_range": spread(seconds),
        "cpu_seconds": statistics.median(of(answers, "cpu_seconds")),
        "ours_peak_mb": max(of([first, *answers], "peak_mb")),
        "stages": harness.stages(answers),
        "repeats": {"ours": answers},
    }


def growth(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, float] | None:
    """Exponents of time, CPU time and memory between two points of an axis."""
    if before is None:
        return None
    step = math.log(now["value"] / before["value"])
    figures = {"time": "ours_seconds", "cpu": "cpu_seconds", "memory": "ours_peak_mb"}
    return {name: math.log(now[key] / before[key]) / step for name, key in figures.items()}


def main() -> None:
    options = harness.arguments(__doc__ or "", list(AXES)).parse_args()
    report = Report("scaling", options)
    for name in harness.chosen(options, list(AXES), list(AXES)):
        before = None
        for value, point in AXES[name][: 2 if options.quick else None]:
            say(f"{name} = {value}")
            figures = measure(shrunk(point) if options.quick else point, options, report)
            row = {"case": name, "value": value, **figures}
            row["growth"] = growth(before, row)
            report.add(row)
            before = row
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

"""The demonstration: SoftRank-GRPO and GRPO on the bundled model, with the same prompts and seeds.

Both algorithms start from one checkpoint and draw from the same random streams, so their first
batches are identical; later differences come from the algorithms.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config import Config, load
from groupwise.config.data import rendered
from groupwise.errors import UsageError
from groupwise.evaluation.measure import Measurement
from groupwise.prompts.generators.word_problems import Split, word_problems
from groupwise.prompts.templates import Rendered
from groupwise.report import (
    RunData,
    compare_runs,
    write_comparison_report,
    write_png,
)
from groupwise.rundir.files import replace_text
from groupwise.rundir.foreign import refuse_linked_folders
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.prepare import Prepared, evaluation_row, prepare
from groupwise.types import ScoredGroups

ALGORITHMS = ("softrank", "grpo")
SPLITS: tuple[Split, ...] = ("held_out", "held_out_templates", "larger_numbers")
FIGURES = {"accuracy": "sampled", "greedy": "greedy", "pass_at_8": "pass_at_8"}


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """The result of a demonstration.

    Attributes:
        folder: with one run directory per algorithm and seed, `summary.json`, `report.html` and
            `report.png`.
        runs: in the form that reports read.
        summary: the content of `summary.json`.
    """

    folder: Path
    runs: Sequence[RunData]
    summary: Mapping[str, Any]


def demo(
    *,
    seeds: int = 1,
    output: str | Path = "runs/demo",
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> Demonstration:
    """Train the bundled model with each algorithm, measure before and after, and report.

    Args:
        seeds: number of paired runs; the comparison of a single one is only an illustration, as the
            report says.
        output: output folder; the files of an earlier demonstration there are replaced.
        overrides: settings of the recipe "word-problems", as `--set` takes them.
        progress: shows the runs; None shows them on standard error.

    Raises:
        UsageError: an invalid setting, or a folder that contains something else.
    """
    if seeds < 1:
        raise UsageError(f"seeds = {seeds}: must be at least 1.")
    start, folder = time.perf_counter(), _emptied(Path(output))
    configs = {
        (name, seed): _config(name, seed, folder, overrides)
        for seed in range(seeds)
        for name in ALGORITHMS
    }
    showing = progress or show_progress({_title(n, s): c.steps for (n, s), c in configs.items()})
    magnified = None
    try:
        for seed in range(seeds):
            pair = {name: configs[name, seed] for name in ALGORITHMS}
            seen = _train_pair(pair, seed=seed, progress=showing)
            magnified = magnified or seen
    finally:
        if progress is None:
            showing.close()
    runs = [RunData.read(config.output, label=name) for (name, _), config in configs.items()]
    comparison = compare_runs(runs, against="grpo").as_dict()
    summary = {
        "seconds": round(time.perf_counter() - start, 1),
        "runs": [_row(run) for run in runs],
        "comparison": comparison,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    replace_text(folder / "summary.json", text)
    write_comparison_report(
        runs,
        title="SoftRank-GRPO and GRPO on word problems",
        output=folder / "report.html",
        comparison=comparison,
        magnified=magnified,
    )
    write_png(runs, folder / "report.png", title="Word problems: learning curves and results")
    return Demonstration(folder=folder, runs=runs, summary=summary)


def _train_pair(
    configs: Mapping[str, Config], *, seed: int, progress: Progress
) -> Mapping[str, Any] | None:
    """Train every algorithm with one seed, alternating their steps; returns an example group."""
    prepared = {
        name: prepare(config, progress=progress, name=_title(name, seed), eval_prompts=[])
        for name, config in configs.items()
    }
    try:
        first = next(iter(prepared.values()))
        ready = {split: _held_out(first, split) for split in SPLITS}
        base = {split: first.measure(each) for split, each in ready.items()}
        for each in prepared.values():
            _record(each, base, ready)
        magnified = None
        for _ in range(first.config.steps):
            for each in prepared.values():
                scored = each.trainer.advance().scored
                magnified = magnified or _magnify(scored, prepared)
        for each in prepared.values():
            _record(each, {split: each.measure(r) for split, r in ready.items()}, ready)
            each.trainer.finish()
    finally:
        for each in prepared.values():
            each.close()
    return magnified


def _held_out(prepared: Prepared, split: Split) -> Rendered:
    prompts = word_problems(prepared.config.evaluation.prompts, split=split)
    return rendered(prepared.config, prepared.policy, prompts)


def _record(
    prepared: Prepared, results: Mapping[str, Measurement], ready: Mapping[str, Rendered]
) -> None:
    """Log the evaluation of each split, with some example answers."""
    trainer = prepared.trainer
    for split, result in results.items():
        row = evaluation_row(result, split=split)
        row["samples"] = [
            {
                "prompt": {"id": prompt.id, "text": str(prompt), "answer": prompt.answer},
                "text": group.completions[0].text,
                "correct": float(correct[0]),
            }
            for prompt, group, correct in zip(
                ready[split].prompts[:6], result.groups, result.sampled, strict=False
            )
        ]
        trainer.monitor.write_evaluation(trainer.done, row)


def _magnify(scored: ScoredGroups, prepared: Mapping[str, Prepared]) -> Mapping[str, Any] | None:
    """The first group with between two and half right answers, under both algorithms."""
    rewards, valid = scored.scores.total, scored.scores.valid
    for place, group in enumerate(scored.groups):
        right = int((rewards[place] > 0).sum())
        if 2 <= right <= len(group) // 2 and bool(valid[place].all()):
            data = {"rewards": rewards[place : place + 1]}
            return {
                "prompt": {"text": str(group.prompt), "answer": group.prompt.answer},
                "completions": [
                    {"text": c.text, "reward": float(r), "correct": float(r > 0)}
                    for c, r in zip(group.completions, rewards[place], strict=True)
                ],
                "advantages": {
                    name: each.trainer.algorithm.advantage(data)[0].tolist()
                    for name, each in prepared.items()
                },
                "step": next(iter(prepared.values())).trainer.done,
            }
    return None


def _row(run: RunData) -> dict[str, Any]:
    """One run of the summary: held-out figures before and after."""
    row: dict[str, Any] = {"algorithm": run.algorithm, "seed": run.seed}
    held_out = [e["figures"] for e in run.evaluations if e["split"] == "held_out"]
    for name, figure in FIGURES.items():
        row[f"{name}_before"] = held_out[0].get(figure)
        row[f"{name}_after"] = held_out[-1].get(figure)
    return row


def _config(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> Config:
    own = [f"algorithm.name={name}", f"seed={seed}", f"output={folder / f'{name}-seed{seed}'}"]
    return load("word-problems", [*overrides, *own])


def _title(name: str, seed: int) -> str:
    return f"{name} #{seed}"


def _emptied(folder: Path) -> Path:
    """The folder, without the files of an earlier demonstration; nothing else is ever deleted."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / ".demo").exists():
            raise UsageError(
                f"output = {str(folder)!r}: is not empty and contains no earlier demonstration; "
                "choose another folder with --output."
            )
        refuse_linked_folders(folder)
        for run in folder.iterdir():
            if re.fullmatch(rf"({'|'.join(ALGORITHMS)})-seed\d+", run.name):
                shutil.rmtree(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".demo").touch()
    return folder

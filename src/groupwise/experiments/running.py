"""Run an experiment: optional tuning, then each arm on each seed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config import load
from groupwise.errors import UsageError, warn
from groupwise.evaluation.verdicts import MIN_SEEDS
from groupwise.experiments.analysis import Analysis, analyse, choices
from groupwise.experiments.jobs import Job
from groupwise.experiments.plan import Arm, Plan, Tuning, differing, make_plan, read_plan, toml
from groupwise.experiments.progress_table import ProgressTable
from groupwise.experiments.results import Result, hash_of, place, read_results
from groupwise.experiments.tuning import Choice, at_rate, equal_rate_runs
from groupwise.experiments.worker_pool import WorkerPool
from groupwise.report import write_comparison_report, write_png
from groupwise.report.data import settings_of
from groupwise.rundir.files import RUN_FILES, replace_text
from groupwise.rundir.foreign import refuse_foreign_files
from groupwise.rundir.lock import RunLock

EXPERIMENT_FILES = ("comparison.json", "report.png", "results", "runs", "logs", "base")
"""What an experiment writes beside its plan, in addition to what its runs do."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A finished experiment.

    Attributes:
        folder: with `experiment.toml`, `results/`, `comparison.json`, `report.html`, `report.png`
            and the run directories.
        analysis: comparison, verdicts and tables.
    """

    folder: Path
    analysis: Analysis


def compare(
    recipe: str | Path,
    *,
    algorithms: Sequence[str],
    seeds: int | Sequence[int] = 5,
    match: str = "samples",
    tune_lr: bool = False,
    matched_rms: bool = False,
    against: str | None = None,
    threshold: float = 0.6,
    only: str = "",
    overrides: Sequence[str] = (),
    output: str | Path = "runs/compare",
    jobs: int | None = None,
) -> Experiment:
    """Compare algorithms on paired seeds and report the differences that exceed the noise.

    Args:
        recipe: a packaged recipe by name, or the path of a TOML file.
        algorithms: rows of the table; `label=row` sets the label of an arm, and `label=@PATH` makes
            a finished model an arm.
        seeds: number of seeds, or the seeds.
        match: budget that runs of a seed share: "samples", "tokens" or "seconds".
        tune_lr: first choose each arm's learning rate on two other seeds.
        matched_rms: divide the advantages of every batch by their root mean square.
        against: label of the reference arm; None takes the last.
        threshold: accuracy that counts as learned.
        only: "advantage" gives every arm the reference arm's row but for the advantage.
        overrides: settings of every arm, in the form of `--set`.
        output: folder; an interrupted experiment in it is continued.
        jobs: number of parallel runs; None takes one per core.

    Returns:
        The experiment; its report is written.

    Raises:
        UsageError: a setting that cannot work, or a folder with another experiment.
        KeyboardInterrupt: after Ctrl-C; the same call continues.
    """
    plan = planned(
        recipe,
        algorithms=algorithms,
        seeds=seeds,
        match=match,
        tune_lr=tune_lr,
        matched_rms=matched_rms,
        against=against,
        threshold=threshold,
        only=only,
        overrides=overrides,
    )
    return run_plan(plan, output=output, jobs=jobs)


def planned(
    recipe: str | Path,
    *,
    algorithms: Sequence[str],
    seeds: int | Sequence[int],
    match: str,
    tune_lr: bool,
    matched_rms: bool,
    against: str | None,
    threshold: float,
    only: str,
    overrides: Sequence[str],
) -> Plan:
    """The plan of `compare`, without running it; arguments as there."""
    pairs = [text.partition("=") for text in algorithms]
    values: dict[str, Any] = {
        "title": " and ".join(label for label, _, _ in pairs) + f" on {Path(recipe).stem}",
        "recipe": str(recipe),
        "set": [*overrides, *(["algorithm.advantage.rms=1.0"] if matched_rms else [])],
        "seeds": list(range(seeds)) if isinstance(seeds, int) else list(seeds),
        "match": match,
        "threshold": threshold,
        "against": against or "",
        "only": only,
        "arms": [_arm(label, row) for label, _, row in pairs],
    }
    if tune_lr:
        values["tuning"] = Tuning(equal_rates=match == "samples").model_dump()
    return make_plan(values)


def _arm(label: str, row: str) -> dict[str, str]:
    """An arm as it is written: `grpo`, `mine=grpo` or `sft=@runs/sft/final`."""
    if row.startswith("@"):
        return {"label": label, "model": row[1:]}
    return {"label": label, "algorithm": row or label}


def write_plan(plan: Plan, output: str | Path) -> Path:
    """Write the plan of an experiment without running it; `run_plan` runs it later.

    Raises:
        UsageError: the folder holds another experiment.
    """
    folder = Path(output)
    with closing(RunLock(folder)):
        _fix_plan(plan, folder)
    return folder / "experiment.toml"


def run_plan(plan: Plan, *, output: str | Path, jobs: int | None = None) -> Experiment:
    """Run what has no result yet, and write the report.

    Args:
        plan: from `read_plan` or `make_plan`.
        output: folder; an experiment in it must have the same plan.
        jobs: number of parallel runs; None takes one per core.

    Raises:
        UsageError: the folder holds another experiment, or a run cannot work as it is set up.
        RunError: every run of the reference arm failed.
        KeyboardInterrupt: after Ctrl-C; the same call continues.
    """
    if len(plan.seeds) < MIN_SEEDS:
        warn(f"seeds = {list(plan.seeds)}: a verdict needs at least {MIN_SEEDS} seeds.")
    folder = Path(output)
    refuse_foreign_files(folder, (*RUN_FILES, *EXPERIMENT_FILES))
    with closing(RunLock(folder)):
        _fix_plan(plan, folder)
        with closing(ProgressTable()) as progress:
            pool = WorkerPool(jobs or _cores(), folder=folder / "logs", progress=progress)
            try:
                with closing(pool):
                    _Runner(plan=plan, folder=folder, pool=pool, progress=progress).run()
            except KeyboardInterrupt:
                progress.log(f"interrupted; the same command continues the experiment in {folder}")
                raise
        return _reported(folder, _analysed(folder, plan))


def analysis_of(folder: str | Path, *, trusted: bool = False) -> Analysis:
    """The comparison of the results in the folder of an experiment, with the settings of its runs.

    Args:
        trusted: accept settings of its plan that can run code; the folder may come from elsewhere.

    Raises:
        UsageError: no experiment in the folder, or a plan that needs trust.
        RunError: no run of the reference arm has finished.
    """
    folder = Path(folder)
    return _analysed(folder, read_plan(folder / "experiment.toml", trusted=trusted))


def report(folder: str | Path, *, trusted: bool = False) -> Experiment:
    """Write the comparison of an experiment's results: `comparison.json`, a page and a picture.

    Args:
        trusted: as in `analysis_of`.

    Raises:
        UsageError: no experiment in the folder, or a plan that needs trust.
        RunError: no run of the reference arm has finished.
    """
    return _reported(Path(folder), analysis_of(folder, trusted=trusted))


def _analysed(folder: Path, plan: Plan) -> Analysis:
    found = analyse(plan, [r for r in read_results(folder) if r.experiment == plan.digest])
    runs = [
        replace(run, config=settings_of(folder / "runs" / run.label / f"seed-{run.seed}"))
        for run in found.runs
    ]
    return replace(found, runs=runs)


def _reported(folder: Path, analysis: Analysis) -> Experiment:
    plan = analysis.plan
    found = analysis.as_dict()
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    replace_text(folder / "comparison.json", text)
    notes = [found["comparison"]["note"], *analysis.remarks(), *plan.differences()]
    if plan.hypotheses:
        notes += ["Expected beforehand:", *plan.hypotheses]
    told = {**found["comparison"], "note": " ".join(note for note in notes if note)}
    title = plan.title or "Comparison"
    write_comparison_report(
        analysis.runs, title=title, output=folder / "report.html", comparison=told
    )
    write_png(analysis.runs, folder / "report.png", title=title)
    return Experiment(folder=folder, analysis=analysis)


class _Runner:
    """Runs the missing jobs of an experiment."""

    def __init__(
        self, *, plan: Plan, folder: Path, pool: WorkerPool, progress: ProgressTable
    ) -> None:
        self.plan, self.folder, self.pool, self.progress = plan, folder, pool, progress
        self.configs = {arm.label: plan.config(arm) for arm in plan.arms}

    def run(self) -> None:
        """Tune, then compare; a reference arm that sets budgets runs first."""
        plan = self.plan
        ahead = [self._job(arm, seed, 0.0) for arm in plan.arms for seed in plan.seeds]
        self.progress.expect([job for job in ahead if not _finished(job)])
        rates = self._rates()
        arms = [arm for arm in plan.arms if arm.label in rates]
        if plan.match == "samples":
            self._do(
                [self._job(arm, seed, rates[arm.label]) for seed in plan.seeds for arm in arms]
            )
            self._equal_rates(rates)
            return
        first = [arm for arm in arms if arm.label == plan.against]
        results = self._do(
            [self._job(arm, seed, rates[arm.label]) for seed in plan.seeds for arm in first]
        )
        budgets = {r.seed: r.used(plan.match) for r in results if r.status == "finished"}
        self._do(
            [
                self._job(arm, seed, rates[arm.label], budget=budget)
                for seed, budget in budgets.items()
                for arm in arms
                if arm.label != plan.against
            ]
        )

    def _equal_rates(self, rates: Mapping[str, float]) -> None:
        """Run the arms whose rates differ from the reference's, and the reference, at both."""
        plan = self.plan
        if plan.tuning is None or not plan.tuning.equal_rates:
            return
        extra = equal_rate_runs(rates, against=plan.against)
        arms = [
            plan.arm(label).model_copy(update={"label": at_rate(label, rate)})
            for label, rate in extra
        ]
        self.configs |= {
            arm.label: self.configs[label] for arm, (label, _) in zip(arms, extra, strict=True)
        }
        jobs = [
            self._job(arm, seed, rate)
            for seed in plan.seeds
            for arm, (_, rate) in zip(arms, extra, strict=True)
        ]
        self._do(jobs, expected=False)

    def _rates(self) -> dict[str, float]:
        """The learning rate of each arm; none for an arm that failed at every rate."""
        plan, tuning = self.plan, self.plan.tuning
        if tuning is None:
            return {
                arm.label: arm.learning_rate or self.configs[arm.label].optimizer.learning_rate
                for arm in plan.arms
            }
        tried = {arm.label: list(tuning.learning_rates) for arm in plan.arms}
        found: dict[str, Choice] = {}
        for _ in range(1 + tuning.extensions):
            results = self._do(
                [
                    self._job(arm, seed, rate, tuning=True)
                    for seed in tuning.seeds
                    for arm in plan.arms
                    for rate in tried[arm.label]
                ],
                expected=False,
            )
            found = choices(plan, results)
            edges = {label: choice for label, choice in found.items() if choice.at_edge}
            if all(choice.extended() in tried[label] for label, choice in edges.items()):
                break
            for label, choice in edges.items():
                tried[label].append(choice.extended())
        return {label: choice.learning_rate for label, choice in found.items()}

    def _job(
        self,
        arm: Arm,
        seed: int,
        rate: float,
        *,
        tuning: bool = False,
        budget: float | None = None,
    ) -> Job:
        """The job of one run."""
        plan, folder = self.plan, self.folder
        own = f"tuning/{arm.label}-lr-{rate:g}" if tuning else arm.label
        steps = self.configs[arm.label].steps
        most = steps if budget is None else steps * plan.most_steps
        run = folder / "runs" / own / f"seed-{seed}"
        return Job(
            recipe=plan.recipe,
            overrides=(
                *plan.overrides(arm),
                f"optimizer.learning_rate={rate!r}",
                f"seed={seed}",
                f"steps={most}",
                f"output={json.dumps(str(run), ensure_ascii=False)}",
            ),
            splits=plan.splits,
            result=Result(
                experiment=plan.digest,
                arm=arm.label,
                algorithm=arm.algorithm,
                seed=seed,
                learning_rate=rate,
                tuning=tuning,
            ),
            place=place(folder, arm=arm.label, seed=seed, rate=rate if tuning else None),
            base=folder / "base",
            steps=steps,
            axis="seconds" if plan.match == "seconds" else "tokens",
            budget=budget,
        )

    def _do(self, jobs: Sequence[Job], *, expected: bool = True) -> list[Result]:
        """Run the unfinished jobs; returns the results of all jobs.

        Raises:
            UsageError: a result belongs to another plan or other settings.
        """
        missing = [job for job in jobs if not _finished(job)]
        for job in jobs:
            if job not in missing:
                _check(Result.read(job.place), job)
        if not expected:
            self.progress.expect(missing)
        self.pool.do(missing)
        return [Result.read(job.place) for job in jobs]


def _finished(job: Job) -> bool:
    """Whether a run has a result; failed runs are repeated."""
    return job.place.exists() and Result.read(job.place).status == "finished"


def _check(result: Result, job: Job) -> None:
    """Refuse a result of another plan or other settings."""
    if result.experiment != job.result.experiment:
        changed = "with a plan that has changed since; restore experiment.toml"
    elif result.config_hash != hash_of(load(job.recipe, job.overrides)):
        changed = f"with settings that have changed since; restore {job.recipe}"
    else:
        return
    raise UsageError(f"{job.place}: was run {changed}, or choose another folder with --output.")


def _fix_plan(plan: Plan, folder: Path) -> None:
    """Write the plan before the first run, or check it against the existing one.

    Raises:
        UsageError: the folder holds another experiment.
    """
    path = folder / "experiment.toml"
    if not path.exists():
        replace_text(path, toml(plan))
        return
    if changed := differing(path, plan):
        raise UsageError(
            f"output = {str(folder)!r}: contains an experiment that differs in "
            f"{' and '.join(changed)}; choose another folder with --output, or continue it "
            f"with --plan {path}."
        )


def _cores() -> int:
    """Number of parallel runs: one per core, or one with a GPU."""
    import torch

    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))

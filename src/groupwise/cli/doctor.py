"""Preflight checks: find in under a minute what would make a run fail, with advice for each.

Only a temporary folder is written to, and no weight changes.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from groupwise import __version__
from groupwise.config import Config
from groupwise.config.connect import (
    best_device,
    load_configured,
    make_environment,
    make_scorer,
)
from groupwise.config.data import load_eval, load_train, rendered
from groupwise.config.memory import MemoryPlan, memory_plan, memory_savings, size_text
from groupwise.environments import END_OF_TURN
from groupwise.errors import GroupwiseError, first_line
from groupwise.kernels import active, select
from groupwise.machine import usable_cores
from groupwise.models import Policy
from groupwise.prompts.contamination import shared_prompts
from groupwise.prompts.templates import check_round_trip
from groupwise.rewards import dropped_tags
from groupwise.rollouts.tools.turns import turn_end, turn_frame
from groupwise.settings import SecondLearnerSettings
from groupwise.testing import GARBAGE, JudgesGroups, check_reward
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.monitor.trackers import check_trackers
from groupwise.training.prepare import prepare
from groupwise.types import Prompt

Learning = TypeVar("Learning", bound=SecondLearnerSettings)

NEEDED = {"torch": (2, 11), "transformers": (5, 17)}
"""Oldest supported versions."""

GAP = 1e-3
"""Largest acceptable difference between log-probabilities of sampler and learner in float32."""

ROOM, ROOM_ON_CPU = 0.9, 0.7
"""Share of the free memory that a run may plan for: kernels and allocators need some too, and the
heap of a CPU fragments (benchmarks/memory.py)."""

CLOCKS_APART = 2.0
"""Maximum difference of clocks in seconds."""

TRIED = 200
"""Number of prompts that are checked, from the first."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: of the check.
        passed: None if an earlier failure made the check impossible.
        found: the finding.
        advice: what to do; empty if the check passed.
    """

    name: str
    passed: bool | None
    found: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "–   "}[self.passed]
        advice = f"\n      → {self.advice}" if self.advice else ""
        return f"{mark}  {self.name}: {self.found}{advice}"


class CheckFailed(Exception):
    """A failed check: the finding and advice."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


def examine(config: Config | None = None, *, fit_gb: float | None = None) -> list[CheckResult]:
    """Check everything that a run depends on.

    Args:
        config: of the run; None checks only the installation.
        fit_gb: memory limit of the run in GiB; None uses the free memory of this machine.

    Returns:
        The checks in order; those that an earlier failure makes impossible are marked as skipped.
    """
    work: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "device": lambda: _device(None if config is None else config.threads),
    }
    if config is not None:
        select(config.model.kernels)  # before the plan of what they need
        preflight = Preflight(config, fit_gb)
        work |= {
            "run directory": preflight.directory,
            "memory": preflight.memory,
            "disk": preflight.disk,
            "model": preflight.model,
            "data": preflight.data,
            "tokenizer": preflight.tokenizer,
            **({} if config.environment is None else {"environment": preflight.environment}),
            "reward": preflight.reward,
            **({} if config.cluster is None else {"cluster": preflight.cluster}),
            **({"trackers": preflight.trackers} if config.logging.trackers else {}),
            "a step at learning rate 0": preflight.step,
        }
    checks: list[CheckResult] = []
    for name, look in work.items():
        checks.append(_looked(name, look, checks))
    return checks


def _looked(name: str, look: Callable[[], str], before: Sequence[CheckResult]) -> CheckResult:
    try:
        return CheckResult(name=name, passed=True, found=look())
    except CheckFailed as finding:
        return CheckResult(name=name, passed=False, found=str(finding), advice=finding.advice)
    except GroupwiseError as error:
        if any(check.found == str(error) for check in before):
            return CheckResult(
                name=name, passed=None, found="skipped, because of the failure above"
            )
        advice = "do what the message says; the run would stop with the same error"
        return CheckResult(name=name, passed=False, found=str(error), advice=advice)
    except Exception as error:
        said = first_line(error)
        return CheckResult(
            name=name,
            passed=False,
            found=f"{type(error).__name__}: {said}",
            advice="run with --debug, and report the error if it is not in your own code",
        )


def _versions() -> str:
    found = {"groupwise": __version__} | {n: importlib.metadata.version(n) for n in NEEDED}
    for name, oldest in NEEDED.items():
        parts = tuple(int(p) for p in found[name].split("+")[0].split(".")[:2])
        if parts < oldest:
            wanted = ".".join(map(str, oldest))
            raise CheckFailed(f"{name} {found[name]}", f"pip install '{name}>={wanted}'")
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"Python {platform.python_version()}, {listed}"


def _device(threads: int | None) -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    cores, threads = usable_cores(), threads or torch.get_num_threads()
    if threads > cores:
        raise CheckFailed(
            f"CPU of which {_counted(cores, 'core')} may be used, and {threads} threads, which "
            "will compete for the cores",
            f"set threads = {cores}",
        )
    free = psutil.virtual_memory().available / 2**30
    return (
        f"CPU, {_counted(cores, 'core')}, {_counted(threads, 'thread')}, "
        f"{free:.1f} GiB of memory free, " + f"kernels: {active().description(torch.device('cpu'))}"
    )


def _counted(count: int, noun: str) -> str:
    """A number with its unit: "1 core", "2 cores"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Preflight:
    """A configuration and its parts, each loaded when first needed."""

    def __init__(self, config: Config, fit_gb: float | None) -> None:
        self.config = config
        self.fit_gb = fit_gb

    @cached_property
    def policy(self) -> Policy:
        return load_configured(self.config)

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        return load_train(self.config)

    @cached_property
    def plan(self) -> MemoryPlan:
        return memory_plan(self.config)

    def directory(self) -> str:
        folder = Path(self.config.output)
        parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise CheckFailed(
                f"{folder} cannot be written", "choose another with --set output=FOLDER"
            )
        if (folder / "metrics.jsonl").exists():
            return f"{folder} already contains a run, which only --resume can continue"
        return f"{folder} can be written"

    def memory(self) -> str:
        """Peak memory of a run compared with free memory or the given limit."""
        plan = self.plan
        room, free = ROOM, 0.0
        if self.fit_gb is not None:
            free = self.fit_gb * 2**30
        elif best_device().type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            room, free = ROOM_ON_CPU, psutil.virtual_memory().available
        said = (
            f"{plan.parameters / 1e6:,.1f} M parameters, {plan.trained / 1e6:,.1f} M of them "
            f"trained; {plan}, with prompts of {plan.prompt} tokens; "
            f"{'free memory' if self.fit_gb is None else 'limit'} {size_text(free)}"
        )
        if plan.peak <= room * free:
            return said
        steps = list(memory_savings(self.config, room=room * free))
        least = steps[-1].plan if steps else plan
        advice = f"set, cumulatively: {', '.join(map(str, steps))}" if steps else ""
        if least.peak > room * free:
            rest = f"no setting needs less than {least}; use a smaller model or more memory"
            advice = f"{advice}; {rest}" if advice else rest
        raise CheckFailed(said, advice)

    def disk(self) -> str:
        """Disk space: a checkpoint has the trained weights and two moments, and models are written
        too."""
        config = self.config
        need = self.plan.trained * (12 * (config.checkpoint.keep_last + 2) + 4 * 3)
        folder = Path(config.output).absolute()
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        said = f"checkpoints need about {need / 2**30:.2f} GiB, {free / 2**30:.1f} GiB are free"
        if need > free:
            raise CheckFailed(
                said, "free some space, choose another output, or keep fewer checkpoints"
            )
        return said

    def model(self) -> str:
        policy = self.policy
        return (
            f"{type(policy.model).__name__}, context of {policy.context} tokens, "
            f"{_counted(len(policy.end_tokens), 'end token')}"
        )

    def data(self) -> str:
        prompts = self.prompts
        ready = rendered(self.config, self.policy, prompts[:TRIED])
        longest = max(map(len, ready.tokens))
        answered = sum(prompt.answer is not None for prompt in ready.prompts)
        held_out = load_eval(self.config)
        shared = shared_prompts(prompts, held_out)
        said = (
            f"{len(prompts)} prompts, {len(held_out)} held-out prompts; of the first "
            f"{len(ready.prompts)}, the longest has {longest} tokens and {answered} have an answer"
        )
        if shared:
            raise CheckFailed(
                f"{said}; {shared} of the held-out prompts are training prompts too",
                "choose other held-out prompts with data.eval or data.eval_split",
            )
        return said

    def tokenizer(self) -> str:
        tokenizer = self.policy.tokenizer
        answers = sorted({p.answer for p in self.prompts[:TRIED] if p.answer})
        problems = check_round_trip(tokenizer, answers)
        if problems:
            raise CheckFailed(problems[0], "use a tokenizer that keeps these texts")
        if tags := dropped_tags(tokenizer):
            raise CheckFailed(
                f"{', '.join(tags)} are special tokens, which decoding removes",
                "add these tags as ordinary tokens (special=False), or use others",
            )
        return f"{len(tokenizer)} tokens; {len(answers)} answers survive encoding and decoding"

    def environment(self) -> str:
        """Check the environment, and whether the chat template supports its replies as turns."""
        settings = self.config.environment
        assert settings is not None
        stops = make_environment(settings).stops
        turns = END_OF_TURN in stops
        said = ", ".join("the end of a turn" if s == END_OF_TURN else repr(s) for s in stops)
        if settings.layout == "inline" and turns:
            raise CheckFailed(
                f"{settings.name} replies to turns that the model ends",
                "set environment.layout = 'turns'",
            )
        if settings.layout == "inline":
            return f"{settings.name} replies after {said}"
        before, after = turn_end(self.policy)[1] if turns else turn_frame(self.policy.tokenizer)
        return (
            f"{settings.name} replies after {said}, between {before!r} and {after!r}; the chat "
            "template keeps earlier turns unchanged"
        )

    def reward(self) -> str:
        """Check that reference answers score highest and garbage lower."""
        asked = list(self.prompts[:8])
        with make_scorer(self.config) as scorer:
            if all(prompt.answer is None for prompt in asked):
                return _garbage_alone(scorer, asked)
            tried = check_reward(scorer, asked)
        if not tried.passed:
            raise CheckFailed(
                tried.problems[0],
                "make the reward and the data agree on the format of answers (data.answer_style, "
                "settings of [[rewards]])",
            )
        gold = [row.total for row in tried.rows if row.kind == "gold"]
        rest = [row.total for row in tried.rows if row.kind == "garbage"]
        least, most, garbage = min(gold), max(gold), max(rest)
        scores = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        return (
            f"reference answers ({tried.writing}) score {scores}; garbage scores "
            f"{'0' if garbage == min(rest) == 0 else f'at most {garbage:g}'}"
        )

    def cluster(self) -> str:
        """Check processes on the machines of the run."""
        from groupwise.distributed.probe import probe

        found = probe(self.config)
        if found.blind:
            raise CheckFailed(
                f"{', '.join(found.blind)} cannot see the folder of {self.config.output}",
                "choose an output folder on a file system that all machines share",
            )
        name, offset = max(found.offsets.items(), key=lambda each: abs(each[1]))
        if abs(offset) > CLOCKS_APART:
            raise CheckFailed(
                f"the clock of {name} is off by {offset:+.1f} s", "synchronise the clocks with NTP"
            )
        return (
            f"{len(found.offsets)} processes on "
            f"{_counted(len(found.nodes), 'node')} with the same packages; clocks within "
            f"{abs(offset):.3f} s; at least {min(found.bandwidths.values()) / 1e6:,.0f} MB/s from "
            "the driver"
        )

    def trackers(self) -> str:
        check_trackers(self.config.logging.trackers)
        return f"{', '.join(self.config.logging.trackers)}; none is started here"

    def step(self) -> str:
        """Run rollouts, rewards and an update with learning rate 0, which must change nothing."""
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare(
                _small(self.config, Path(folder) / "run"),
                progress=NoProgress(),
                policy=self.policy,
                prompts=self.prompts[:2],
                eval_prompts=[],
            )
            try:
                before = {
                    n: w.detach().clone() for n, w in prepared.trainer.policy.trained().items()
                }
                metrics = prepared.trainer.step().metrics
                after = prepared.trainer.policy.trained()
            finally:
                prepared.close()
        moved = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
        if moved:
            raise CheckFailed(
                f"{len(moved)} parameters changed at learning rate 0, such as {moved[0]}",
                "report this: it is a bug in groupwise or in the model's code",
            )
        gap = metrics["sampler_gap_max"]
        if self.config.model.dtype == "float32" and gap > GAP:
            raise CheckFailed(
                f"sampler and learner differ by {gap:.2g} nats for the same token",
                "use engine.name = 'generate', and report the model",
            )
        return (
            f"no parameter changed; reward {metrics['reward']:.3g}, gradient norm "
            f"{metrics['grad_norm']:.3g}, sampler and learner within {gap:.1e} nats, "
            f"{metrics['seconds']:.1f} s for {metrics['tokens']:.0f} tokens"
        )


def _garbage_alone(scorer: JudgesGroups, prompts: Sequence[Prompt]) -> str:
    """The check of a reward on data without reference answers, such as tests of programs."""
    tried = check_reward(scorer, prompts, gold=lambda _: GARBAGE)
    rows = [row for row in tried.rows if row.kind == "garbage"]
    scored = [row.total for row in rows if row.status == "ok"]
    failed = [row for row in rows if row.status in ("error", "timeout")]
    if failed or not scored:
        raise CheckFailed(
            f"garbage was not scored ({(failed or rows)[0].status}): {(failed or rows)[0].error}",
            "do what the message says; such completions are excluded from their group's statistics",
        )
    return f"the data has no reference answers to score; garbage scores at most {max(scored):g}"


def _small(config: Config, output: Path) -> Config:
    """The same run with a step that takes seconds, changes no weight, and keeps every group."""
    algorithm = config.algorithm.model_copy(update={"filter": {"name": "all"}})
    return config.model_copy(
        update={
            "output": str(output),
            "steps": 1,
            "prompts_per_step": 2,
            "group_size": min(config.group_size, 8),
            "algorithm": algorithm,
            "sampling": config.sampling.model_copy(
                update={"max_tokens": min(config.sampling.max_tokens, 64)}
            ),
            "optimizer": config.optimizer.model_copy(
                update={"learning_rate": 0.0, "weight_decay": 0.0}
            ),
            "update": config.update.model_copy(
                update={"epochs": 1, "minibatches": 1, "skip_zero_rows": False}
            ),
            "critic": _still(config.critic).model_copy(
                update={"minibatches": 1, "pretraining": None}
            ),
            "token_reward": _still(config.token_reward),
            "warmup": None,
            "evaluation": config.evaluation.model_copy(update={"validation": 0}),
            "logging": config.logging.model_copy(update={"trackers": ()}),
        }
    )


def _still(section: Learning) -> Learning:
    """A second learner that does not change, with a policy that is updated from the first step."""
    optimizer = section.optimizer.model_copy(update={"learning_rate": 0.0, "weight_decay": 0.0})
    return section.model_copy(update={"optimizer": optimizer, "freeze_policy_steps": 0})


def passed(checks: Sequence[CheckResult]) -> bool:
    """Whether no check failed."""
    return all(check.passed is not False for check in checks)

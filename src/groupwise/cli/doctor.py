"""The preflight of a run: what would go wrong is found in under a minute, each with what to do.

Nothing is written but to a temporary folder, and no weight is moved.
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
from groupwise.config.memory import MemoryPlan, memory_plan, memory_savings
from groupwise.errors import GroupwiseError, first_line
from groupwise.kernels import active
from groupwise.models import Policy
from groupwise.prompts.contamination import shared_prompts
from groupwise.prompts.templates import check_round_trip
from groupwise.rewards import dropped_tags
from groupwise.rollouts.tools.turns import turn_frame
from groupwise.settings import SecondLearnerSettings
from groupwise.testing import check_reward
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.prepare import prepare
from groupwise.types import Prompt

Learning = TypeVar("Learning", bound=SecondLearnerSettings)

NEEDED = {"torch": (2, 11), "transformers": (5, 17)}
"""Oldest versions that work."""

GAP = 1e-3
"""Largest difference of log-probabilities of sampler and learner that is no finding in float32."""

ROOM, ROOM_ON_CPU = 0.9, 0.6
"""Share of the free memory that a run may plan for: kernels and allocators need some of their own,
and the heap of a CPU leaves gaps (benchmarks/memory.py)."""

CLOCKS_APART = 2.0
"""Seconds that clocks may differ."""

TRIED = 200
"""Prompts that are looked at; the first ones."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        passed: None where it could not be tried because of an earlier failure.
        found: what is there.
        advice: what to do; empty where it passed.
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
    """A check that failed: what was found, and what to do about it."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


def examine(config: Config | None = None, *, fit_gb: float | None = None) -> list[CheckResult]:
    """Look at everything a run depends on, as far as a configuration says what that is.

    Args:
        config: of the run; None looks at the installation alone.
        fit_gb: GiB that the run shall fit into; None takes what is free on this machine.

    Returns:
        One check after the other; what an earlier failure makes impossible is marked as not tried.
    """
    work: dict[str, Callable[[], str]] = {"versions": _versions, "device": _device}
    if config is not None:
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
                name=name, passed=None, found="not tried, because of the failure above"
            )
        advice = "do what the message says; it would have ended the run"
        return CheckResult(name=name, passed=False, found=str(error), advice=advice)
    except Exception as error:
        said = first_line(error)
        return CheckResult(
            name=name,
            passed=False,
            found=f"{type(error).__name__}: {said}",
            advice="run with --debug and report it if it is not of your own code",
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


def _device() -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    cores, threads = len(psutil.Process().cpu_affinity() or [1]), torch.get_num_threads()
    if threads > cores:
        raise CheckFailed(
            f"CPU with {_counted(cores, 'core')} and {threads} threads of torch, which will fight",
            f"set threads = {cores}",
        )
    free = psutil.virtual_memory().available / 2**30
    return (
        f"CPU, {_counted(cores, 'core')}, {_counted(threads, 'thread')}, "
        f"{free:.1f} GiB of memory free, " + f"kernels: {active().description(torch.device('cpu'))}"
    )


def _counted(count: int, noun: str) -> str:
    """A number with its noun: "1 core", "2 cores"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class Preflight:
    """A configuration and what is loaded of it, each when it is first needed."""

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
                f"{folder} cannot be written", "choose another by --set output=FOLDER"
            )
        if (folder / "metrics.jsonl").exists():
            return f"{folder} already contains a run, which only --resume can continue"
        return f"{folder} can be written"

    def memory(self) -> str:
        """The peak of a run against what is free, or against the card that is asked about."""
        plan = self.plan
        room, free = ROOM, 0.0
        if self.fit_gb is not None:
            free = self.fit_gb * 2**30
        elif best_device().type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            room, free = ROOM_ON_CPU, psutil.virtual_memory().available
        said = (
            f"{plan.parameters / 1e6:,.1f} M parameters, of which {plan.trained / 1e6:,.1f} M "
            f"learn; {plan}, with prompts of {plan.prompt} tokens; {free / 2**30:.1f} GiB are "
            f"{'free' if self.fit_gb is None else 'given'}"
        )
        if plan.peak <= room * free:
            return said
        steps = list(memory_savings(self.config, room=room * free))
        least = steps[-1].plan if steps else plan
        advice = f"set, one on top of the other: {', '.join(map(str, steps))}" if steps else ""
        if least.peak > room * free:
            rest = f"no setting needs less than {least}; take a smaller model or more memory"
            advice = f"{advice}; {rest}" if advice else rest
        raise CheckFailed(said, advice)

    def disk(self) -> str:
        """Each checkpoint holds the trained weights and two moments; models are written beside."""
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
            f"{len(prompts)} prompts; of the first {len(ready.prompts)} the longest has {longest} "
            f"tokens and {answered} have an answer; {len(held_out)} held out"
        )
        if shared:
            raise CheckFailed(
                f"{said}; {shared} of the held-out ones are training prompts as well",
                "give other held-out prompts by data.eval or data.eval_split",
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
                f"{', '.join(tags)} are special tokens, which decoding drops",
                "add such tags as ordinary tokens (special=False), or use others",
            )
        return f"{len(tokenizer)} tokens; {len(answers)} answers come back as they were"

    def environment(self) -> str:
        """The environment, and whether its replies can be turns of the chat template."""
        settings = self.config.environment
        assert settings is not None
        stops = ", ".join(map(repr, make_environment(settings).stops))
        if settings.layout == "inline":
            return f"{settings.name} replies after {stops}"
        before, after = turn_frame(self.policy.tokenizer)
        return (
            f"{settings.name} replies after {stops}, between {before!r} and {after!r}; the chat "
            "template leaves earlier turns as they are"
        )

    def reward(self) -> str:
        """The reference answers must earn most, and rubbish less."""
        with make_scorer(self.config) as scorer:
            tried = check_reward(scorer, list(self.prompts[:8]))
        if not tried.passed:
            raise CheckFailed(
                tried.problems[0],
                "make the reward read the answers as the data writes them (data.answer_style, "
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
        """Processes where those of the run will be."""
        from groupwise.distributed.probe import probe

        found = probe(self.config)
        if found.blind:
            raise CheckFailed(
                f"{', '.join(found.blind)} cannot see the folder of {self.config.output}",
                "choose an output on a file system that all machines share",
            )
        name, offset = max(found.offsets.items(), key=lambda each: abs(each[1]))
        if abs(offset) > CLOCKS_APART:
            raise CheckFailed(
                f"the clock of {name} is off by {offset:+.1f} s", "set the clocks by NTP"
            )
        return (
            f"{len(found.offsets)} processes on "
            f"{_counted(len(found.nodes), 'node')} with equal packages; clocks within "
            f"{abs(offset):.3f} s; at least {min(found.bandwidths.values()) / 1e6:,.0f} MB/s from "
            "the driver"
        )

    def step(self) -> str:
        """Rollouts, rewards and an update whose learning rate is 0: nothing may move."""
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
                f"{len(moved)} parameters moved at learning rate 0, such as {moved[0]}",
                "report this: it is a fault of groupwise or of the model's code",
            )
        gap = metrics["sampler_gap_max"]
        if self.config.model.dtype == "float32" and gap > GAP:
            raise CheckFailed(
                f"sampler and learner differ by {gap:.2g} nats for the same token",
                "use engine.name = 'generate', and report the model",
            )
        return (
            f"nothing moved; reward {metrics['reward']:.3g}, gradient norm "
            f"{metrics['grad_norm']:.3g}, sampler and learner within {gap:.1e} nats, "
            f"{metrics['seconds']:.1f} s for {metrics['tokens']:.0f} tokens"
        )


def _small(config: Config, output: Path) -> Config:
    """The same run with a step that takes seconds, cannot move anything, and keeps every group."""
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
            "logging": config.logging.model_copy(update={"trackers": ()}),
        }
    )


def _still(section: Learning) -> Learning:
    """A second learner that cannot move, beside a policy that is updated at once."""
    optimizer = section.optimizer.model_copy(update={"learning_rate": 0.0, "weight_decay": 0.0})
    return section.model_copy(update={"optimizer": optimizer, "freeze_policy_steps": 0})


def passed(checks: Sequence[CheckResult]) -> bool:
    """Whether nothing failed."""
    return all(check.passed is not False for check in checks)

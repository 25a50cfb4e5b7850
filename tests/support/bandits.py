"""A two-armed bandit with an engine, a learner and a source of its own: the loop needs no more of
them than their protocols say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithms import bind
from groupwise.models.weights import PublishedWeights
from groupwise.rundir.files import RunLog
from groupwise.settings import CheckpointSettings
from groupwise.training.checkpoint.manager import CheckpointManager
from groupwise.training.monitor.monitor import Monitor
from groupwise.training.trainer import Trainer, TrainerSettings
from groupwise.types import (
    Batch,
    Completion,
    Engine,
    Group,
    Limits,
    Metrics,
    Objective,
    Outputs,
    Prompt,
    Request,
    Requests,
    Sampling,
    ScoredGroups,
    Scores,
    Status,
    Stream,
    Update,
    WeightsRef,
)

ARMS = 2


class Bandit:
    """A learner whose policy is one softmax over the arms, trained by plain gradient descent."""

    def __init__(self, rate: float = 1.0) -> None:
        self.logits = torch.zeros(ARMS, requires_grad=True)
        self.rate, self.steps = rate, 0

    @property
    def version(self) -> int:
        return self.steps

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            logp = torch.where(batch.mask, self.logits.log_softmax(-1)[batch.tokens], 0)
        return dict.fromkeys(names, logp)

    def update(self, batch: Batch, objective: Objective) -> Update:
        logp = torch.where(batch.mask, self.logits.log_softmax(-1)[batch.tokens], 0)
        loss = (objective(Outputs(logp=logp), batch) * batch.weight)[batch.mask].sum()
        (gradient,) = torch.autograd.grad(loss, self.logits)
        with torch.no_grad():
            self.logits -= self.rate * gradient
        self.steps += 1
        return Update(
            version=self.steps,
            logp=logp.detach(),
            entropy=torch.full(batch.tokens.shape, float("nan")),
            computed=torch.ones(len(batch.tokens), dtype=torch.bool),
            loss=float(loss.detach()),
            grad_norm=float(gradient.norm()),
            learning_rate=self.rate,
        )

    def movement(self) -> Callable[[], float]:
        before = self.logits.detach().clone()
        return lambda: float((self.logits == before).all())

    def publish(self) -> PublishedWeights:
        return PublishedWeights(version=self.version, named=self.trained())

    def trained(self) -> Mapping[str, Tensor]:
        return {"logits": self.logits.detach()}

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.logits.copy_(weights["logits"])

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]

    def save(self, path: str) -> None:
        torch.save(self.logits, Path(path) / "bandit.pt")


class Table:
    """An engine that samples arms from a table of probabilities."""

    exact_continuation = False

    def __init__(self) -> None:
        self.probabilities, self.version = torch.full((ARMS,), 1 / ARMS), 0

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        for request in filter(None, requests):
            seed = torch.Generator().manual_seed(hash(request.stream) % 2**31)
            arms = torch.multinomial(self.probabilities, request.group, True, generator=seed)
            completions = tuple(
                Completion(
                    tokens=[arm],
                    mask=[True],
                    logprobs=[float(self.probabilities[arm].log())],
                    text=str(arm),
                    finish="stop",
                    versions=((0, self.version),),
                )
                for arm in arms.tolist()
            )
            yield Group(
                prompt=request.prompt,
                prompt_tokens=request.tokens,
                completions=completions,
                stream=request.stream,
            )

    def publish(self, weights: WeightsRef) -> Metrics:
        ((_, logits),) = weights.tensors()
        self.probabilities, self.version = logits.detach().softmax(-1), weights.version
        return {"published": 1.0}

    def close(self) -> None: ...


class Pulls:
    """A source of groups whose reward is 1 for the second arm."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.taken = engine, 0

    def take(self, count: int, *, step: int) -> ScoredGroups:
        requests = [
            Request(
                prompt=Prompt(id=str(n), text="?"),
                tokens=[0],
                group=8,
                stream=Stream(seed=1, step=self.taken, place=n),
            )
            for n in range(count)
        ]
        groups = tuple(self.engine.generate(requests, Sampling(max_tokens=1)))
        self.taken += 1
        total = torch.tensor([[float(c.tokens[0] == 1) for c in g.completions] for g in groups])
        judged = torch.ones_like(total, dtype=torch.bool)
        scores = Scores(
            total=total,
            correct=total,
            parts={"arm": total},
            status=tuple((Status.OK,) * len(g) for g in groups),
            valid=judged,
        )
        return ScoredGroups(groups=groups, scores=scores, keep=judged, drawn=count)

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


def bandit(folder: Path, *, steps: int, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A run in a folder, with everything a run has."""
    engine, learner = Table(), Bandit()
    run_log = RunLog(folder, settings={})
    trainer = kind(
        settings=TrainerSettings(steps=steps, prompts_per_step=4),
        source=Pulls(engine),
        engine=engine,
        learners={"policy": learner, **given.pop("others", {})},
        algorithm=bind(given.pop("algorithm", "grpo")),
        monitor=Monitor(run_log=run_log),
        checkpoints=CheckpointManager(
            run_log, settings=CheckpointSettings(every_steps=2), about={"threads": 1}
        ),
        folder=folder,
        **given,
    )
    return trainer

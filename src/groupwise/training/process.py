"""Process rewards: a model or a function scores every step of what the policy wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise import extensions
from groupwise.config import Config
from groupwise.config.connect import best_device
from groupwise.errors import RewardError, UsageError
from groupwise.models import Policy
from groupwise.models.scoring import check_same_tokenizer, load_scorer
from groupwise.rewards.steps import step_ends
from groupwise.settings import OptimizerSettings
from groupwise.training.trainer import Trainer
from groupwise.types import (
    Completion,
    Group,
    Learner,
    Metrics,
    ScoredGroups,
    Status,
    StepResult,
)
from groupwise.updates import Score, TorchLearner, sequences

StepFunction = Callable[[str, Sequence[str], str | None], Sequence[float] | None]
"""From prompt, steps and reference answer to a number for each step; None: unjudgeable."""


@dataclass(frozen=True, kw_only=True)
class StepScorer:
    """The model or function that scores the steps of completions.

    Attributes:
        tokenizer: of the policy.
        separator: text between two steps.
        learner: computes the values of a token classifier; None where there is a function.
        function: scores steps as texts.
    """

    tokenizer: Any
    separator: str
    learner: Learner | None = None
    function: StepFunction | None = None

    def __call__(self, scored: ScoredGroups) -> tuple[Float[Tensor, "batch time"], ScoredGroups]:
        """The reward of every step at its last token, NaN elsewhere, and the scored groups.

        A completion whose steps cannot be judged then has the status "error" or "unjudgeable".

        Raises:
            RewardError: the function returned no numbers, or another number of them than there are
                steps.
        """
        batch = sequences(scored, excluded=True)
        found = torch.full(batch.mask.shape, math.nan)
        rows = [(group, c) for group in scored.groups for c in group.completions]
        failed: dict[int, Unjudged] = {}
        chances = None
        if self.learner is not None and batch.mask.any():
            chances = self.learner.evaluate(batch, {"values"})["values"].float().sigmoid().cpu()
        for row, (group, completion) in enumerate(rows):
            if not bool(batch.mask[row].any()):
                continue
            ends = written_steps(completion, self.separator, self.tokenizer)
            if chances is None:
                given = self._by_function(group, completion, ends)
            else:
                given = _finite(chances[row, ends].tolist(), "process.model")
            if isinstance(given, Unjudged):
                failed[row] = given
            else:
                found[row, ends] = torch.tensor(given, dtype=torch.float32)
        return found, with_failures(scored, failed)

    def _by_function(
        self, group: Group, completion: Completion, ends: Sequence[int]
    ) -> list[float] | Unjudged:
        """The function's rewards for the steps of one completion."""
        assert self.function is not None
        places = [i for i, own in enumerate(completion.mask) if own]
        bounds = [-1, *ends]
        spans = [
            [completion.tokens[i] for i in places if low < i <= high]
            for low, high in zip(bounds, bounds[1:], strict=False)
        ]
        texts = [self.tokenizer.decode(span, skip_special_tokens=True) for span in spans]
        steps = [text.removesuffix(self.separator) for text in texts]
        try:
            given = self.function(str(group.prompt), steps, group.prompt.answer)
        except Exception as error:
            text = f"process.function: {type(error).__name__}: {error}"
            return Unjudged(status=Status.ERROR, error=text)
        if given is None:
            return Unjudged(status=Status.UNJUDGEABLE)
        try:
            values = [float(value) for value in given]
        except (TypeError, ValueError):
            raise RewardError(
                f"process.function: returned {given!r}; it must return a number for each of the "
                f"{len(ends)} steps, or None."
            ) from None
        if len(values) != len(ends):
            raise RewardError(
                f"process.function: returned {len(values)} rewards for {len(ends)} steps."
            )
        return _finite(values, "process.function")


@dataclass(frozen=True, kw_only=True)
class Unjudged:
    """Why the steps of a completion have no rewards; `error` is for the log."""

    status: Status
    error: str | None = None


def _finite(values: list[float], name: str) -> list[float] | Unjudged:
    """The rewards, if all of them are finite."""
    if all(map(math.isfinite, values)):
        return values
    return Unjudged(status=Status.ERROR, error=f"{name}: a reward is not finite.")


def with_failures(scored: ScoredGroups, failed: Mapping[int, Unjudged]) -> ScoredGroups:
    """The scored groups, with some completions not judged.

    Args:
        scored: groups with their scores.
        failed: by row in the order prompt · group.
    """
    if not failed:
        return scored
    scores = scored.scores
    width = scores.total.shape[1]
    bad = torch.tensor([row in failed for row in range(scores.total.numel())])
    bad = bad.view_as(scores.valid)
    status = [list(own) for own in scores.status]
    reasons = [list(own) for own in scores.reasons] or [[None] * width for _ in status]
    for row, one in failed.items():
        status[row // width][row % width] = one.status
        reasons[row // width][row % width] = one.error or reasons[row // width][row % width]
    messages = [one.error for one in failed.values() if one.error is not None]
    changed = replace(
        scores,
        total=scores.total.masked_fill(bad, math.nan),
        valid=scores.valid & ~bad,
        status=tuple(tuple(own) for own in status),
        errors=(*scores.errors, *messages),
        reasons=tuple(map(tuple, reasons)),
    )
    return replace(scored, scores=changed)


def written_steps(completion: Completion, separator: str, tokenizer: Any) -> list[int]:
    """Places of the last token of every step that the policy wrote; injected tokens belong to no
    step."""
    places = [i for i, own in enumerate(completion.mask) if own]
    tokens = [int(completion.tokens[i]) for i in places]
    return [places[end] for end in step_ends(tokens, separator, tokenizer)]


def make_step_scorer(config: Config, policy: Policy) -> StepScorer:
    """The step scorer of a configuration.

    Raises:
        UsageError: its model cannot be loaded, has several labels or another tokenizer than the
            policy, or its function does not exist.
    """
    settings = config.process
    assert settings is not None
    shared = {"tokenizer": policy.tokenizer, "separator": settings.step_separator}
    if settings.function is not None:
        function = extensions.resolve(settings.function, kind="process.function")
        if not callable(function):
            raise UsageError(f"process.function = {settings.function!r}: must name a function.")
        return StepScorer(function=cast(StepFunction, function), **shared)
    assert settings.model is not None
    try:
        found = load_scorer(
            settings.model,
            kind="token",
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            attention=config.model.attention,
        )
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "process.model", 1)) from None
    where = f"process.model = {settings.model!r}"
    check_same_tokenizer(policy.tokenizer, found.tokenizer, where=where)
    found.model.to(best_device())
    learner = TorchLearner(
        found,
        optimizer=OptimizerSettings(),
        head=Score(found.model, reads={"written"}),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
    )
    return StepScorer(learner=learner, **shared)


@dataclass(kw_only=True)
class ProcessTrainer(Trainer):
    """A run whose advantages take a reward for every step.

    Attributes:
        steps: scores them.
    """

    steps: StepScorer

    def step(self) -> StepResult:
        """Train on one batch of rollouts, whose steps are scored first."""
        self.monitor.begin_step(self.policy)
        scored = self.source.take(self.settings.prompts_per_step, step=self.done)
        with self.watch("the rewards of the steps"):
            found, scored = self.steps(scored)
        batch = self.evaluated(scored)
        batch = replace(batch, columns={**batch.columns, "step_rewards": found})
        return self.learned(scored, batch, process_metrics(found))


def process_metrics(found: Float[Tensor, "batch time"]) -> Metrics:
    """The mean reward of the steps, and steps per completion that has any.

    Example:
        >>> process_metrics(torch.tensor([[math.nan, 1.0, 0.5], [0.0, math.nan, math.nan]]))
        {'step_reward': 0.5, 'steps_written': 1.5}
    """
    known = ~found.isnan()
    if not known.any():
        return {}
    return {
        "step_reward": float(found[known].mean()),
        "steps_written": float(known.sum() / known.any(1).sum()),
    }

"""Process rewards: a model or a function scores every step of what the policy wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from groupwise.types import Batch, Completion, Group, Learner, ScoredGroups
from groupwise.updates import Score, TorchLearner

StepFunction = Callable[[str, Sequence[str], str | None], Sequence[float] | None]
"""From prompt, steps and reference answer to a number for each step; None: cannot be judged."""


@dataclass(frozen=True, kw_only=True)
class StepScorer:
    """Who scores the steps of completions.

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

    def __call__(self, batch: Batch, scored: ScoredGroups) -> Float[Tensor, "batch time"]:
        """The reward of every step at its last token; NaN elsewhere, and at all steps of a
        completion that cannot be judged.

        Raises:
            RewardError: a function returned another number of rewards than there are steps, or
                could judge nothing at all.
        """
        said: list[str] = []
        found = torch.full(batch.mask.shape, math.nan)
        rows = [(group, c) for group in scored.groups for c in group.completions]
        chances = None
        if self.learner is not None and batch.mask.any():
            chances = self.learner.evaluate(batch, {"values"})["values"].float().sigmoid().cpu()
        for row, (group, completion) in enumerate(rows):
            if not bool(batch.mask[row].any()):
                continue
            ends = written_steps(completion, self.separator, self.tokenizer)
            if chances is not None:
                found[row, ends] = chances[row, ends]
            elif (given := self._by_function(group, completion, ends, said)) is not None:
                found[row, ends] = torch.tensor(given, dtype=torch.float32)
        if batch.mask.any() and bool(found.isnan().all()):
            raise RewardError(f"process: no completion could be judged ({(said or ['NaN'])[0]}).")
        return found

    def _by_function(
        self, group: Group, completion: Completion, ends: Sequence[int], said: list[str]
    ) -> list[float] | None:
        """What the function says of one completion; None where it fails, and why in `said`."""
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
            said.append(f"{type(error).__name__}: {error}")
            return None
        if given is None:
            said.append("the function returned None")
            return None
        values = [float(value) for value in given]
        if len(values) != len(ends):
            raise RewardError(
                f"process.function: returned {len(values)} rewards for {len(ends)} steps."
            )
        return values if all(map(math.isfinite, values)) else None


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
        return StepScorer(function=function, **shared)
    assert settings.model is not None
    found = load_scorer(
        settings.model,
        kind="token",
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        attention=config.model.attention,
    )
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

    def evaluated(self, scored: ScoredGroups) -> Batch:
        """The sequences with the rewards of the steps, as the column `step_rewards`."""
        batch = super().evaluated(scored)
        with self.watch("the rewards of the steps"):
            found = self.steps(batch, scored)
        return replace(batch, columns={**batch.columns, "step_rewards": found})

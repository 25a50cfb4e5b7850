"""Alarms in plain words: what looks wrong in training, why it may be, and what to try.

Every alarm is a row: the metric it watches, the setting that is its threshold, causes in order of
likelihood, and the setting to change. It sounds once when its metric has been beyond the threshold
for `patience` steps on end, and again only after the metric has come back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from groupwise.settings import AlarmsSettings
from groupwise.types import Metrics, ScoredGroups, Scores

RECENT = 20
"""Steps that a value is compared with where an alarm is about change."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table of alarms.

    Attributes:
        threshold: name of the setting in the section [alarms], and of the alarm.
        metric: name of the metric.
        below: sound below the threshold instead of above it.
        means: what has happened, in words.
        causes: three, the likeliest first.
        attempt: the setting to try.
        at_once: do not wait for `patience` steps.
    """

    threshold: str
    metric: str
    means: str
    causes: tuple[str, str, str]
    attempt: str
    below: bool = False
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One alarm that sounded: which row, at what value and threshold."""

    kind: Kind
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "below" if self.kind.below else "above"
        causes = "; ".join(f"({n}) {c}" for n, c in enumerate(self.kind.causes, start=1))
        return (
            f"alarm {self.kind.threshold}: {self.kind.means} ({self.kind.metric} = "
            f"{self.value:.4g}, {side} alarms.{self.kind.threshold} = {self.threshold:g}). "
            f"Likely causes: {causes}. Try {self.kind.attempt}."
        )


KINDS: tuple[Kind, ...] = (
    Kind(
        threshold="equal_rewards",
        metric="reward_std",
        below=True,
        means="all rewards are equal, so there is nothing to learn from",
        causes=(
            "the reward does not find the answer in what the model writes",
            "the prompts are all too hard or all too easy",
            "the reward ignores what it is given",
        ),
        attempt="`groupwise doctor RECIPE`, then easier prompts (data.train)",
    ),
    Kind(
        threshold="no_signal",
        metric="no_signal_share",
        means="nearly every group's rewards are all equal",
        causes=(
            "the prompts are too hard or too easy by now",
            "the group is too small to see a rare right answer",
            "the sampling is too cold to give different answers",
        ),
        attempt="a larger group_size, or algorithm.filter.name = 'spread'",
    ),
    Kind(
        threshold="length_growth",
        metric="length_growth",
        means="completions have become much longer than at the start",
        causes=(
            "the loss favours length (a token mean over each wrong answer dilutes its penalty)",
            "the model no longer ends its answers",
            "the reward pays for length or repetition",
        ),
        attempt="algorithm.name = 'dr_grpo', or a length penalty among the rewards",
    ),
    Kind(
        threshold="truncated",
        metric="truncated_share",
        means="many completions run out of tokens before they end",
        causes=(
            "sampling.max_tokens is too small for the task",
            "the model never learnt to end its answers",
            "the end token is not among those of the model",
        ),
        attempt="a larger sampling.max_tokens, or algorithm.filter.name = 'not_truncated'",
    ),
    Kind(
        threshold="entropy",
        metric="entropy_left",
        below=True,
        means="the policy has lost nearly all of the entropy that it began with",
        causes=(
            "the learning rate is too high",
            "clipping holds back the unlikely tokens that would keep it open",
            "the task is solved, and nothing is wrong",
        ),
        attempt="a lower optimizer.learning_rate, a higher clip (algorithm.surrogate.high), or "
        "algorithm.entropy = 0.001",
    ),
    Kind(
        threshold="kl",
        metric="kl",
        means="the policy has run far away from its reference",
        causes=(
            "the learning rate is too high",
            "the coefficient of the KL term is too small",
            "the reward is being exploited",
        ),
        attempt="a higher algorithm.divergence.coefficient or a lower optimizer.learning_rate",
    ),
    Kind(
        threshold="parts_against",
        metric="parts_correlation",
        below=True,
        means="two parts of the reward pull against each other",
        causes=(
            "one part pays for what the other one punishes",
            "the weights let a lesser part decide",
            "one part is exploited at the cost of the other",
        ),
        attempt="other weights (rewards.N.weight), or combine = 'gated_sum'",
    ),
    Kind(
        threshold="sampler_gap",
        metric="sampler_gap",
        means="sampler and learner disagree about the probabilities of the same tokens",
        causes=(
            "they compute in different number formats or kernels",
            "the sampler has stale weights",
            "temperature or truncation is applied on one side only",
        ),
        attempt="model.dtype = 'float32', or algorithm.correction.name = 'tis'",
        at_once=True,
    ),
    Kind(
        threshold="still_parameters",
        metric="still_share",
        means="some parameters were not moved by the first update",
        causes=(
            "they are frozen, or not part of the computation",
            "the learning rate is too small for the number format of the weights",
            "the batch had no gradient at all",
        ),
        attempt="a higher optimizer.learning_rate, or look at model.adapter.targets",
        at_once=True,
    ),
    Kind(
        threshold="duplicates",
        metric="duplicate_share",
        means="most completions are the same text as another one of their group, and not right",
        causes=(
            "the sampling is too cold",
            "the policy has become deterministic",
            "the answers are so short that there are few of them",
        ),
        attempt="sampling.temperature = 1.0 and a lower optimizer.learning_rate",
    ),
    Kind(
        threshold="hacking",
        metric="hacking",
        means="the reward rises while accuracy on held-out prompts falls",
        causes=(
            "the reward pays for something that is not the task",
            "the model learns the training prompts by heart",
            "the held-out prompts are of another kind",
        ),
        attempt="reading rollouts/ for what the reward pays for, and a stricter reward",
        at_once=True,
    ),
    Kind(
        threshold="not_judged",
        metric="unjudged_share",
        means="many completions could not be judged",
        causes=(
            "the reward raises or takes longer than its limit",
            "reference answers are missing or unreadable",
            "the sampler produces broken completions",
        ),
        attempt="a larger reward_pool.timeout_s, and read `errors` in journal/",
    ),
)


@dataclass(kw_only=True)
class Alarms:
    """Listens to the metrics of a run.

    Attributes:
        thresholds: where each alarm sounds.
    """

    thresholds: AlarmsSettings = field(default_factory=AlarmsSettings)
    _beyond: dict[str, int] = field(default_factory=dict)
    _first_lengths: list[float] = field(default_factory=list)
    _first_entropies: list[float] = field(default_factory=list)
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=2 * RECENT))
    _accuracies: list[tuple[float, float]] = field(default_factory=list)

    def hear(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms that sound at this step."""
        values = {**metrics, **self._changes(metrics)}
        return self._sounding(values)

    def hear_evaluation(self, accuracy: float) -> list[Alarm]:
        """The alarms that an evaluation on held-out prompts sets off; one without a figure says
        nothing."""
        if math.isnan(accuracy):
            return []
        reward = fmean(list(self._rewards)[-RECENT:]) if self._rewards else math.nan
        self._accuracies.append((reward, accuracy))
        best = max(self._accuracies, key=lambda pair: pair[1])
        risen = reward > best[0]
        return self._sounding({"hacking": best[1] - accuracy if risen else 0.0})

    def _changes(self, metrics: Mapping[str, float]) -> Metrics:
        """Metrics in another form, or against those of earlier steps."""
        reward = metrics.get("reward", math.nan)
        if math.isfinite(reward):
            self._rewards.append(reward)
        return {
            "no_signal_share": 1.0 - metrics.get("signal_share", math.nan),
            "unjudged_share": 1.0 - metrics.get("valid_share", math.nan),
            "length_growth": self._against_first(metrics.get("length"), self._first_lengths),
            "entropy_left": self._against_first(metrics.get("entropy"), self._first_entropies),
        }

    def _against_first(self, value: float | None, first: list[float]) -> float:
        """A value over the mean of the first steps: what is usual differs by model and task."""
        if value is None or not math.isfinite(value):
            return math.nan
        if len(first) < self.thresholds.patience:
            first.append(value)
        start = fmean(first)
        return value / start if start > 0 else math.nan

    def _sounding(self, values: Mapping[str, float]) -> list[Alarm]:
        alarms = []
        for kind in KINDS:
            threshold = getattr(self.thresholds, kind.threshold)
            value = values.get(kind.metric, math.nan)
            if threshold is None or math.isnan(value):
                continue
            beyond = value <= threshold if kind.below else value > threshold
            count = self._beyond.get(kind.threshold, 0) + 1 if beyond else 0
            self._beyond[kind.threshold] = count
            if count == (1 if kind.at_once else self.thresholds.patience):
                alarms.append(Alarm(kind=kind, value=value, threshold=threshold))
        return alarms

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on from here."""
        return {
            "beyond": dict(self._beyond),
            "first_lengths": list(self._first_lengths),
            "first_entropies": list(self._first_entropies),
            "rewards": list(self._rewards),
            "accuracies": [list(pair) for pair in self._accuracies],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._beyond = dict(state.get("beyond", {}))
        self._first_lengths = list(state.get("first_lengths", []))
        self._first_entropies = list(state.get("first_entropies", []))
        self._rewards.extend(state.get("rewards", []))
        self._accuracies = [(a, b) for a, b in state.get("accuracies", [])]


def observations(scored: ScoredGroups) -> Metrics:
    """Figures that alarms need and nothing else computes.

    duplicate_share = share of completions whose tokens are those of an earlier one of the group;
        a group that is right throughout counts none: there, sameness is success
    parts_correlation = least correlation of two parts of the reward within groups; absent where
        there are fewer than two parts that vary
    """
    groups = scored.groups
    count = sum(len(group) for group in groups)
    repeated = [
        0 if right else len(group) - len({tuple(c.tokens) for c in group.completions})
        for group, right in zip(groups, _right_throughout(scored.scores), strict=True)
    ]
    metrics = {"duplicate_share": sum(repeated) / count}
    least = _least_correlation(list(scored.scores.parts.values()), scored.scores.valid)
    return metrics if least is None else {**metrics, "parts_correlation": least}


def _right_throughout(scores: Scores) -> list[bool]:
    """For each group whether every completion that was judged is known to be right."""
    right = (scores.correct == 1) | ~scores.valid
    return (right.all(1) & scores.valid.any(1)).tolist()


def _least_correlation(parts: Sequence[torch.Tensor], valid: torch.Tensor) -> float | None:
    known = valid
    for part in parts:
        known = known & ~torch.isnan(part)
    if len(parts) < 2 or not bool(known.any()):
        return None
    centred = []
    for part in parts:
        values = torch.where(known, part, 0).double()
        mean = values.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
        centred.append(torch.where(known, values - mean, 0).flatten())
    found = [
        float(a @ b / (a.norm() * b.norm()))
        for i, a in enumerate(centred)
        for b in centred[:i]
        if float(a.norm()) > 1e-9 and float(b.norm()) > 1e-9
    ]
    return min(found) if found else None

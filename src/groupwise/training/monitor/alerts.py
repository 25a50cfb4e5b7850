"""Alerts: what looks wrong in training, likely causes, and what to try.

Every alert is a row of `ALERT_RULES`: a metric, the setting that holds its threshold, causes in
order of likelihood, and the setting to change. It fires once the metric has been beyond the
threshold for `patience` consecutive steps, and again only after the metric has recovered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from groupwise.settings import AlertsSettings
from groupwise.types import Metrics

RECENT = 20
"""Number of recent steps that the hacking alert averages the reward over."""


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A row of the table of alerts.

    Attributes:
        threshold: name of the setting in the section [alerts], and of the alert.
        metric: name of the metric.
        below: fire below the threshold instead of above it.
        means: what has happened, in words.
        causes: three, the likeliest first.
        attempt: the setting to try.
        at_once: whether to fire without waiting for `patience` steps.
    """

    threshold: str
    metric: str
    means: str
    causes: tuple[str, str, str]
    attempt: str
    below: bool = False
    at_once: bool = False


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that fired: its rule, with the value and the threshold."""

    rule: AlertRule
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "below" if self.rule.below else "above"
        causes = "; ".join(f"({n}) {c}" for n, c in enumerate(self.rule.causes, start=1))
        return (
            f"alert {self.rule.threshold}: {self.rule.means} ({self.rule.metric} = "
            f"{self.value:.4g}, {side} alerts.{self.rule.threshold} = {self.threshold:g}). "
            f"Likely causes: {causes}. Try {self.rule.attempt}."
        )


ALERT_RULES: tuple[AlertRule, ...] = (
    AlertRule(
        threshold="equal_rewards",
        metric="reward_std",
        below=True,
        means="all rewards are equal, so there is no gradient",
        causes=(
            "the reward does not find the answer in what the model writes",
            "the prompts are all too hard or all too easy",
            "the reward ignores its inputs",
        ),
        attempt="`groupwise doctor RECIPE`, then easier prompts (data.train)",
    ),
    AlertRule(
        threshold="no_signal",
        metric="no_signal_share",
        means="nearly every group's rewards are all equal",
        causes=(
            "the prompts are too hard or too easy by now",
            "the group is too small to see a rare right answer",
            "the sampling temperature is too low to give different answers",
        ),
        attempt="a larger group_size, or algorithm.filter.name = 'spread'",
    ),
    AlertRule(
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
    AlertRule(
        threshold="truncated",
        metric="truncated_share",
        means="many completions reach the token limit before they end",
        causes=(
            "sampling.max_tokens is too small for the task",
            "the model has not learned to end its answers",
            "the end token is not among those of the model",
        ),
        attempt="a larger sampling.max_tokens, or a reward for ending in time "
        "(algorithm.filter.name = 'not_truncated' drops truncated answers; if all are truncated, "
        "no answer remains)",
    ),
    AlertRule(
        threshold="entropy",
        metric="entropy_left",
        below=True,
        means="the policy has lost nearly all of its initial entropy",
        causes=(
            "the learning rate is too high",
            "clipping suppresses unlikely tokens, which would keep the entropy up",
            "the task is solved, so this is expected",
        ),
        attempt="a lower optimizer.learning_rate, a higher clip (algorithm.surrogate.high), or "
        "algorithm.entropy = 0.001",
    ),
    AlertRule(
        threshold="kl",
        metric="kl",
        means="the policy has moved far from its reference",
        causes=(
            "the learning rate is too high",
            "the coefficient of the KL term is too small",
            "the reward is being exploited",
        ),
        attempt="a higher algorithm.divergence.coefficient or a lower optimizer.learning_rate",
    ),
    AlertRule(
        threshold="parts_against",
        metric="parts_correlation",
        below=True,
        means="two components of the reward contradict each other",
        causes=(
            "one component rewards what the other penalises",
            "the weights let a less important component dominate",
            "one component is exploited at the expense of the other",
        ),
        attempt="other weights (rewards.N.weight), or combine = 'gated_sum'",
    ),
    AlertRule(
        threshold="sampler_gap",
        metric="sampler_gap",
        means="sampler and learner disagree about the probabilities of the same tokens",
        causes=(
            "they use different dtypes or kernels",
            "the sampler has stale weights",
            "temperature or truncation is applied on one side only",
        ),
        attempt="model.dtype = 'float32' if the model has 16 bits, or algorithm.correction.name = "
        "'tis'",
        at_once=True,
    ),
    AlertRule(
        threshold="unmoved_parameters",
        metric="unmoved_share",
        means="some parameters did not change in the second step",
        causes=(
            "they are frozen, or not part of the computation",
            "the learning rate is too small for the dtype of the weights",
            "the batch had no gradient at all",
        ),
        attempt="a higher optimizer.learning_rate, or look at model.adapter.targets",
        at_once=True,
    ),
    AlertRule(
        threshold="duplicates",
        metric="duplicate_share",
        means="most completions repeat another one of their group, and are not right",
        causes=(
            "the sampling temperature is too low",
            "the policy has become deterministic",
            "the answers are so short that few different ones exist",
        ),
        attempt="sampling.temperature = 1.0 and a lower optimizer.learning_rate",
    ),
    AlertRule(
        threshold="hacking",
        metric="hacking",
        means="the reward rises while accuracy on held-out prompts falls",
        causes=(
            "the reward can be earned without solving the task",
            "the model memorises the training prompts",
            "the held-out prompts differ from the training prompts",
        ),
        attempt="a stricter reward; rollouts/ shows what earns it",
        at_once=True,
    ),
    AlertRule(
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
class Alerts:
    """Checks the metrics of a run against `ALERT_RULES`.

    Attributes:
        thresholds: where each alert fires.
    """

    thresholds: AlertsSettings = field(default_factory=AlertsSettings)
    _beyond: dict[str, int] = field(default_factory=dict)
    _first_lengths: list[float] = field(default_factory=list)
    _first_entropies: list[float] = field(default_factory=list)
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=2 * RECENT))
    _accuracies: list[tuple[float, float]] = field(default_factory=list)

    def observe(self, metrics: Mapping[str, float]) -> list[Alert]:
        """The alerts that fire at this step."""
        values = {**metrics, **self._changes(metrics)}
        return self._fired(values)

    def observe_evaluation(self, accuracy: float) -> list[Alert]:
        """The alerts that an evaluation on held-out prompts fires; NaN fires none."""
        if math.isnan(accuracy):
            return []
        reward = fmean(list(self._rewards)[-RECENT:]) if self._rewards else math.nan
        self._accuracies.append((reward, accuracy))
        best = max(self._accuracies, key=lambda pair: pair[1])
        risen = reward > best[0]
        return self._fired({"hacking": best[1] - accuracy if risen else 0.0})

    def _changes(self, metrics: Mapping[str, float]) -> Metrics:
        """Metrics that are derived from this step's, or relative to earlier steps."""
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
        """A value relative to its mean over the first steps: its scale depends on the task."""
        if value is None or not math.isfinite(value):
            return math.nan
        if len(first) < self.thresholds.patience:
            first.append(value)
        start = fmean(first)
        return value / start if start > 0 else math.nan

    def _fired(self, values: Mapping[str, float]) -> list[Alert]:
        alerts = []
        for rule in ALERT_RULES:
            threshold = getattr(self.thresholds, rule.threshold)
            value = values.get(rule.metric, math.nan)
            if threshold is None or math.isnan(value):
                continue
            beyond = value <= threshold if rule.below else value > threshold
            count = self._beyond.get(rule.threshold, 0) + 1 if beyond else 0
            self._beyond[rule.threshold] = count
            if count == (1 if rule.at_once else self.thresholds.patience):
                alerts.append(Alert(rule=rule, value=value, threshold=threshold))
        return alerts

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        return {
            "beyond": dict(self._beyond),
            "first_lengths": list(self._first_lengths),
            "first_entropies": list(self._first_entropies),
            "rewards": list(self._rewards),
            "accuracies": [list(pair) for pair in self._accuracies],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._beyond = dict(state.get("beyond", {}))
        self._first_lengths = list(state.get("first_lengths", []))
        self._first_entropies = list(state.get("first_entropies", []))
        self._rewards.extend(state.get("rewards", []))
        self._accuracies = [(a, b) for a, b in state.get("accuracies", [])]

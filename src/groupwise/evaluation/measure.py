"""Measuring a model: greedy and sampled answers to held-out prompts, judged as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, prompt_mean, wilson
from groupwise.evaluation.passk import pass_at_k
from groupwise.rewards import Scorer
from groupwise.types import Engine, Group, Prompt, Request, Sampling, Scores

STREAM = -1
"""The step that keys evaluation's random streams, so that it never shares numbers with training."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Answers of one model to one set of prompts.

    Attributes:
        greedy: correctness of the greedy answer to each prompt; NaN where it could not be judged.
        sampled: [prompt, sample], likewise.
        reward: mean reward of the sampled answers to each prompt.
        lengths: tokens of the sampled answers, [prompt, sample].
        truncated: share of sampled answers that ran out of tokens.
        groups: the sampled answers themselves.
    """

    greedy: np.ndarray
    sampled: np.ndarray
    reward: np.ndarray
    lengths: np.ndarray
    truncated: float
    groups: tuple[Group, ...]

    @property
    def figures(self) -> dict[str, Estimate]:
        """`greedy`, `sampled` and `pass_at_k`, each with its 95 % interval.

        Wilson's for the greedy answers, of which there is one per prompt; a bootstrap over prompts
        for the others, whose answers come k to a prompt. Answers that could not be judged are left
        out, and so is a prompt without any other.
        """
        greedy = self.greedy[~np.isnan(self.greedy)]
        judged = self.sampled[~np.isnan(self.sampled).any(1)]
        k = self.sampled.shape[1]
        figures = {"greedy": wilson(int(greedy.sum()), len(greedy))} if len(greedy) else {}
        if len(judged):
            figures["sampled"] = prompt_mean(judged)
            if k > 1:
                solved = [pass_at_k(k, int(row.sum()), k=k) for row in judged]
                figures[f"pass_at_{k}"] = prompt_mean(solved)
        figures["reward"] = prompt_mean(np.nan_to_num(self.reward))
        return figures


def measure(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    samples: int,
    seed: int = 0,
) -> Measurement:
    """Answer every prompt greedily once and `samples` times as in training, and judge the answers.

    The same seed gives every model the same random numbers, so that two models can be compared on
    the same items.

    Raises:
        UsageError: no prompts.
    """
    if not prompts:
        raise UsageError("evaluation.prompts = 0: there is nothing to measure on.")
    plain = Sampling(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)
    _, greedy = _answers(engine, scorer, prompts, tokens, plain, group=1, seed=seed)
    groups, sampled = _answers(engine, scorer, prompts, tokens, sampling, group=samples, seed=seed)
    return Measurement(
        greedy=_correct(greedy)[:, 0],
        sampled=_correct(sampled),
        reward=_mean(sampled.total.double().numpy()),
        lengths=np.array([[len(c.tokens) for c in group.completions] for group in groups]),
        truncated=float(np.mean([c.finish == "length" for g in groups for c in g.completions])),
        groups=tuple(groups),
    )


def _answers(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    group: int,
    seed: int,
) -> tuple[list[Group], Scores]:
    requests = [
        Request(prompt=prompt, tokens=ids, group=group, stream=(seed, STREAM, 0, place))
        for place, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True))
    ]
    answers: dict[int, Group] = {}
    tickets = {}
    for answered in engine.generate(requests, sampling):
        place = answered.stream[-1]
        answers[place], tickets[place] = answered, scorer.submit(answered)
    scores = scorer.gather([tickets[place] for place in range(len(requests))])
    return [answers[place] for place in range(len(requests))], scores


def _correct(scores: Scores) -> np.ndarray:
    """Raw correctness; where no part of the reward defines it, whether the reward is positive."""
    correct, total = scores.correct.double().numpy(), scores.total.double().numpy()
    if np.isnan(correct).all():
        correct = np.where(np.isnan(total), np.nan, (total > 0).astype(float))
    return np.where(scores.valid.numpy(), correct, np.nan)


def _mean(values: np.ndarray) -> np.ndarray:
    """Row means over what is not NaN; NaN where nothing is."""
    counts = (~np.isnan(values)).sum(1)
    return np.where(counts > 0, np.nansum(values, 1) / np.maximum(counts, 1), np.nan)

"""Measure a model: greedy and sampled answers to held-out prompts, scored as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, prompt_mean, wilson
from groupwise.evaluation.passk import pass_at_k
from groupwise.rewards import Scorer
from groupwise.types import Engine, Group, Prompt, Request, Sampling, Scores, Stream

STREAM = -1
"""Step of the random streams of evaluations, which share none with training."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Answers of one model to one set of prompts.

    Attributes:
        greedy: correctness of the greedy answer to each prompt; NaN where it was not judged.
        sampled: the same for the samples, [prompt, sample], the samples of all seeds side by side.
        rewards: of the samples, [prompt, sample]; NaN where not judged.
        lengths: tokens of the samples, [prompt, sample].
        truncations: which samples reached the token limit, [prompt, sample].
        greedy_groups, groups: the answers by prompt.
        greedy_parts: values of each reward for the greedy answers, [prompt, 1].
        seeds: number of sampling seeds.
    """

    greedy: np.ndarray
    sampled: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    truncations: np.ndarray
    greedy_groups: tuple[Group, ...]
    groups: tuple[Group, ...]
    seeds: int = 1
    greedy_parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def truncated(self) -> float:
        """Share of samples that reached the token limit."""
        return float(self.truncations.mean())

    @property
    def samples(self) -> int:
        """Samples per prompt and seed: the k of pass@k."""
        return self.sampled.shape[1] // self.seeds

    @property
    def by_prompt(self) -> dict[str, np.ndarray]:
        """Greedy and sampled accuracy, pass@k, calls of tools and reward of every prompt; NaN where
        not judged."""
        values = {"greedy": self.greedy, "sampled": self.sampled.mean(1)}
        n, k = self.sampled.shape[1], self.samples
        if k > 1:
            judged = ~np.isnan(values["sampled"])
            values[f"pass_at_{k}"] = np.full(len(judged), np.nan)
            values[f"pass_at_{k}"][judged] = [
                pass_at_k(n, int(right), k=k) for right in self.sampled[judged].sum(1)
            ]
        if any(c.values for group in self.groups for c in group.completions):
            values["calls"] = np.array(
                [np.mean([c.values.get("calls", 0.0) for c in g.completions]) for g in self.groups]
            )
        return values | {"reward": _row_means(self.rewards)}

    @property
    def figures(self) -> dict[str, Estimate]:
        """The means of `by_prompt` over the judged prompts, with 95 % intervals.

        Wilson's for greedy answers, one per prompt; a bootstrap over prompts for the others.
        """
        known = {name: values[~np.isnan(values)] for name, values in self.by_prompt.items()}
        return {
            name: wilson(int(values.sum()), len(values))
            if name == "greedy"
            else prompt_mean(values)
            for name, values in known.items()
            if len(values)
        }

    def part(self, chosen: Sequence[int]) -> Measurement:
        """The answers to the chosen prompts."""
        index = list(chosen)
        return replace(
            self,
            greedy=self.greedy[index],
            sampled=self.sampled[index],
            rewards=self.rewards[index],
            lengths=self.lengths[index],
            truncations=self.truncations[index],
            greedy_groups=tuple(self.greedy_groups[i] for i in index),
            groups=tuple(self.groups[i] for i in index),
            greedy_parts={name: values[index] for name, values in self.greedy_parts.items()},
        )


def measure(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    samples: int,
    seed: int = 0,
    seeds: int = 1,
) -> Measurement:
    """Answer every prompt greedily and by sampling, and score the answers.

    One seed gives every model the same random numbers, so that models can be compared item by item.

    Args:
        engine, scorer: generate and score the answers.
        prompts, tokens: the prompts, and their token ids.
        sampling: settings of the sampled answers.
        samples: samples per prompt and seed.
        seed, seeds: samples are drawn for `seed`, `seed` + 1, …, once for each of `seeds`.

    Raises:
        UsageError: no prompts.
    """
    if not prompts:
        raise UsageError("evaluation.prompts = 0: must be at least 1.")
    greedy_sampling = Sampling(
        max_tokens=sampling.max_tokens,
        max_turn_tokens=sampling.max_turn_tokens,
        temperature=0.0,
        stop=sampling.stop,
    )
    ask = (engine, scorer, prompts, tokens)
    greedy_groups, greedy = generate_and_score(*ask, greedy_sampling, group=1, seed=seed)
    drawn = [generate_and_score(*ask, sampling, group=samples, seed=seed + n) for n in range(seeds)]
    groups = [
        replace(same[0], completions=tuple(c for group in same for c in group.completions))
        for same in zip(*(groups for groups, _ in drawn), strict=True)
    ]
    return Measurement(
        greedy=correctness(greedy)[:, 0],
        sampled=np.concatenate([correctness(scores) for _, scores in drawn], 1),
        rewards=np.concatenate([scores.total.double().numpy() for _, scores in drawn], 1),
        lengths=np.array([[c.own_tokens for c in group.completions] for group in groups]),
        truncations=np.array([[c.finish == "length" for c in g.completions] for g in groups]),
        greedy_groups=tuple(greedy_groups),
        groups=tuple(groups),
        seeds=seeds,
        greedy_parts={name: each.double().numpy() for name, each in greedy.parts.items()},
    )


def generate_and_score(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    group: int,
    seed: int,
    prefix: Sequence[str] = (),
) -> tuple[list[Group], Scores]:
    """A group of answers to every prompt, in order, and their scores.

    Where answers are continued, `tokens` end with the `prefix` of each, which is scored as part of
    the answer.
    """
    requests = [
        Request(prompt=prompt, tokens=ids, group=group, stream=Stream(seed, STREAM, 0, place))
        for place, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True))
    ]
    answers: dict[int, Group] = {}
    tickets = {}
    for made in engine.generate(requests, sampling):
        place = made.stream.place
        if prefix:
            made = _continued(made, prefix[place])
        answers[place], tickets[place] = made, scorer.submit(made)
    scores = scorer.gather([tickets[place] for place in range(len(requests))])
    return [answers[place] for place in range(len(requests))], scores


def _continued(group: Group, prefix: str) -> Group:
    return replace(
        group, completions=tuple(replace(c, text=prefix + c.text) for c in group.completions)
    )


def correctness(scores: Scores) -> np.ndarray:
    """Correctness; without a reward that defines it, whether the reward is positive."""
    correct, total = scores.correct.double().numpy(), scores.total.double().numpy()
    if np.isnan(correct).all():
        correct = np.where(np.isnan(total), np.nan, (total > 0).astype(float))
    return np.where(scores.valid.numpy(), correct, np.nan)


def _row_means(values: np.ndarray) -> np.ndarray:
    """Row means without NaN; NaN for rows of NaN."""
    counts = (~np.isnan(values)).sum(1)
    return np.where(counts > 0, np.nansum(values, 1) / np.maximum(counts, 1), np.nan)

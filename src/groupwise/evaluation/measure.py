"""Measuring a model: greedy and sampled answers to held-out prompts, judged as in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, prompt_mean, wilson
from groupwise.evaluation.passk import pass_at_k
from groupwise.rewards import Scorer
from groupwise.types import Engine, Group, Prompt, Request, Sampling, Scores, Stream

STREAM = -1
"""The step that keys evaluation's random streams, so that it never shares numbers with training."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Answers of one model to one set of prompts.

    Attributes:
        greedy: correctness of the greedy answer to each prompt; NaN where it could not be judged.
        sampled: [prompt, sample], likewise; the samples of all seeds stand side by side.
        rewards: of the sampled answers, [prompt, sample]; NaN where not judged.
        lengths: tokens of the sampled answers, [prompt, sample].
        truncations: which sampled answers ran out of tokens, [prompt, sample].
        greedy_groups, groups: the answers themselves, by prompt.
        seeds: number of sampling seeds of `sampled`.
    """

    greedy: np.ndarray
    sampled: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray
    truncations: np.ndarray
    greedy_groups: tuple[Group, ...]
    groups: tuple[Group, ...]
    seeds: int = 1

    @property
    def truncated(self) -> float:
        """Share of sampled answers that ran out of tokens."""
        return float(self.truncations.mean())

    @property
    def samples(self) -> int:
        """Samples per prompt and seed: the k of pass@k."""
        return self.sampled.shape[1] // self.seeds

    @property
    def figures(self) -> dict[str, Estimate]:
        """`greedy`, `sampled`, `pass_at_k` and `reward`, each with its 95 % interval.

        Wilson's for the greedy answers, of which there is one per prompt; a bootstrap over prompts
        for the others, whose answers come k to a prompt and seed. Prompts with a sampled answer
        that could not be judged are left out; of the reward, answers that could not be.
        """
        greedy = self.greedy[~np.isnan(self.greedy)]
        judged = self.sampled[~np.isnan(self.sampled).any(1)]
        n, k = self.sampled.shape[1], self.samples
        figures = {"greedy": wilson(int(greedy.sum()), len(greedy))} if len(greedy) else {}
        if len(judged):
            figures["sampled"] = prompt_mean(judged)
            if k > 1:
                solved = [pass_at_k(n, int(row.sum()), k=k) for row in judged]
                figures[f"pass_at_{k}"] = prompt_mean(solved)
        rewards = _mean(self.rewards)
        if not np.isnan(rewards).all():
            figures["reward"] = prompt_mean(rewards[~np.isnan(rewards)])
        return figures

    def part(self, chosen: Sequence[int]) -> Measurement:
        """The answers to some of the prompts."""
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
    """Answer every prompt greedily once and `samples` times as in training, and judge the answers.

    The same seed gives every model the same random numbers, so that two models can be compared on
    the same items.

    Args:
        engine, scorer: who answers and who judges.
        prompts, tokens: the questions, and how the model sees them.
        sampling: of the sampled answers.
        samples: per prompt and seed.
        seed, seeds: the sampled answers are drawn for `seed`, `seed` + 1, … so many times.

    Raises:
        UsageError: no prompts.
    """
    if not prompts:
        raise UsageError("evaluation.prompts = 0: there is nothing to measure on.")
    plain = Sampling(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)
    ask = (engine, scorer, prompts, tokens)
    greedy_groups, greedy = generate_and_score(*ask, plain, group=1, seed=seed)
    drawn = [generate_and_score(*ask, sampling, group=samples, seed=seed + n) for n in range(seeds)]
    groups = [
        replace(same[0], completions=tuple(c for group in same for c in group.completions))
        for same in zip(*(groups for groups, _ in drawn), strict=True)
    ]
    return Measurement(
        greedy=correctness(greedy)[:, 0],
        sampled=np.concatenate([correctness(scores) for _, scores in drawn], 1),
        rewards=np.concatenate([scores.total.double().numpy() for _, scores in drawn], 1),
        lengths=np.array([[len(c.tokens) for c in group.completions] for group in groups]),
        truncations=np.array([[c.finish == "length" for c in g.completions] for g in groups]),
        greedy_groups=tuple(greedy_groups),
        groups=tuple(groups),
        seeds=seeds,
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
    """A group of answers to every prompt, in the order of the prompts, and what they scored.

    `prefix` holds the start of each answer where the prompt already contains it: `tokens` end with
    it, and the scorer sees it as part of the answer.
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
    """Raw correctness; where no part of the reward defines it, whether the reward is positive."""
    correct, total = scores.correct.double().numpy(), scores.total.double().numpy()
    if np.isnan(correct).all():
        correct = np.where(np.isnan(total), np.nan, (total > 0).astype(float))
    return np.where(scores.valid.numpy(), correct, np.nan)


def _mean(values: np.ndarray) -> np.ndarray:
    """Row means over what is not NaN; NaN where nothing is."""
    counts = (~np.isnan(values)).sum(1)
    return np.where(counts > 0, np.nansum(values, 1) / np.maximum(counts, 1), np.nan)

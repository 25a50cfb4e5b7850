"""Details behind an accuracy: answer formats, consistency, length and difficulty."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import numpy as np

from groupwise.evaluation.intervals import Estimate, prompt_mean, wilson
from groupwise.evaluation.korean import korean_figures
from groupwise.evaluation.measure import Measurement
from groupwise.evaluation.passk import best_of_k, majority_at_k, pass_at_k
from groupwise.rewards import extract_answer
from groupwise.rewards.extract import Style
from groupwise.rewards.math.numbers import plain_number
from groupwise.rewards.math.reward import exact_answer
from groupwise.types import Completion, Group, Prompt

DIFFICULTY = ("level", "difficulty", "people", "hops")
"""Columns of the data that say how hard a problem is; the first one that is there counts."""

MOST_LEVELS = 12
"""A column with more different values is not a scale of difficulty."""

MOST_CALLS = 5
"""Answers with more calls of tools are counted among those with this number."""


def calls_made(completion: Completion) -> int:
    """Number of calls of a completion, at most `MOST_CALLS`."""
    return min(int(completion.values.get("calls", 0)), MOST_CALLS)


def details(
    measured: Measurement, prompts: Sequence[Prompt], *, style: Style | None = None
) -> dict[str, Estimate]:
    """The figures of a measurement and everything that qualifies them.

    Args:
        measured: answers to `prompts`.
        prompts: in the order of the answers.
        style: how the reward finds an answer (`extract_answer`); None where it does not read one
            answer out of a text, and then nothing depends on how it is read.

    Returns:
        By name, after those of `measured`:
        `greedy_lenient`, `sampled_lenient`: correct if the answer is looked for in any form;
        `maj_at_k`, `best_at_k`: of k samples the most frequent answer, and the best-rewarded one;
        `well_formed`, `right_if_formed`: greedy answers in which the reward finds an answer, and
        how many of those are right; `length`, `truncated`: of the sampled answers, and
        `length_right`, `length_wrong` over prompts with such an answer; `calls` of tools where
        there are any, and `accuracy_after_n_calls` of the sampled answers with n calls, over
        prompts with such an answer;
        the score of the Korean orthography task where its rewards are (`korean_figures`);
        `seed_deviation`: standard deviation of the sampled accuracy over several seeds.
        Shares of greedy answers have Wilson's interval, the others a bootstrap over prompts, each
        with the samples of all seeds.
    """
    plain, k = measured.figures, measured.samples
    figures = {name: plain[name] for name in ("greedy", "sampled", f"pass_at_{k}") if name in plain}
    if style is not None:
        figures |= _answer_figures(measured, prompts, style=style)
    judged = ~np.isnan(measured.sampled).any(1) & ~np.isnan(measured.rewards).any(1)
    if k > 1 and judged.any():
        pairs = zip(measured.rewards[judged], measured.sampled[judged], strict=True)
        best = prompt_mean([best_of_k(reward, right, k=k) for reward, right in pairs])
        # Where the reward is the correctness, the best of k is right whenever any of them is.
        if best.value != plain[f"pass_at_{k}"].value:
            figures[f"best_at_{k}"] = best
    figures |= {name: plain[name] for name in ("reward", "calls") if name in plain}
    if "calls" in plain:
        figures |= _by_calls(measured)
    figures |= korean_figures(measured.greedy_groups, measured.greedy_parts, prompts)
    figures["length"] = prompt_mean(measured.lengths)
    for name, those in (("right", measured.sampled == 1), ("wrong", measured.sampled == 0)):
        lengths = [
            row[chosen].mean()
            for row, chosen in zip(measured.lengths, those, strict=True)
            if chosen.any()
        ]
        if lengths:
            figures[f"length_{name}"] = prompt_mean(lengths)
    figures["truncated"] = prompt_mean(measured.truncations)
    if measured.seeds > 1 and "sampled" in plain:
        unknown = float("nan")
        figures["seed_deviation"] = Estimate(
            value=float(_by_seed(measured).std(ddof=1)), low=unknown, high=unknown
        )
    return figures


def _by_seed(measured: Measurement) -> np.ndarray:
    """The sampled accuracy of every sampling seed."""
    shape = (-1, measured.seeds, measured.samples)
    return np.nanmean(measured.sampled.reshape(shape), axis=(0, 2))


def reordered(models: Sequence[Measurement]) -> float | None:
    """The share of sampling seeds in which a model is below another that it is above over all
    seeds, by sampled accuracy.

    Returns:
        None for a single model or seed, and where a model was not judged.

    Source: "A sober look at progress in language model reasoning" (2504.07086).
    """
    if len(models) < 2 or models[0].seeds < 2 or any(np.isnan(m.sampled).all() for m in models):
        return None
    by_seed = np.stack([_by_seed(each) for each in models])
    signs = np.sign(by_seed[:, None] - by_seed[None])
    over_all = np.sign(by_seed.mean(1)[:, None] - by_seed.mean(1)[None])
    return float((signs * over_all[..., None] < 0).any((0, 1)).mean())


def _by_calls(measured: Measurement) -> dict[str, Estimate]:
    """Sampled accuracy by number of calls, over prompts with such an answer."""
    calls = np.array([[calls_made(c) for c in group.completions] for group in measured.groups])
    calls[np.isnan(measured.sampled)] = -1
    figures = {}
    for n in range(MOST_CALLS + 1):
        rows = zip(measured.sampled, calls == n, strict=True)
        if means := [row[chosen].mean() for row, chosen in rows if chosen.any()]:
            figures[f"accuracy_after_{n}_calls"] = prompt_mean(means)
    return figures


def curve_over_k(
    measured: Measurement, ks: Sequence[int], *, style: Style | None = None
) -> dict[str, Estimate]:
    """pass@k and maj@k for several k from the same samples, those of all seeds together.

    Args:
        measured: n samples of each prompt.
        ks: values of k, each at most n.
        style: how the reward finds an answer; None where it reads none, and then nothing votes.

    Returns:
        `pass_at_k` for every k, then `maj_at_k`; nothing where no prompt was judged. At k = 1 both
        are the sampled accuracy, except that maj@1 takes answers that vote alike as one.

    Raises:
        UsageError: a k above n.

    Source: `pass_at_k` and `majority_at_k`, which average over all subsets of k samples.
    """
    judged = [
        (group, right)
        for group, right in zip(measured.groups, measured.sampled, strict=True)
        if not np.isnan(right).any()
    ]
    if not judged:
        return {}
    figures = {
        f"pass_at_{k}": prompt_mean([pass_at_k(len(r), int(r.sum()), k=k) for _, r in judged])
        for k in ks
    }
    if style is not None:
        votes = [([_vote(c.text, style) for c in g.completions], r.tolist()) for g, r in judged]
        for k in ks:
            figures[f"maj_at_{k}"] = prompt_mean([majority_at_k(*each, k=k) for each in votes])
    return figures


def adherence(lengths: np.ndarray, target: int) -> dict[str, Estimate]:
    """How closely answers keep to the length that their prompts ask for.

    Args:
        lengths: tokens of the samples, [prompt, sample].
        target: n, the length asked for, in tokens.

    Returns:
        `length_deviation`: mean of (length − n) / n; `length_rmse`: root mean square of the same;
        `within_target`: share of samples of at most n tokens. Intervals are a bootstrap over
        prompts; that of the root mean square is the root of the interval of the mean square.

    Example:
        >>> found = adherence(np.array([[80, 100], [120, 140]]), 100)
        >>> {name: round(figure.value, 3) for name, figure in found.items()}
        {'length_deviation': 0.1, 'length_rmse': 0.245, 'within_target': 0.5}

    Source: L1 (2503.04697), mean deviation and root mean squared error from the target length.
    """
    deviation = lengths / target - 1
    square = prompt_mean(deviation**2)
    roots = {name: float(np.sqrt(max(value, 0.0))) for name, value in vars(square).items()}
    return {
        "length_deviation": prompt_mean(deviation),
        "length_rmse": Estimate(**roots),
        "within_target": prompt_mean(lengths <= target),
    }


def by_difficulty(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Places of the prompts of each level of difficulty, if the data has such a column.

    Example:
        >>> by_difficulty([Prompt(id=str(n), text="?", columns={"level": n % 2}) for n in range(4)])
        {'level 0': [0, 2], 'level 1': [1, 3]}
    """
    for column in DIFFICULTY:
        levels = [prompt.columns.get(column) for prompt in prompts]
        known = {str(level) for level in levels if isinstance(level, str | int | float)}
        if 1 < len(known) <= MOST_LEVELS:
            return {
                f"{column} {level}": [i for i, each in enumerate(levels) if str(each) == level]
                for level in sorted(known, key=_in_order)
            }
    return {}


def _answer_figures(
    measured: Measurement, prompts: Sequence[Prompt], *, style: Style
) -> dict[str, Estimate]:
    """Figures that depend on where an answer is looked for."""
    figures: dict[str, Estimate] = {}
    lenient = np.array([_lenient(group, p) for group, p in _pairs(measured.greedy_groups, prompts)])
    known = lenient[~np.isnan(lenient)]
    if len(known):
        figures["greedy_lenient"] = wilson(int(known.sum()), len(known))
    sampled = np.array([_lenient(group, p) for group, p in _pairs(measured.groups, prompts)])
    judged = sampled[~np.isnan(sampled).any(1)]
    if len(judged):
        figures["sampled_lenient"] = prompt_mean(judged)
    k = measured.samples
    votes = [
        majority_at_k([_vote(c.text, style) for c in group.completions], right.tolist(), k=k)
        for group, right in zip(measured.groups, measured.sampled, strict=True)
        if not np.isnan(right).any()
    ]
    if k > 1 and votes:
        figures[f"maj_at_{k}"] = prompt_mean(votes)
    formed = np.array(
        [
            extract_answer(group.completions[0].text, style=style) is not None
            for group in measured.greedy_groups
        ]
    )
    figures["well_formed"] = wilson(int(formed.sum()), len(formed))
    right = measured.greedy[formed & ~np.isnan(measured.greedy)]
    if len(right):
        figures["right_if_formed"] = wilson(int(right.sum()), len(right))
    return figures


def _pairs(groups: Sequence[Group], prompts: Sequence[Prompt]) -> list[tuple[Group, Prompt]]:
    return list(zip(groups, prompts, strict=True))


def _lenient(group: Group, prompt: Prompt) -> list[float]:
    """Correctness of every answer of a group, wherever it stands; NaN where it cannot be judged."""
    found = [exact_answer(c.text, prompt.answer, style="auto") for c in group.completions]
    return [float("nan") if value is None else value for value in found]


def _vote(text: str, style: Style) -> Hashable | None:
    """An answer as it votes: numbers by their value, other text without case and white space."""
    said = extract_answer(text, style=style)
    if said is None:
        return None
    number = plain_number(said)
    return re.sub(r"\s+", "", said).casefold() if number is None else number.value


def _in_order(level: str) -> tuple[float, str]:
    try:
        return float(level), level
    except ValueError:
        return float("inf"), level

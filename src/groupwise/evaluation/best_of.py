"""What choosing among n sampled answers would gain: pass@k, majority, best reward, shortest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, prompt_mean
from groupwise.evaluation.passk import best_of_k, majority_at_k, pass_at_k
from groupwise.rewards import extract_answer

Row = Mapping[str, Any]


def selection_figures(
    rows: Iterable[Row], *, ks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> dict[str, dict[str, Estimate]]:
    """Accuracy of ways to choose one of k sampled answers, exact over all subsets of k.

    Args:
        rows: sampled answers with `id`, `correct`, `tokens`; `reward` and `answer_given` (or
            `completion`, out of which the answer is read) where there are any.
        ks: numbers of answers; those that not every prompt has are left out.

    Returns:
        By k as "k = 4": `pass` (any of k is right), `majority` (their most frequent answer),
        `best_reward`, and `shortest_right`: the tokens of the shortest right answer among all,
        for the prompts that have one, beside `tokens` of all answers. Intervals are a bootstrap
        over prompts.

    Raises:
        UsageError: no prompt has an answer that was judged.

    Example:
        >>> rows = [{"id": 1, "correct": c, "tokens": t, "reward": c, "completion": str(c)}
        ...         for c, t in ((1, 5), (0, 2), (1, 3))]
        >>> found = selection_figures(rows)
        >>> [round(found["k = 2"][name].value, 2) for name in ("pass", "best_reward")]
        [1.0, 1.0]
        >>> found["all answers"]["shortest_right"].value
        3.0
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.get("correct") is not None:
            groups.setdefault(row["id"], []).append(row)
    if not groups:
        raise UsageError("samples: no answer was judged, so there is no accuracy.")
    judged = list(groups.values())
    fewest = min(map(len, judged))
    found = {f"k = {k}": _at(k, judged) for k in ks if k <= fewest}
    if f"k = {fewest}" not in found:
        found[f"k = {fewest}"] = _at(fewest, judged)
    solved = [[row["tokens"] for row in group if row["correct"] >= 1] for group in judged]
    lengths = {"tokens": prompt_mean([_mean(row["tokens"] for row in g) for g in judged])}
    if shortest := [min(lengths_of) for lengths_of in solved if lengths_of]:
        lengths["right_tokens"] = prompt_mean([_mean(each) for each in solved if each])
        lengths["shortest_right"] = prompt_mean(shortest)
    return found | {"all answers": lengths}


def _at(k: int, groups: Sequence[Sequence[Row]]) -> dict[str, Estimate]:
    right = [[float(row["correct"] >= 1) for row in group] for group in groups]
    figures = {
        "pass": prompt_mean([pass_at_k(len(each), int(sum(each)), k=k) for each in right]),
        "majority": prompt_mean(
            [
                majority_at_k([_vote(row) for row in group], each, k=k)
                for group, each in zip(groups, right, strict=True)
            ]
        ),
    }
    if all(row.get("reward") is not None for group in groups for row in group):
        figures["best_reward"] = prompt_mean(
            [
                best_of_k([row["reward"] for row in group], each, k=k)
                for group, each in zip(groups, right, strict=True)
            ]
        )
    return figures


def _vote(row: Row) -> Hashable | None:
    """The answer of a completion as it votes."""
    given = row.get("answer_given")
    if given is None:
        given = extract_answer(row["completion"], style="auto")
    return None if given in (None, "") else "".join(str(given).split()).casefold()


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)

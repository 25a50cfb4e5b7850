"""Pass rate against the number of programs that may be submitted for a problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupwise.errors import UsageError
from groupwise.evaluation.intervals import Estimate, prompt_mean
from groupwise.evaluation.passk import pass_at_k

Row = Mapping[str, Any]

ORDERS = {"selected": "submission", "majority": "majority"}
"""Orders of submission, by the column that holds the place, from 1."""


def submission_figures(
    rows: Iterable[Row], *, submissions: Sequence[int] = (1, 2, 3, 5, 10, 20, 50, 100)
) -> dict[str, dict[str, Estimate]]:
    """The share of problems of which at least one submitted program is right.

    Args:
        rows: programs with `id`, `correct`, `submission`, `majority` and `examples`, as
            `groupwise.training.stages.select_programs` writes them.
        submissions: how many may be submitted; those that not every problem has are left out.

    Returns:
        By number of submissions as "submissions = 2": `selected` (the order of `submission`),
        `examples` (programs that pass most examples, in random order: no clusters), `majority`
        (clusters by size alone), `random` (any order, which is what submitting without running
        reaches) and `gain`, selected minus random in the same problems. `examples` and `random` are
        exact expectations. Intervals are a bootstrap over problems.

    Raises:
        UsageError: no program was judged.

    Example:
        >>> rows = [{"id": 1, "correct": c, "submission": s, "majority": m, "examples": e}
        ...         for c, s, m, e in ((0, 2, 1, 0.0), (1, 1, 2, 1.0), (0, 3, 3, 0.0))]
        >>> found = submission_figures(rows)["submissions = 1"]
        >>> [round(found[name].value, 2) for name in ("selected", "examples", "majority", "random")]
        [1.0, 1.0, 0.0, 0.33]

    Source: AlphaCode (2203.07814), 10@k; Chen et al. 2021 (2107.03374) for random order.
    """
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if row.get("correct") is not None:
            groups.setdefault(row["id"], []).append(row)
    if not groups:
        raise UsageError("programs: none was judged, so there is no pass rate.")
    problems = list(groups.values())
    fewest = min(map(len, problems))
    known = sorted({k for k in submissions if k <= fewest} | {fewest})
    return {f"submissions = {k}": _at(k, problems) for k in known}


def _at(k: int, problems: Sequence[Sequence[Row]]) -> dict[str, Estimate]:
    shares = {
        name: [_first(group, column, k) for group in problems] for name, column in ORDERS.items()
    }
    shares["examples"] = [_by_examples(group, k) for group in problems]
    shares["random"] = [pass_at_k(len(group), _right(group), k=k) for group in problems]
    gain = [a - b for a, b in zip(shares["selected"], shares["random"], strict=True)]
    order = ("selected", "examples", "majority", "random")
    return {name: prompt_mean(shares[name]) for name in order} | {"gain": prompt_mean(gain)}


def _first(group: Sequence[Row], column: str, k: int) -> float:
    """Whether one of the first k programs in an order is right."""
    ordered = sorted(group, key=lambda row: row[column])
    return float(_right(ordered[:k]) > 0)


def _by_examples(group: Sequence[Row], k: int) -> float:
    """Chance that one of k programs is right, where those that pass most examples come first."""
    left = k
    for share in sorted({row["examples"] or 0.0 for row in group}, reverse=True):
        tier = [row for row in group if (row["examples"] or 0.0) == share]
        if left < len(tier):
            return pass_at_k(len(tier), _right(tier), k=left) if left else 0.0
        if _right(tier):
            return 1.0
        left -= len(tier)
    return 0.0


def _right(rows: Sequence[Row]) -> int:
    return sum(row["correct"] >= 1 for row in rows)

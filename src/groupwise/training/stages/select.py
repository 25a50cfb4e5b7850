"""Which sampled answers go on to the next stage, and pairs of them for preferences.

A row is one sampled answer: `id` of its prompt, `completion` (its text), `tokens` (its length),
`reward`, and `correct` (1, 0, or None where nothing decides). Rules are registered functions from
rows to rows; their keyword-only parameters are their settings.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.registry import BoundFunction, Registry, parse_spec
from groupwise.rewards.builtin.format import language_consistency

Row = Mapping[str, Any]

SELECTIONS = Registry("selection", ("rows",))


@dataclass(frozen=True, kw_only=True)
class Selected:
    """What some rules left.

    Attributes:
        rows: the answers that stay, in their order.
        counts: how many rows came in, and how many each rule left, in the order of the rules.
    """

    rows: tuple[Row, ...]
    counts: tuple[tuple[str, int], ...]


def rules_of(texts: Sequence[str]) -> list[BoundFunction]:
    """Parse rules such as `correct`, `pass_rate(above=0.1, below=0.9)`.

    Raises:
        UsageError: no such rule or setting, one that cannot be read, or an impossible value.

    Example:
        >>> [str(rule.spec) for rule in rules_of(["correct", "at_most(count=2)"])]
        ['correct', 'at_most(count=2)']
    """
    rules = [SELECTIONS.bind(parse_spec(text, where="selection")) for text in texts]
    for rule in rules:
        rule({"rows": []})  # refuses impossible values, which no row is needed for
    return rules


def select(rows: Iterable[Row], rules: Sequence[BoundFunction]) -> Selected:
    """Apply rules one after the other.

    Raises:
        UsageError: a rule leaves nothing, or a row lacks what a rule reads.

    Example:
        >>> from groupwise.registry import spec
        >>> rows = [{"id": "a", "tokens": n, "correct": n < 3} for n in (2, 1, 3)]
        >>> selected = select(rows, [SELECTIONS.bind(spec("shortest_correct"))])
        >>> [row["tokens"] for row in selected.rows], selected.counts
        ([1], (('sampled', 3), ('shortest_correct()', 1)))
    """
    left = list(rows)
    counts = [("sampled", len(left))]
    for rule in rules:
        try:
            left = rule({"rows": left})
        except KeyError as error:
            raise UsageError(f"{rule.spec}: a row has no column {error}.") from None
        label = str(rule.spec)
        counts.append((label if "(" in label else f"{label}()", len(left)))
        if not left:
            before = counts[-2]
            raise UsageError(f"{rule.spec}: leaves none of the {before[1]} rows before it.")
    return Selected(rows=tuple(left), counts=tuple(counts))


@SELECTIONS.register
def correct(rows: Sequence[Row]) -> list[Row]:
    """Right answers."""
    return [row for row in rows if _right(row)]


@SELECTIONS.register
def shortest_correct(rows: Sequence[Row]) -> list[Row]:
    """The shortest right answer of every prompt; of equally short ones the first."""
    return _one_a_prompt(correct(rows), key=lambda row: row["tokens"])


@SELECTIONS.register
def best(rows: Sequence[Row], *, count: int = 1, column: str = "reward") -> list[Row]:
    """The answers of every prompt with the highest rewards; of equal ones the first.

    Answers without a reward are not chosen.

    Args:
        count: answers per prompt.
        column: with the reward, or another score.
    """
    _at_least_one("count", count)
    chosen = {
        id(row)
        for group in by_prompt([row for row in rows if row[column] is not None])
        for row in sorted(group, key=lambda row: -row[column])[:count]
    }
    return [row for row in rows if id(row) in chosen]


@SELECTIONS.register
def pass_rate(rows: Sequence[Row], *, above: float = 0.0, below: float = 1.0) -> list[Row]:
    """All answers of the prompts that are solved sometimes: above < share of right ones < below.

    Args:
        above, below: bounds of the share, not included.
    """
    if not 0 <= above < below <= 1:
        raise UsageError(f"above, below = {above}, {below}: must be 0 ≤ above < below ≤ 1.")
    kept = {
        group[0]["id"]
        for group in by_prompt(rows)
        if above < sum(map(_right, group)) / len(group) < below
    }
    return [row for row in rows if row["id"] in kept]


@SELECTIONS.register
def distinct(rows: Sequence[Row]) -> list[Row]:
    """The first of every prompt's equal answers; white space and Unicode form do not count."""
    seen: set[tuple[Any, str]] = set()
    kept = []
    for row in rows:
        key = (row["id"], " ".join(unicodedata.normalize("NFC", row["completion"]).split()))
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return kept


@SELECTIONS.register
def length(rows: Sequence[Row], *, least: int = 0, most: int = 1_000_000) -> list[Row]:
    """Answers of least to most tokens, both included.

    Args:
        least, most: bounds in tokens.
    """
    if not 0 <= least <= most:
        raise UsageError(f"least, most = {least}, {most}: must be 0 ≤ least ≤ most.")
    return [row for row in rows if least <= row["tokens"] <= most]


@SELECTIONS.register
def language(rows: Sequence[Row], *, language: str = "korean", share: float = 0.9) -> list[Row]:
    """Answers of which at least `share` of the words are in one language.

    Args:
        language: as the reward `language_consistency` takes it.
        share: of words, from 0 to 1.

    Source: DeepSeek-R1 (2501.12948), section 2.3.2, drops chains of thought of mixed languages.
    """
    if not 0 <= share <= 1:
        raise UsageError(f"share = {share!r}: must be 0 to 1.")
    language_consistency("", language=language)
    return [
        row for row in rows if language_consistency(row["completion"], language=language) >= share
    ]


@SELECTIONS.register
def at_most(rows: Sequence[Row], *, count: int) -> list[Row]:
    """The first answers of every prompt.

    Args:
        count: answers per prompt.
    """
    _at_least_one("count", count)
    taken: dict[Any, int] = {}
    kept = []
    for row in rows:
        taken[row["id"]] = taken.get(row["id"], 0) + 1
        if taken[row["id"]] <= count:
            kept.append(row)
    return kept


def preference_pairs(
    rows: Sequence[Row], *, ratio: float = 1.5, most: int = 1
) -> list[dict[str, Any]]:
    """Pairs of the shortest right answer and one that is wrong or much longer (long2short DPO).

    Args:
        rows: sampled answers.
        ratio: a right answer at least `ratio` times as long as the chosen one is rejected.
        most: pairs per prompt; wrong answers come before long ones, otherwise the order of rows.

    Returns:
        Rows with the prompt's columns and `chosen`, `rejected`, `reason` ("wrong" or "longer").

    Raises:
        UsageError: ratio not above 1, or no prompt with such a pair.

    Source: Kimi k1.5 (2501.12599), section 2.4.
    """
    if not ratio > 1:
        raise UsageError(f"ratio = {ratio!r}: must be greater than 1.")
    _at_least_one("most", most)
    pairs = []
    for group in by_prompt(rows):
        chosen = shortest_correct(group)
        if not chosen:
            continue
        wrong = [(row, "wrong") for row in group if row["correct"] is not None and not _right(row)]
        limit = ratio * chosen[0]["tokens"]
        longer = [(row, "longer") for row in group if _right(row) and row["tokens"] >= limit]
        for row, reason in [*wrong, *longer][:most]:
            pair = {"chosen": chosen[0]["completion"], "rejected": row["completion"]}
            own = {"completion", "tokens", "reward", "correct", "sample"}
            pairs.append({k: v for k, v in row.items() if k not in own} | pair | {"reason": reason})
    if not pairs:
        raise UsageError(
            f"pairs: none of {len(by_prompt(rows))} prompts has a right answer beside a wrong or a "
            f"{ratio:g} times longer one."
        )
    return pairs


def by_prompt(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of every prompt, in order of first appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row["id"], []).append(row)
    return list(found.values())


def _one_a_prompt(rows: Sequence[Row], *, key: Callable[[Row], Any]) -> list[Row]:
    return [min(group, key=key) for group in by_prompt(rows)]


def _right(row: Row) -> bool:
    """Whether an answer is right; a share of correctness has to be whole."""
    return row["correct"] is not None and row["correct"] >= 1


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} = {value!r}: must be at least 1.")

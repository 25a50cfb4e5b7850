"""Preferences in TRL's data formats, and rankings of several answers.

    pair        chosen, rejected; prompt, or the beginning that both share; margin
    unpaired    prompt, completion, label (true: wanted)
    ranking     prompt, completions, ranks (1 is best) or scores

Answers are texts, or lists of messages that follow the messages of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from groupwise.errors import UsageError
from groupwise.prompts.rows import Row, read_rows
from groupwise.types import Prompt

Answer = str | tuple[Mapping[str, str], ...]
"""The text of an answer, or its messages."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """An order of some answers to one prompt.

    Attributes:
        answers: their places among the answers of the prompt.
        ranks: the place of each, smaller is better; equal ranks are ties.
        margin: by how much the better answer of a pair leads; 0 if not given.
    """

    answers: tuple[int, ...]
    ranks: tuple[float, ...]
    margin: float = 0.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(better, worse) of all answers that differ in rank."""
        ranked = list(zip(self.answers, self.ranks, strict=True))
        return [(a, b) for a, rank in ranked for b, other in ranked if rank < other]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prompt, answers to it, and how they were judged.

    Attributes:
        prompt: the prompt.
        answers: the answers, all different.
        rankings: orders of them; a pair is a ranking of two.
        labels: whether each is wanted, as the first row says that labels it; None if not given.
        scores: a number for each, from the first row that gives one; NaN where there is none.
        source: where it comes from, as the column `source` says.
    """

    prompt: Prompt
    answers: tuple[Answer, ...]
    rankings: tuple[Ranking, ...] = ()
    labels: tuple[bool | None, ...] = ()
    scores: tuple[float, ...] = ()
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """The prompts of a data set, each with all its answers; and rows left out, by reason."""

    items: tuple[Comparison, ...]
    dropped: Mapping[str, int]


def read_comparisons(
    source: str | Sequence[Row],
    *,
    split: str = "train",
    revision: str | None = None,
    bad_rows: Literal["refuse", "drop"] = "refuse",
) -> Comparisons:
    """Read a data set; rows of the same prompt become one comparison, equal answers one answer.

    Args:
        source: as `read_rows` takes it, or rows.
        split: of a folder or hub data set.
        revision: commit, tag or branch of a hub data set.
        bad_rows: "refuse" raises on the first row that says nothing; "drop" leaves it out.

    Raises:
        UsageError: a row that cannot be used, with its number.

    Example:
        >>> row = {"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}
        >>> found = read_comparisons([row, {**row, "rejected": " 6"}])
        >>> found.items[0].answers, [r.pairs for r in found.items[0].rankings]
        ((' 4', ' 5', ' 6'), [[(0, 1)], [(0, 2)]])
    """
    rows = read_rows(source, split=split, revision=revision) if isinstance(source, str) else source
    name = os.path.basename(source) if isinstance(source, str) else "preferences"
    merged: dict[str, Comparison] = {}
    dropped: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        try:
            found = _comparison_of(row)
            known = merged.get(found.prompt.id)
            merged[found.prompt.id] = found if known is None else _joined(known, found)
        except UsageError as error:
            raise UsageError(f"{name}, row {number}: {error}") from None
        except _SaysNothing as error:
            if bad_rows == "refuse":
                raise UsageError(
                    f"{name}, row {number}: {error}; remove the row, or skip all such rows "
                    "with bad_rows = 'drop'."
                ) from None
            dropped[str(error)] = dropped.get(str(error), 0) + 1
    if not merged:
        raise UsageError(f"{name}: no row is left of {len(rows)}.")
    return Comparisons(items=tuple(merged.values()), dropped=dropped)


class _SaysNothing(Exception):
    """A well-formed row that nothing can be learned from."""


def _comparison_of(row: Row) -> Comparison:
    """One row as a comparison.

    Raises:
        UsageError: columns are missing or hold something else.
    """
    if "chosen" in row or "rejected" in row:
        return _pair(row)
    if "completions" in row:
        return _ranking(row)
    if "completion" in row:
        return _single(row)
    raise UsageError(
        "must have the columns chosen and rejected, or completions and ranks, or completion and "
        f"label; it has {', '.join(map(str, row))}."
    )


def _pair(row: Row) -> Comparison:
    chosen, rejected = _side(row, "chosen"), _side(row, "rejected")
    if isinstance(chosen, str) is not isinstance(rejected, str):
        raise UsageError("chosen and rejected: must both be texts or both lists of messages.")
    if chosen == rejected:
        raise _SaysNothing("chosen and rejected are equal")
    if row.get("prompt") is None:
        shared = _shared(chosen, rejected)
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
        if not chosen or not rejected:
            raise UsageError(
                f"{'rejected' if chosen else 'chosen'}: is the beginning of the other answer, so "
                "nothing says where the prompt ends; give a column prompt."
            )
        prompt = _prompt(shared, row)
    else:
        prompt = _prompt(row["prompt"], row)
        chosen, rejected = (_without(prompt, a) for a in (chosen, rejected))
    margin = row.get("margin")
    if margin is not None and not _is_finite(margin):
        raise UsageError(f"margin = {margin!r}: must be a finite number.")
    return Comparison(
        prompt=prompt,
        answers=(chosen, rejected),
        rankings=(Ranking(answers=(0, 1), ranks=(1, 2), margin=float(margin or 0)),),
        labels=(True, False),
        scores=tuple(_number(row, f"score_{side}") for side in ("chosen", "rejected")),
        source=_source(row),
    )


def _single(row: Row) -> Comparison:
    prompt = _prompt(_given(row, "prompt"), row)
    answer = _without(prompt, _side(row, "completion"))
    label = row.get("label")
    if label is None and row.get("score") is None:
        raise UsageError(
            "label: is missing; true marks a desirable completion, false an undesirable one."
        )
    if label is not None and label not in (True, False):
        raise UsageError(f"label = {label!r}: must be true or false.")
    return Comparison(
        prompt=prompt,
        answers=(answer,),
        labels=(None if label is None else bool(label),),
        scores=(_number(row, "score"),),
        source=_source(row),
    )


def _ranking(row: Row) -> Comparison:
    prompt = _prompt(_given(row, "prompt"), row)
    given = row["completions"]
    if "labels" in row and row.get("ranks") is None and row.get("scores") is None:
        raise UsageError(
            "labels: belong to steps; set reward_model.step_separator to the text that joins the "
            "steps, or add a column ranks or scores."
        )
    if not isinstance(given, list | tuple) or len(given) < 2:
        raise UsageError("completions: must be a list of at least two answers.")
    answers = tuple(
        _without(prompt, _as_answer(answer, f"completions.{i}")) for i, answer in enumerate(given)
    )
    if len(set(map(_key, answers))) < len(answers):
        raise _SaysNothing("two of the completions are equal")
    by_score = row.get("ranks") is None
    name = "scores" if by_score else "ranks"
    numbers = _given(row, name)
    if not isinstance(numbers, list | tuple) or len(numbers) != len(answers):
        count = len(numbers) if isinstance(numbers, list | tuple) else repr(numbers)
        raise UsageError(
            f"{name}: must contain a number for each of the {len(answers)} completions, "
            f"not {count}."
        )
    for number in numbers:
        if not _is_finite(number):
            raise UsageError(f"{name}: holds {number!r}; must be finite numbers.")
    if len(set(numbers)) == 1:
        raise _SaysNothing(f"all {name} are equal")
    if not by_score and len(set(numbers)) < len(numbers):
        raise _SaysNothing("ranks hold a tie")
    ranks = tuple(-float(n) if by_score else float(n) for n in numbers)
    return Comparison(
        prompt=prompt,
        answers=answers,
        rankings=(Ranking(answers=tuple(range(len(answers))), ranks=ranks),),
        labels=(None,) * len(answers),
        scores=tuple(map(float, numbers)) if by_score else (math.nan,) * len(answers),
        source=_source(row),
    )


def _joined(known: Comparison, more: Comparison) -> Comparison:
    """Two comparisons of one prompt as one."""
    places = {_key(answer): place for place, answer in enumerate(known.answers)}
    answers, labels, scores = list(known.answers), list(known.labels), list(known.scores)
    moved = {}
    for place, answer in enumerate(more.answers):
        at = moved[place] = places.setdefault(_key(answer), len(answers))
        if at == len(answers):
            answers.append(answer)
            labels.append(more.labels[place])
            scores.append(more.scores[place])
        else:
            label, score = more.labels[place], more.scores[place]
            if not more.rankings and {labels[at], label} == {True, False}:
                raise _SaysNothing("an earlier row gives the same completion the other label")
            if not more.rankings and abs(score - scores[at]) > 0:
                raise _SaysNothing("an earlier row gives the same completion another score")
            labels[at] = label if labels[at] is None else labels[at]
            scores[at] = score if math.isnan(scores[at]) else scores[at]
    rankings = [
        replace(ranking, answers=tuple(moved[a] for a in ranking.answers))
        for ranking in more.rankings
    ]
    return replace(
        known,
        answers=tuple(answers),
        rankings=(*known.rankings, *rankings),
        labels=tuple(labels),
        scores=tuple(scores),
    )


def _given(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise UsageError(f"{name}: is missing.")
    return row[name]


def _side(row: Row, name: str) -> Any:
    """The answer in a column."""
    return _as_answer(_given(row, name), name)


def _as_answer(value: Any, name: str) -> Answer:
    if isinstance(value, str):
        if not value.strip():
            raise UsageError(f"{name}: is empty.")
        return value
    return messages_of(value, name)


def messages_of(value: Any, name: str) -> tuple[Mapping[str, str], ...]:
    """The messages that a column holds.

    Raises:
        UsageError: it holds something else.
    """
    if not are_messages(value):
        raise UsageError(f"{name}: must be a text or messages with role and content.")
    return tuple(dict(message) for message in value)


def are_messages(value: Any) -> bool:
    """Whether a column holds messages, each with a role and a text, parts of one, or calls of
    tools."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str | list) or (content is None and bool(value.get("tool_calls")))


def _shared(first: Any, second: Any) -> Any:
    """The beginning that two answers share; TRL takes it for the prompt."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    if isinstance(first, str) and first[:same].endswith(" "):
        same -= 1  # The space belongs to the first word of the answers.
    if not same:
        raise UsageError(
            "chosen and rejected: must begin with the same text, or the row needs a column prompt."
        )
    return first[:same]


def _without(prompt: Prompt, answer: Answer) -> Answer:
    """An answer without the prompt that it may repeat, as in conversations of both turns."""
    if isinstance(answer, str):
        return answer
    if not prompt.messages:
        raise UsageError("prompt: is a text, and the answers are messages; both must be the same.")
    if answer[0]["role"] == "assistant":
        return answer
    size = len(prompt.messages)
    if answer[:size] != prompt.messages or len(answer) == size:
        raise UsageError("prompt: is not the beginning of the answers' messages.")
    return answer[size:]


def _prompt(value: Any, row: Row) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise UsageError("prompt: is empty.")
        text, messages = value, ()
    else:
        text, messages = None, messages_of(value, "prompt")
    return Prompt(
        id=_key(messages or text),
        text=text,
        messages=messages,
        answer=None if row.get("answer") is None else str(row["answer"]),
    )


def _key(value: Any) -> str:
    """A name of a value that depends on its content alone."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if value is None:
        return math.nan
    if not _is_finite(value):
        raise UsageError(f"{name} = {value!r}: must be a finite number.")
    return float(value)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _source(row: Row) -> str | None:
    return None if row.get("source") is None else str(row["source"])

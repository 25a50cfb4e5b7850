"""Rollouts for the page: deduplicated strings, columns instead of records, within a size budget."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.report.curves import labels_of
from groupwise.report.data import Row, RunData
from groupwise.report.text import embedded, number, visible

# Keeps the page below 8 MB; everything else takes less than 1 MB.
BUDGET_BYTES = 6_500_000
UNCOMPRESSED_BYTES = 1_500_000


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Packed rollouts for the rollout browser.

    Attributes:
        text: JSON, or its gzip in base64.
        compressed: which of the two.
        shown, total: number of completions in it, and in the runs.
        runs: label and seed of its runs.
    """

    text: str
    compressed: bool
    shown: int
    total: int
    runs: tuple[tuple[str, int], ...]


_COLUMNS = (
    "text",
    "reward",
    "advantage",
    "correct",
    "status",
    "finish",
    "tokens",
    "part",
    "levels",
    "pieces",
    "calls",
    "injected",
)


def payload(runs: Sequence[RunData], *, budget: int = BUDGET_BYTES) -> Payload | None:
    """Pack the rollouts of the run with the lowest seed of each label.

    Args:
        runs: the runs of the report.
        budget: most bytes of the packed rollouts.

    Returns:
        The packed rollouts; if not all fit, evenly spaced groups are left out. None without
        rollouts.
    """
    chosen = [
        min((run for run in runs if run.label == label), key=lambda run: run.seed)
        for label in labels_of(runs)
    ]
    groups = [(place, group) for place, run in enumerate(chosen) for group in run.rollouts]
    total = sum(len(_completions(group)) for _, group in groups)
    if not total:
        return None
    kept = groups
    while True:
        packed = _pack(kept)
        text, compressed = _encode(packed)
        if len(text) <= budget or len(kept) == 1:
            break
        wanted = max(1, int(len(kept) * 0.9 * budget / len(text)))
        kept = [kept[i * len(kept) // wanted] for i in range(wanted)]
    return Payload(
        text=text,
        compressed=compressed,
        shown=len(packed["reward"]),
        total=total,
        runs=tuple((run.label, run.seed) for run in chosen),
    )


def _pack(groups: Sequence[tuple[int, Row]]) -> dict[str, Any]:
    # Repeated values are stored once and referred to by index.
    strings: dict[str, int] = {}
    parts: dict[tuple[Any, ...], int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    rows = []
    for run, group in groups:
        prompt = group.get("prompt")
        prompt = prompt if isinstance(prompt, Mapping) else {"text": prompt}
        completions = _completions(group)
        rows.append(
            [
                run,
                number(group.get("step")) or 0,
                *(_place(strings, _text(prompt.get(key))) for key in ("id", "text", "answer")),
                len(completions),
            ]
        )
        for completion in completions:
            _append(columns, completion, strings, parts)
    return {"strings": list(strings), "parts": list(parts), "groups": rows, **columns}


def _append(
    columns: dict[str, list[Any]],
    completion: Row,
    strings: dict[str, int],
    parts: dict[tuple[Any, ...], int],
) -> None:
    given = completion.get("parts")
    named = given.items() if isinstance(given, Mapping) else ()
    levels, pieces = _surprise(completion)
    tokens = completion.get("tokens")
    columns["text"].append(_place(strings, _text(completion.get("text"))))
    columns["reward"].append(number(completion.get("reward")))
    columns["advantage"].append(number(completion.get("advantage")))
    correct = completion.get("correct")
    columns["correct"].append(int(correct) if isinstance(correct, bool) else number(correct))
    columns["status"].append(_place(strings, _text(completion.get("status") or "ok")))
    columns["finish"].append(_place(strings, _text(completion.get("finish") or "stop")))
    columns["tokens"].append(len(tokens) if isinstance(tokens, list) else number(tokens))
    columns["part"].append(_place(parts, tuple((_text(k), number(v)) for k, v in named)))
    columns["levels"].append(_place(strings, levels))
    columns["pieces"].append(_place(strings, pieces))
    values = completion.get("values")
    columns["calls"].append(number(values.get("calls")) if isinstance(values, Mapping) else None)
    columns["injected"].append(_place(strings, _spans(completion)))


def _spans(completion: Row) -> str:
    """Where injected text stands in the visible text, in UTF-16 units as the page counts:
    "12-40 80-99"."""
    given, text = completion.get("injected"), _text(completion.get("text"))
    if not isinstance(given, list):
        return ""
    spans = [s for s in given if isinstance(s, list) and all(isinstance(n, int) for n in s)]
    units = [[_units(text, n) for n in span] for span in spans]
    return " ".join(f"{first}-{last}" for first, last in units if first < last)


def _units(text: str, end: int) -> int:
    """UTF-16 units that the first characters of a text take once they are visible."""
    if text[:end].endswith("\r") and text[end : end + 1] == "\n":
        end -= 1  # the page shows a line break as one character
    return len(visible(text[:end]).encode("utf-16-le")) // 2


def _surprise(completion: Row) -> tuple[str, str]:
    """One digit per token for how unlikely it was: 0 (certain) to 9 (3 nats and more).

    Where the pieces of text that the tokens stand for are known (`pieces`), their lengths follow
    in base 36, so that the text can be coloured; else only the digits are shown.
    """
    logprobs, pieces = completion.get("logprobs"), completion.get("pieces")
    if not isinstance(logprobs, list):
        return "", ""
    levels = "".join(
        "0" if (value := number(logp)) is None else str(min(9, max(0, int(-3 * value))))
        for logp in logprobs
    )
    if not isinstance(pieces, list) or len(pieces) != len(levels):
        return levels, ""
    lengths = [len(_text(piece)) for piece in pieces]
    text = _text(completion.get("text"))
    # The page counts in UTF-16 units of the visible text: only where those agree can it cut there.
    same = visible(text) == text and len(text.encode("utf-16-le", "replace")) == 2 * len(text)
    if max(lengths, default=0) > 35 or sum(lengths) != len(text) or not same:
        return levels, ""
    return levels, "".join("0123456789abcdefghijklmnopqrstuvwxyz"[length] for length in lengths)


def _completions(group: Row) -> list[Row]:
    found = group.get("completions")
    return [c for c in found if isinstance(c, Mapping)] if isinstance(found, list | tuple) else []


def _encode(packed: Mapping[str, Any]) -> tuple[str, bool]:
    text = embedded(packed)
    if len(text.encode("utf-8")) <= UNCOMPRESSED_BYTES:
        return text, False
    # mtime=0 keeps the page reproducible.
    squeezed = gzip.compress(text.encode("utf-8"), compresslevel=6, mtime=0)
    return base64.b64encode(squeezed).decode("ascii"), True


def _place(table: dict[Any, int], value: Any) -> int:
    return table.setdefault(value, len(table))


def _text(value: object) -> str:
    return "" if value is None else str(value)

"""Files of sampled answers: written by `sample`, read by `select` and by whoever trains on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.prompts.rows import read_rows
from groupwise.rundir.files import replace_text

NEEDED = ("id", "completion")


def read_samples(
    path: str | Path, *, columns: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The sampled answers of a file, one row each.

    Args:
        path: .jsonl, .json, .csv or .parquet.
        columns: other names of columns, as {"completion": "code"}. A named column that holds lists
            has one entry per answer, and its row becomes as many rows.

    Returns:
        Rows with at least `id`, `completion` and `tokens`; where nothing counts tokens, words are
        counted.

    Raises:
        UsageError: no such file or column, or lists of different lengths in one row.

    Example:
        >>> import tempfile; name = Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = name.write_text('{"idx": 4, "code": ["1 + 1", "2"], "score": [true, false]}')
        >>> found = read_samples(
        ...     name, columns={"id": "idx", "completion": "code", "correct": "score"})
        >>> [(row["sample"], row["tokens"], row["correct"]) for row in found]
        [(0, 3, True), (1, 1, False)]
    """
    rows = []
    for number, row in enumerate(read_rows(str(path)), start=1):
        rows += _exploded(row, columns or {}, f"{path}, row {number}")
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        raise UsageError(
            f"{path}: has no column {missing[0]!r}; name another one as "
            f"--columns {missing[0]}=NAME. {suggest(missing[0], rows[0])}"
        )
    return [row if "tokens" in row else row | {"tokens": _words(row)} for row in rows]


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, in one step.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text(Path(path), "".join(line(row) for row in rows))


def line(row: Mapping[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def _exploded(
    row: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> Sequence[dict[str, Any]]:
    """One row per answer, with the columns under their usual names."""
    for name in columns.values():
        if name not in row:
            raise UsageError(f"{where}: has no column {name!r}; {suggest(name, row)}")
    named = {usual: row[name] for usual, name in columns.items()}
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    lengths = {len(value) for value in named.values() if isinstance(value, list)}
    if len(lengths) > 1:
        raise UsageError(
            f"{where}: lists of {sorted(lengths)} entries; they must have the same length."
        )
    if not lengths:
        return [rest | named]
    return [
        rest
        | {k: _single(v[place]) if isinstance(v, list) else v for k, v in named.items()}
        | {"sample": place}
        for place in range(lengths.pop())
    ]


def _single(value: Any) -> Any:
    """The content of a list of one entry, as reward models write their scores."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _words(row: Mapping[str, Any]) -> int:
    return len(str(row["completion"]).split())

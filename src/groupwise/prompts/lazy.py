"""Large data sets: rows are read, and prompts made from them, on access.

Memory holds two offsets per row, or a memory map, so a million prompts start as quickly as a
thousand. A bad row is reported when it is drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from groupwise.errors import UsageError
from groupwise.types import Prompt

LARGE_BYTES = 32 * 2**20
"""Smaller files are read whole."""

MAX_ROW_BYTES = 2**24
"""Longest line of a file with one row per line."""

CHUNK = 2**24

T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """A sequence that makes its items on access and does not keep them.

    Args:
        length: number of items.
        make: called with an index, returns the item.
        digest: a hash of what the items are made of, where all of it was read.
    """

    def __init__(self, length: int, make: Callable[[int], T], *, digest: bytes = b"") -> None:
        self.length, self.make, self.digest = length, make, digest

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> LazySequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | LazySequence[T]:
        if isinstance(index, slice):
            chosen = range(self.length)[index]
            return LazySequence(len(chosen), lambda i: self.make(chosen[i]), digest=self.digest)
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.make(index % self.length)

    def __iter__(self) -> Iterator[T]:
        return (self.make(index) for index in range(self.length))


def line_rows(path: Path) -> LazySequence[Mapping[str, Any]]:
    """The rows of a file with one JSON object per line; empty lines are skipped.

    Raises:
        UsageError: on access to a row that is too long or not an object.
    """
    starts, ends, digest = _lines(path)
    size = path.stat().st_size

    def row(index: int) -> Mapping[str, Any]:
        start, end = int(starts[index]), int(ends[index])
        if end - start > MAX_ROW_BYTES:
            raise UsageError(
                f"{path}, row {index + 1}: has {(end - start) / 2**20:.0f} MiB; at most "
                f"{MAX_ROW_BYTES / 2**20:g} MiB are read."
            )
        with path.open("rb") as file:
            if file.seek(0, 2) != size:
                raise UsageError(f"{path}: has changed since the run began.")
            file.seek(start)
            line = file.read(end - start)
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, row {index + 1}: is not JSON ({error}).") from None
        if not isinstance(found, Mapping):
            raise UsageError(
                f"{path}, row {index + 1}: must be an object with named columns, not "
                f"{type(found).__name__}."
            )
        return found

    return LazySequence(len(starts), row, digest=digest)


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Byte offsets of the start and end of every non-empty line, and a hash of the file."""
    breaks, offset, whole = [], 0, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            whole.update(chunk)
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            breaks.append(found.astype(np.int64) + offset)
            offset += len(chunk)
    ends = np.concatenate([*breaks, np.array([offset], dtype=np.int64)])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    used = ends - starts > 1  # skips "\n" and "\r\n"
    return starts[used], ends[used], whole.digest()


def table_rows(table: Any) -> LazySequence[Mapping[str, Any]]:
    """The rows of a `datasets.Dataset`, which are mapped from disk."""
    return LazySequence(len(table), lambda index: table[index])


def lazy_prompts(
    rows: LazySequence[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any], str], Prompt],
    where: str,
) -> LazySequence[Prompt]:
    """Prompts made from rows; ids end in the row number, which distinguishes equal rows."""

    def prompt(index: int) -> Prompt:
        made = make(rows[index], f"{where}, row {index + 1}")
        return replace(made, id=f"{made.id}-{index}")

    return LazySequence(len(rows), prompt, digest=rows.digest)

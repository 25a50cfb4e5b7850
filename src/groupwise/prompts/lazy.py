"""Data sets too large to hold: rows are read, and prompts made, when they are drawn.

What is held is one number per row (where its line begins) or a memory map; so a million prompts
start as quickly as a thousand. What is wrong with a row is found when it is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from groupwise.errors import UsageError
from groupwise.types import Prompt

LARGE_BYTES = 32 * 2**20
"""Files from this size on are not read whole."""

CHUNK = 2**24

T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose items are made when they are asked for, and not kept.

    Args:
        length: how many there are.
        make: from a place to the item there.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> LazySequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | LazySequence[T]:
        if isinstance(place, slice):
            chosen = range(self.length)[place]
            return LazySequence(len(chosen), lambda i: self.make(chosen[i]))
        if not -self.length <= place < self.length:
            raise IndexError(place)
        return self.make(place % self.length)

    def __iter__(self) -> Iterator[T]:
        return (self.make(place) for place in range(self.length))


def line_rows(path: Path) -> LazySequence[Mapping[str, Any]]:
    """The rows of a file with one JSON object per line; empty lines are left out.

    Raises:
        UsageError: when a row is asked for that is no object.
    """
    starts, ends = _lines(path)
    size = path.stat().st_size

    def row(place: int) -> Mapping[str, Any]:
        start, end = int(starts[place]), int(ends[place])
        with path.open("rb") as file:
            if file.seek(0, 2) != size:
                raise UsageError(f"{path}: has changed since the run began.")
            file.seek(start)
            line = file.read(end - start)
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, row {place + 1}: is not JSON ({error}).") from None
        if not isinstance(found, Mapping):
            raise UsageError(
                f"{path}, row {place + 1}: must be an object with named columns, not "
                f"{type(found).__name__}."
            )
        return found

    return LazySequence(len(starts), row)


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Where each line that holds something begins and ends, in bytes."""
    breaks, offset = [], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            breaks.append(found.astype(np.int64) + offset)
            offset += len(chunk)
    ends = np.concatenate([*breaks, np.array([offset], dtype=np.int64)])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    used = ends - starts > 1  # "\n" and "\r\n" alone are no rows
    return starts[used], ends[used]


def table_rows(table: Any) -> LazySequence[Mapping[str, Any]]:
    """The rows of a data set of `datasets`, which are mapped from disk."""
    return LazySequence(len(table), lambda place: table[place])


def lazy_prompts(
    rows: LazySequence[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any], str], Prompt],
    where: str,
) -> LazySequence[Prompt]:
    """Prompts of rows. Their ids end in the number of the row, which keeps equal rows apart."""

    def prompt(place: int) -> Prompt:
        made = make(rows[place], f"{where}, row {place + 1}")
        return replace(made, id=f"{made.id}-{place}")

    return LazySequence(len(rows), prompt)

"""TRL's data sets as prompts: a column `prompt`, text or messages, and columns for the rewards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.types import Prompt

LONGEST_STREAM = 10_000
"""Prompts of a stream to evaluate on that are read before it is taken for endless."""
KEPT_FROM_REWARDS = ("prompt", "completion", "completion_ids")
IMAGES = ("image", "images")


def prompts(
    data: Any,
    *,
    where: str,
    limit: int | None = None,
    alone: bool = False,
    default: tuple[Mapping[str, str], ...] | None = None,
) -> list[Prompt]:
    """The prompts of a data set.

    Args:
        data: a `datasets.Dataset`, or rows as mappings; a stream needs a limit.
        where: name of the argument, for messages.
        limit: read only this many rows.
        alone: drop every column but the prompt.
        default: the prompt of rows without one; None refuses them.

    Raises:
        UsageError: no rows, no column `prompt`, prompts of another form, images, or a stream whose
            end is not known.
    """
    if isinstance(data, Mapping):
        raise UsageError(f"{where}: is a table of data sets; pass one of them: {where}['train'].")
    if limit is None and data is not None and not hasattr(data, "__len__"):
        raise UsageError(
            f"{where}: is a stream, so GRPOConfig.max_steps must say how much to read."
        )
    rows = list(itertools.islice(_rows(data, where), limit))
    if not rows:
        raise UsageError(f"{where}: has no rows; a run needs at least one prompt.")
    if default is not None:
        rows = [{"prompt": default, **row} if isinstance(row, Mapping) else row for row in rows]
    return [_prompt(row, number, where=where, alone=alone) for number, row in enumerate(rows)]


def held_out(data: Any, read: Callable[[Any, str], list[Prompt]]) -> dict[str, list[Prompt]]:
    """The prompts of data sets to evaluate on, by name; a single one has the name "".

    Args:
        data: a data set, or several by name (a dict, a `DatasetDict`); streams are read to the end.
        read: the prompts of a data set, given where it comes from.

    Raises:
        UsageError: as `prompts`, or a stream of more than `LONGEST_STREAM` rows.
    """
    if not isinstance(data, Mapping):
        return {"": read(_finite(data, "eval_dataset"), "eval_dataset")}
    if not data:
        raise UsageError("eval_dataset = {}: names no data set; remove it.")
    places = {str(name): f"eval_dataset[{name!r}]" for name in data}
    sets = zip(places.items(), data.values(), strict=True)
    return {name: read(_finite(one, where), where) for (name, where), one in sets}


def _finite(data: Any, where: str) -> Any:
    """The rows of a stream as a list; anything else as it is."""
    if data is None or isinstance(data, str) or hasattr(data, "__len__"):
        return data
    rows = list(itertools.islice(_rows(data, where), LONGEST_STREAM + 1))
    if len(rows) > LONGEST_STREAM:
        raise UsageError(
            f"{where}: is a stream of more than {LONGEST_STREAM} rows, and an evaluation reads all "
            f"of them; say how many, such as {where}.take(500)."
        )
    return rows


def _rows(data: Any, where: str) -> Iterable[Any]:
    if data is None:
        raise UsageError(
            f"`{where}` is required: pass a datasets.Dataset or a list of rows with a column "
            "'prompt'; only a single environment_factory does without."
        )
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise UsageError(
            f"{where} = {data!r}: must be a datasets.Dataset or a list of rows with a column "
            "'prompt'."
        )
    return data


def _prompt(row: Any, number: int, *, where: str, alone: bool) -> Prompt:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}, row {number}: must be a row with named columns.")
    if "prompt" not in row:
        raise UsageError(f"{where}: has no column 'prompt'; {suggest('prompt', row)}")
    pictures = [name for name in IMAGES if row.get(name) is not None]
    if pictures:
        raise UsageError(f"{where}: has a column {pictures[0]!r}; only text is supported.")
    columns = {key: row[key] for key in row if key not in KEPT_FROM_REWARDS and not alone}
    value = row["prompt"]
    if isinstance(value, str):
        if not value:
            raise UsageError(f"{where}, row {number}: the prompt is empty.")
        return Prompt(id=f"row-{number}", text=value, columns=columns)
    return Prompt(id=f"row-{number}", messages=_messages(value, number, where), columns=columns)


def _messages(value: Any, number: int, where: str) -> tuple[Mapping[str, str], ...]:
    turns = list(value) if isinstance(value, Iterable) else []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, Mapping) else None
        if not isinstance(turn, Mapping) or "role" not in turn or not isinstance(content, str):
            raise UsageError(
                f"{where}, row {number}: the prompt must be text, or messages with a role and "
                f"text as content, not {str(turn)[:60]!r}."
            )
    if not turns:
        raise UsageError(f"{where}, row {number}: the prompt is empty.")
    return tuple({"role": str(turn["role"]), "content": turn["content"]} for turn in turns)

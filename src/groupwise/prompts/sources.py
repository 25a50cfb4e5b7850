"""Prompts from a file, a folder, the hub, a generator, or memory."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from string import Formatter
from typing import Any, get_args

from groupwise.errors import UsageError, suggest
from groupwise.prompts.answers import ANSWERS
from groupwise.prompts.generators.closed_world import closed_world
from groupwise.prompts.generators.korean_norms import korean_norms
from groupwise.prompts.generators.korean_particles import korean_particles
from groupwise.prompts.generators.puzzles import countdown, knights_knaves, reasoning_gym
from groupwise.prompts.generators.word_problems import Split, word_problems
from groupwise.prompts.lazy import LazySequence, lazy_prompts
from groupwise.prompts.rows import Row, in_memory, read_rows
from groupwise.registry import BoundFunction, FunctionSpec, Registry, parse_spec, spec
from groupwise.types import Prompt

GENERATORS = Registry("generator", data=("count",))
"""Functions from a count to a list of `Prompt`, with `split` and `seed` as settings."""
for _generator in (
    word_problems, knights_knaves, countdown, korean_norms, korean_particles, reasoning_gym,
    closed_world,
):  # fmt: skip
    GENERATORS.register(_generator)

GENERATED = 4096
"""Number of prompts of a generator without a limit."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_GENERATED_SPLITS: Mapping[str, str] = {"test": "held_out"} | {s: s for s in get_args(Split)}
"""Splits of generators, with the usual name "test" for the held-out one."""

Source = str | Path | Iterable[str | Row | Prompt] | Mapping[str, Any]


def load_prompts(
    source: Source,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    prompt_column: str = "prompt",
    answer_column: str | None = None,
    id_column: str | None = None,
    answer_style: str = "plain",
    system: str | None = None,
    wording: str | None = None,
    chat: bool = True,
    limit: int | None = None,
    seed: int = 0,
) -> Sequence[Prompt]:
    """Prompts of a data set, in order; those of a large one are made on access.

    Args:
        source: the name of a generator ("word_problems", "reasoning_gym:leg_counting"); a
            .jsonl, .json, .csv or .parquet file; a folder; a hub name; or data in memory: a list or
            stream of strings, rows or ready `Prompt` objects, a `Dataset`, a `DatasetDict`, a
            `DataFrame`, or a dict of columns.
        split: split of a hub data set, folder, `DatasetDict` or generator ("test" is held out).
        subset: configuration of a hub data set.
        revision: commit, tag or branch of a hub data set.
        prompt_column: the question, as text or a list of messages. Here and below, "input.question"
            is a field of a column that holds objects.
        answer_column: the reference answer; None takes the column "answer" if there is one.
        id_column: stable ids; None makes an id by hashing the content.
        answer_style: how the answer is written, one of `ANSWERS`.
        system: a system message before every question.
        wording: a template that makes the question from several columns, such as
            "{context}\\n\\n{question}", in place of `prompt_column`. Lists of strings become one
            line each.
        chat: text becomes a user message for the chat template; False passes it to the model
            unchanged.
        limit: read at most this many prompts.
        seed: of a generator.

    Returns:
        At least one prompt, with distinct ids that are the same on every machine.

    Raises:
        UsageError: a missing file, an unknown column, style or field, an empty data set, or a bad
            row.

    Example:
        >>> row = {"q": "1+1?", "answer": "#### 2"}
        >>> prompts = load_prompts([row], prompt_column="q", answer_style="gsm8k")
        >>> prompts[0].answer, prompts[0].messages
        ('2', ({'role': 'user', 'content': '1+1?'},))
    """
    if limit is not None and limit < 1:
        raise UsageError(f"data.limit = {limit}: must be at least 1.")
    if isinstance(source, str) and (made := generator_of(source)) is not None:
        return _generate(made, split=split, count=limit or GENERATED, seed=seed)
    if isinstance(source, str) and not Path(source).exists():
        meant = source.replace("-", "_").lower()
        if meant.partition(":")[0] in GENERATORS:
            raise UsageError(f"data = {source!r}: no such file; did you mean {meant}?")
    if isinstance(source, str | Path):
        where = str(source)
        given = read_rows(where, split=split, subset=subset, revision=revision)
    else:
        where, given = "prompts", in_memory(source, split=split, limit=limit)
        if not given:
            raise UsageError("prompts = []: must contain at least one prompt.")
    given = given[:limit]
    rows: Sequence[Row]
    if isinstance(given, LazySequence):
        rows = given
    elif all(isinstance(item, Prompt) for item in given):
        ready = [item for item in given if isinstance(item, Prompt)]
        return _with_distinct_ids(ready, where, given_ids=id_column is not None)
    else:
        rows = _as_rows(
            [{prompt_column: item} if isinstance(item, str) else item for item in given], where
        )
    columns = _Columns(
        prompt=prompt_column,
        answer="answer" if answer_column is None and "answer" in rows[0] else answer_column,
        id=id_column,
        style=ANSWERS.bind(spec(answer_style), where="data.answer_style"),
        system=system,
        wording=wording,
        chat=chat,
    )
    _check_columns(columns, list(rows[0]), where)
    if isinstance(rows, LazySequence):
        return lazy_prompts(rows, lambda row, row_name: _prompt(row, columns, row_name), where)
    prompts = [
        _prompt(row, columns, f"{where}, row {number}") for number, row in enumerate(rows, start=1)
    ]
    return _with_distinct_ids(prompts, where, given_ids=id_column is not None)


def generator_of(source: str) -> FunctionSpec | None:
    """The generator that a name stands for, with its settings; None for files and hub names.

    Example:
        >>> print(generator_of("knights_knaves(people=[3, 7])"), generator_of("openai/gsm8k"))
        knights_knaves(people=[3, 7]) None

    Raises:
        UsageError: settings that cannot be read.
    """
    name, _, task = source.partition(":")
    if name in GENERATORS:
        return spec(name, **({"task": task} if task else {}))
    if source.partition("(")[0].strip() in GENERATORS:
        return parse_spec(source, where="data")
    return None


def _generate(chosen: FunctionSpec, *, split: str, count: int, seed: int) -> list[Prompt]:
    if split not in _GENERATED_SPLITS:
        raise UsageError(
            f"data.split = {split!r}: {chosen.name} has no such split; "
            + suggest(split, _GENERATED_SPLITS)
        )
    settings = {"split": _GENERATED_SPLITS[split], "seed": seed} | dict(chosen.settings)
    return GENERATORS.bind(spec(chosen.name, **settings), where="data")({"count": count})


def _as_rows(items: Sequence[Any], where: str) -> list[Row]:
    for number, item in enumerate(items, start=1):
        if not isinstance(item, Mapping):
            raise UsageError(
                f"{where}, item {number}: must be a string or a row with named columns, like the "
                f"others, not {type(item).__name__}."
            )
    return list(items)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Columns and styles of a data set, as in `load_prompts`."""

    prompt: str
    answer: str | None
    id: str | None
    style: BoundFunction
    system: str | None
    wording: str | None
    chat: bool


def _check_columns(columns: _Columns, known: Sequence[str], where: str) -> None:
    wanted = [("wording", field) for field in _fields(columns.wording)] if columns.wording else []
    wanted += [] if columns.wording else [("prompt_column", columns.prompt)]
    wanted += [("answer_column", columns.answer)] if columns.answer else []
    wanted += [("id_column", columns.id)] if columns.id else []
    for setting, column in wanted:
        if column not in known and column.partition(".")[0] not in known:
            raise UsageError(
                f"data.{setting} = {column!r}: {where} has no such column; {suggest(column, known)}"
            )


def _prompt(row: Row, columns: _Columns, where: str) -> Prompt:
    messages, text = _question(row, columns, where)
    answer = _answer(row, columns, where)
    for piece in (text, answer, *(turn["content"] for turn in messages)):
        if piece is not None and _SURROGATE.search(piece):
            raise UsageError(
                f"{where}: {piece[:40]!r} contains a lone surrogate, which no tokenizer can read; "
                "fix or remove the row."
            )
    return Prompt(
        id=str(_value(row, columns.id, where))
        if columns.id
        else _content_id(messages, text, answer),
        messages=messages,
        text=text,
        answer=answer,
        value=_untexted(row, columns, where),
        columns={
            key: value for key, value in row.items() if columns.wording or key != columns.prompt
        },
    )


def _question(
    row: Row, columns: _Columns, where: str
) -> tuple[tuple[Mapping[str, str], ...], str | None]:
    """The messages or the plain text of a row."""
    if columns.wording:
        fields = {field: _lines(_value(row, field, where)) for field in _fields(columns.wording)}
        question: Any = columns.wording.format(**fields)
    else:
        question = _value(row, columns.prompt, where)
    system = ({"role": "system", "content": columns.system},) if columns.system else ()
    if isinstance(question, str):
        if not question.strip():
            raise UsageError(f"{where}: {columns.prompt!r} is empty; every prompt needs some text.")
        if columns.chat or system:
            return (*system, {"role": "user", "content": question}), None
        return (), question
    messages = _messages(question, f"{where}: {columns.prompt!r}")
    return (messages if messages[0]["role"] == "system" else (*system, *messages)), None


def _answer(row: Row, columns: _Columns, where: str) -> str | None:
    value = _answer_value(row, columns, where)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if not text.strip():
        return None
    answer = columns.style({"text": text})
    if answer is None:
        raise UsageError(
            f"{where}: {columns.answer!r} = {text[-40:]!r} holds no answer in the style "
            f"{columns.style.spec.name!r} (data.answer_style)."
        )
    return answer


def _untexted(row: Row, columns: _Columns, where: str) -> Any:
    """The answer as the data has it, if that is not text."""
    value = _answer_value(row, columns, where)
    return None if isinstance(value, str) else value


def worded(wording: str, question: str) -> str:
    """A question in a wording that names a single column.

    Raises:
        UsageError: the wording names several columns, or is not a template.

    Example:
        >>> worded("Question: {question}", "Who?")
        'Question: Who?'
    """
    fields = set(_fields(wording))
    if len(fields) > 1:
        raise UsageError(
            f"data.wording = {wording!r}: names the columns {', '.join(sorted(fields))}, but a "
            "message is a single text; set data.wording = '{question}'."
        )
    return wording.format(**dict.fromkeys(fields, question))


def _fields(wording: str) -> list[str]:
    """Names of the columns in a template."""
    try:
        parts = [part for part in Formatter().parse(wording) if part[1] is not None]
        fields = [str(field) for _, field, _, _ in parts]
    except ValueError as error:
        raise UsageError(
            f"data.wording = {wording!r}: is not a template ({error}); write {{{{ for a brace."
        ) from error
    plain = all(not form and not conversion for _, _, form, conversion in parts)
    if not fields or not plain or not all(field.isidentifier() for field in fields):
        raise UsageError(
            f"data.wording = {wording!r}: must name columns like {{question}}; "
            "write {{ for a brace."
        )
    return fields


def _value(row: Row, column: str, where: str) -> Any:
    if column in row:
        return row[column]
    outer, _, field = column.partition(".")
    if field and isinstance(row.get(outer), Mapping):
        return _value(row[outer], field, f"{where}: {outer!r}")
    raise UsageError(
        f"{where}: has no column {column!r}, which other rows have; {suggest(column, row)}"
    )


def _answer_value(row: Row, columns: _Columns, where: str) -> Any:
    """The answer as the data has it; None for NaN and NA, which a DataFrame has for what is
    missing."""
    value = _value(row, columns.answer, where) if columns.answer else None
    nan = isinstance(value, float) and math.isnan(value)
    return None if nan or type(value).__name__ in ("NAType", "NaTType") else value


def _lines(value: Any) -> Any:
    """A list of strings as one text."""
    listed = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return "\n".join(value) if listed else value


def _messages(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Chat messages, checked."""
    if not isinstance(value, Sequence) or not value:
        raise UsageError(
            f"{where} must be text or a list of messages, not {str(value)[:40]!r} "
            f"({type(value).__name__})."
        )
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UsageError(
                f"{where} must be a list of messages with role and content; "
                f"found {str(message)[:60]!r}."
            )
        if not isinstance(message["content"], str):
            raise UsageError(
                f"{where} holds a message whose content is not text but "
                f"{type(message['content']).__name__}."
            )
    return tuple({"role": str(message["role"]), "content": message["content"]} for message in value)


def _content_id(messages: Sequence[Mapping[str, str]], text: str | None, answer: str | None) -> str:
    content = json.dumps([[dict(message) for message in messages], text, answer], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def content_hash(prompts: Sequence[Prompt]) -> str:
    """A hash of prompts with all their columns; of rows that are read on access, of the file where
    it was read from end to end, and of a hundred prompts."""
    lazy = isinstance(prompts, LazySequence)
    every = max(1, len(prompts) // 100) if lazy else 1
    digest = hashlib.blake2b(prompts.digest if lazy else b"", digest_size=16)
    for index in range(0, len(prompts), every):
        prompt = prompts[index]
        content = [str(prompt), prompt.answer, dict(prompt.columns)]
        text = json.dumps(content, ensure_ascii=True, skipkeys=True, default=_stable)
        digest.update(text.encode())
    return digest.hexdigest()


def _stable(value: Any) -> str:
    """Text for a value without a JSON form: objects by type, since `repr` may hold an address."""
    if isinstance(value, bytes | date | Decimal | set | frozenset | complex):
        return repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__


def _with_distinct_ids(prompts: list[Prompt], where: str, *, given_ids: bool) -> list[Prompt]:
    """Number equal rows; ids from the data must be distinct already."""
    seen: Counter[str] = Counter()
    distinct = []
    for prompt in prompts:
        seen[prompt.id] += 1
        again = seen[prompt.id] > 1
        if again and given_ids:
            raise UsageError(
                f"data.id_column: {where} holds the id {prompt.id!r} twice; ids must be distinct."
            )
        distinct.append(replace(prompt, id=f"{prompt.id}-{seen[prompt.id]}") if again else prompt)
    return distinct

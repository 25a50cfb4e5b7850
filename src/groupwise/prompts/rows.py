"""Rows of a data set as mappings, from a file, a folder, the hub, or memory."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError, first_line, suggest
from groupwise.prompts.lazy import LARGE_BYTES, line_rows, table_rows
from groupwise.prompts.squad import is_squad, question_rows

MAX_UNPACKED_BYTES = 2**30
"""Largest content of a .gz file."""

MAX_READ_ROWS = 1_000_000
"""Larger tables are mapped from disk, however small their file is."""

Row = Mapping[str, Any]


def read_rows(
    source: str, *, split: str = "train", subset: str | None = None, revision: str | None = None
) -> Sequence[Row]:
    """All rows of a named data set; rows of a large one are read on access.

    Args:
        source: a .jsonl, .json (or either with .gz), .csv or .parquet file; a folder that
            `datasets` wrote or can read; or a hub name such as "openai/gsm8k". A .json file holds a
            list of objects or has SQuAD's form, each of whose questions is a row.
        split: split of a folder or hub data set; files have none.
        subset: configuration of a hub data set.
        revision: commit, tag or branch of a hub data set.

    Raises:
        UsageError: no such data set, an unknown suffix, a corrupt line (with its number), no rows,
            or the revision of a file or folder.
    """
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise UsageError(
            f"data.revision = {revision!r}: {source!r} is on this machine, and only data sets of "
            "the hub have revisions; remove it."
        )
    if path.is_file():
        reader = _reader(path)
        rows = _large(path) if _is_large(path) else None
        rows = reader(path) if rows is None else rows
    elif path.is_dir():
        rows = _from_folder(path, split)
    elif path.exists():
        raise UsageError(f"data = {source!r}: must be a regular file or a folder.")
    elif _meant_as_file(path, source):
        hint = f"the folder {path.parent} does not exist either."
        if path.parent.is_dir():
            near = [p.name for p in path.parent.iterdir() if _READERS.keys() & {*p.suffixes}]
            place = "this folder" if path.parent == Path() else str(path.parent)
            hint = suggest(path.name, near) if near else f"{place} contains no data files."
        raise UsageError(f"data = {source!r}: no such file; {hint}")
    else:
        rows = _from_hub(source, split, subset, revision=revision)
    if not rows:
        raise UsageError(f"data = {source!r}: contains no rows.")
    return rows


def _meant_as_file(path: Path, source: str) -> bool:
    """Whether a name that is not a file was meant as one, not as a data set of the hub."""
    if path.suffix.lower() in _READERS or path.is_absolute() or source.startswith("."):
        return True
    near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    return bool(path.suffix) and bool(difflib.get_close_matches(path.name, near, cutoff=0.8))


def in_memory(source: Any, *, split: str, limit: int | None = None) -> list[Any]:
    """Items of a data set in memory: strings, rows or prompts.

    Args:
        source: a list or stream of items; a `datasets.Dataset`; a `DatasetDict` or another mapping
            of splits; a mapping of columns; a pandas or polars `DataFrame`; a pyarrow `Table`.
        split: which split of a mapping of splits to take.
        limit: number of items to read, since a stream may be endless.

    Raises:
        UsageError: anything else, or a mapping without that split.
    """
    if isinstance(source, Mapping):
        if _holds_splits(source):
            if split not in source:
                raise UsageError(
                    f"data.split = {split!r}: the data set has no such split; "
                    + suggest(split, map(str, source))
                )
            source = source[split]
        else:
            source = _from_columns(source)
    for method in ("to_dicts", "to_pylist"):  # polars and pyarrow
        if hasattr(source, method):
            return getattr(source, method)()[:limit]
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # pandas
        names = list(source.columns)
        if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                "prompts: the names of the DataFrame's columns must be distinct texts, "
                f"got {names[:9]}."
            )
        return source.head(len(source) if limit is None else limit).to_dict("records")
    no_rows = isinstance(source, str | bytes | set | frozenset | io.IOBase)
    if no_rows or not isinstance(source, Iterable):
        raise UsageError(
            f"prompts = {str(source)[:40]!r} ({type(source).__name__}): must be a list, a Dataset, "
            "a DatasetDict, a DataFrame, a dict of columns, or the name of a file."
        )
    return list(islice(source, limit))


def _holds_splits(source: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds data sets, not columns: its values contain rows."""
    for value in source.values():
        if isinstance(value, str) or not isinstance(value, Iterable):
            return False
        if not hasattr(value, "column_names") and not isinstance(next(iter(value), None), Mapping):
            return False
    return bool(source)


def _from_columns(columns: Mapping[Any, Any]) -> list[Row]:
    """The rows of a mapping of columns of one length."""
    for name, values in columns.items():
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
            raise UsageError(
                f"prompts: column {name!r} of the dict is {type(values).__name__}, not a list of "
                "values; put a single row into a list."
            )
    lengths = {str(name): len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"prompts: the columns of the dict differ in length: {lengths}.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_large(path: Path) -> bool:
    """Whether the rows of a file should be read on access."""
    if path.stat().st_size >= LARGE_BYTES:
        return True
    if path.suffix.lower() != ".parquet":
        return False
    import pyarrow.parquet

    try:
        footer = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not a parquet file ({first_line(error)}).") from error
    size = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    return size >= LARGE_BYTES or footer.num_rows > MAX_READ_ROWS


def _large(path: Path) -> Sequence[Row] | None:
    """Rows of a file read on access; None where its format does not allow that."""
    ending = path.suffix.lower()
    if ending == ".jsonl":
        return line_rows(path)
    if ending not in (".csv", ".parquet"):
        return None
    return _from_hub(ending[1:], "train", None, files=str(path))


def _reader(path: Path) -> Callable[[Path], list[Row]]:
    whole = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    ending = whole.suffix.lower()
    if ending not in _READERS or (whole != path and ending not in (".jsonl", ".json")):
        raise UsageError(
            f"data = {str(path)!r}: cannot read files that end in {ending!r}; "
            + suggest(ending, _READERS)
        )
    return _READERS[ending]


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}:{number}: is not JSON ({error.msg}, column {error.colno})."
            ) from error
        except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
            raise UsageError(f"{path}:{number}: is not JSON that can be read ({error}).") from error
        rows.append(_as_row(row, f"{path}:{number}"))
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        found = json.loads("\n".join(_lines(path)))
    except json.JSONDecodeError as error:
        hint = "; one object per line is a .jsonl file" if error.msg == "Extra data" else ""
        raise UsageError(f"{path}:{error.lineno}: is not JSON ({error.msg}){hint}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON that can be read ({error}).") from error
    if is_squad(found):
        return question_rows(found, str(path))
    if not isinstance(found, list):
        raise UsageError(
            f"{path}: must be a list of objects or have SQuAD's form, not {type(found).__name__}."
        )
    return [_as_row(row, f"{path}, row {number}") for number, row in enumerate(found, start=1)]


def _read_csv(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        rows: list[Row] = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise UsageError(
                        f"{path}:{reader.line_num}: must have {columns} fields like the first line."
                    )
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path}:{reader.line_num + 1}: is not CSV ({error}).") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not a parquet file ({first_line(error)}).") from error


_READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _from_folder(path: Path, split: str) -> Sequence[Row]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        return _from_hub(str(path), split, None)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UsageError(
                f"data = {str(path)!r}: has no split {split!r}; {suggest(split, map(str, found))}"
            )
        found = found[split]
    return _rows_of(found)


def _rows_of(table: Any) -> Sequence[Row]:
    """Rows of a `datasets.Dataset`: in memory if it is small, else mapped from disk."""
    if (table.data.nbytes or 0) >= LARGE_BYTES or len(table) > MAX_READ_ROWS:
        return table_rows(table)
    return list(table)


def _from_hub(
    name: str,
    split: str,
    subset: str | None,
    *,
    revision: str | None = None,
    files: str | None = None,
) -> Sequence[Row]:
    import datasets

    try:
        return _rows_of(
            datasets.load_dataset(name, subset, split=split, revision=revision, data_files=files)
        )
    except Exception as error:  # `datasets` raises many types of errors here
        raise UsageError(
            f"data = {name!r}: is not a file, and could not be loaded from the hub "
            f"({first_line(error)})."
        ) from error


def _lines(path: Path) -> Iterable[str]:
    try:
        content = _unpacked(path) if path.suffix.lower() == ".gz" else path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: is not a complete gzip file ({error}).") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{number}: is not UTF-8 text ({error.reason}).") from error


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as file:
        content = file.read(MAX_UNPACKED_BYTES + 1)
    if len(content) > MAX_UNPACKED_BYTES:
        raise UsageError(
            f"{path}: unpacks to more than {MAX_UNPACKED_BYTES / 2**30:g} GiB; unpack it, and its "
            "rows are read on access."
        )
    return content


def _as_row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise UsageError(
            f"{where}: must be an object with named columns, not {type(row).__name__}."
        )
    return row

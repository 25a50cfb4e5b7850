"""Data in memory and files larger than they look: what is read, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from groupwise.errors import UsageError
from groupwise.prompts.lazy import LazySequence
from groupwise.prompts.sources import content_hash, load_prompts
from groupwise.types import Prompt

ROWS = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(3)]
COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}
OTHER = [{"prompt": "9+9?", "answer": "18"}]


def splits(rows: Any, other: Any) -> dict[str, Any]:
    return {"train": rows, "test": other}


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        iter(ROWS),
        COLUMNS,
        {key: tuple(values) for key, values in COLUMNS.items()},
        splits(ROWS, OTHER),
        datasets.Dataset.from_list(ROWS),
        datasets.DatasetDict(
            splits(datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(OTHER))
        ),
        datasets.IterableDatasetDict(
            splits(
                datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
                datasets.Dataset.from_list(OTHER).to_iterable_dataset(),
            )
        ),
        pandas.DataFrame(ROWS),
        pyarrow.Table.from_pylist(ROWS),
    ],
    ids=lambda data: type(data).__name__,
)
def test_rows_are_read_from_every_container(data: Any) -> None:
    assert load_prompts(data) == load_prompts(ROWS)


def test_a_split_is_chosen_and_a_missing_one_named() -> None:
    data = splits(ROWS, OTHER)
    assert load_prompts(data, split="test") == load_prompts(OTHER)
    with pytest.raises(UsageError, match="no such split; did you mean test"):
        load_prompts(data, split="tests")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": "1+1?", "answer": "2"}, "put a single row into a list"),
        ({"prompt": ["a", "b"], "answer": ["c"]}, "differ in length"),
        (7, "must be a list, a Dataset, a DatasetDict, a DataFrame, a dict of columns, or the nam"),
        (io.StringIO('{"prompt": "1+1?"}\n'), "must be a list"),
        (pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), "must be distinct texts"),
        (pandas.DataFrame([["a", "b"]]), "must be distinct texts"),
        (pandas.DataFrame([["a"]], columns=pandas.MultiIndex.from_tuples([("x", "y")])), "texts"),
        (b"1+1?", "must be a list"),
        ({"1+1?", "2+2?"}, "must be a list"),
        ({}, "at least one prompt"),
    ],
)
def test_other_containers_are_refused(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_prompts(data)


@pytest.mark.parametrize("missing", [None, float("nan"), pandas.NA])
def test_what_is_missing_in_a_data_frame_is_no_answer(missing: Any) -> None:
    frame = pandas.DataFrame({"prompt": ["1+1?", "2+2?"], "answer": ["2", missing]})
    assert [prompt.answer for prompt in load_prompts(frame)] == ["2", None]
    numbers = pandas.DataFrame({"prompt": ["1+1?", "2+2?"], "answer": [2, None]})
    assert [prompt.answer for prompt in load_prompts(numbers)] == ["2.0", None]
    assert load_prompts(numbers)[1].value is None


def test_a_small_parquet_file_with_large_content_is_read_on_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows compress well: the size of the file says little, its footer says how many."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1] * 5000), path)
    assert path.stat().st_size < 5000 and not isinstance(load_prompts(str(path)), LazySequence)
    monkeypatch.setattr("groupwise.prompts.rows.MAX_READ_ROWS", 4999)
    large = load_prompts(str(path))
    assert isinstance(large, LazySequence) and len(large) == 5000


def test_a_small_gzip_file_with_large_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.prompts.rows.MAX_UNPACKED_BYTES", 1000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    assert len(load_prompts(str(path))) == 3
    path.write_bytes(gzip.compress(b" " * 1001))
    with pytest.raises(UsageError, match="unpacks to more than"):
        load_prompts(str(path))


def test_a_row_that_is_too_long_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.prompts.rows.LARGE_BYTES", 1)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(ROWS[0]), json.dumps({"prompt": "x" * 2**24})]))
    prompts = load_prompts(str(path))
    with pytest.raises(UsageError, match=r"row 2: has 16 MiB; at most 16 MiB are read") as found:
        prompts[1]
    assert len(str(found.value)) < 200


def test_every_row_and_column_counts_in_the_hash_of_data_read_whole() -> None:
    many = [Prompt(id=str(n), text="?", answer=str(n), columns={"n": n}) for n in range(1000)]
    before = content_hash(many)
    assert before == content_hash(list(many))
    for change in ({"answer": "other"}, {"columns": {"n": -1}}, {"text": "!"}):
        values = {"id": "7", "text": "?", "answer": "7", "columns": {"n": 7}} | change
        assert content_hash([*many[:7], Prompt(**values), *many[8:]]) != before
    # Objects count by their type, since a repr with an address differs in every process.
    assert content_hash([Prompt(id="a", text="?", columns={"o": object()})]) == content_hash(
        [Prompt(id="a", text="?", columns={"o": object()})]
    )

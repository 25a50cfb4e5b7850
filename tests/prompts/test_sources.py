"""Prompts from files and lists: what is read, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from data_folder import data_file
from groupwise.errors import UsageError
from groupwise.prompts.answers import ANSWERS
from groupwise.prompts.examples import COMPLETIONS
from groupwise.prompts.sources import load_prompts
from groupwise.types import Prompt

ROWS = [
    {"question": "How many?", "answer": "She has 2*500=<<2*500=1000>>1000.\n#### 1,000", "n": 1},
    {"question": "And now?", "answer": "#### 7", "n": 2},
]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(path: Path, rows: list[dict]) -> str:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_the_same_rows_in_every_format_give_the_same_prompts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    sources: list = [jsonl(tmp_path / "a.jsonl", ROWS)]
    sources.append(write(tmp_path / "a.json", json.dumps(ROWS)))
    sources.append(str(tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sources[-1])
    sources.append(ROWS)
    read = [
        load_prompts(source, prompt_column="question", answer_style="gsm8k") for source in sources
    ]
    assert all(prompts == read[0] for prompts in read)
    first = read[0][0]
    assert first.messages == ({"role": "user", "content": "How many?"},)
    assert first.answer == "1000"
    assert first.columns == {"answer": ROWS[0]["answer"], "n": 1}


def test_csv_keeps_text_as_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'prompt,answer\n"a, b",007\n"two\nlines",1e3\n')
    prompts = load_prompts(path)
    assert [p.messages[0]["content"] for p in prompts] == ["a, b", "two\nlines"]
    assert [p.answer for p in prompts] == ["007", "1e3"]


def test_a_saved_folder_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert str(load_prompts(str(tmp_path / "saved"), split="test")[0]) == "test"
    with pytest.raises(UsageError, match="no split 'tets'; did you mean test"):
        load_prompts(str(tmp_path / "saved"), split="tets")


def test_a_stream_is_read_no_further_than_asked() -> None:
    import datasets

    def endless():
        number = 0
        while True:
            yield {"question": f"{number} + 1?", "answer": str(number + 1)}
            number += 1

    stream = datasets.IterableDataset.from_generator(endless)
    prompts = load_prompts(stream, prompt_column="question", limit=3)
    found = [(str(prompt), prompt.answer) for prompt in prompts]
    assert found == [("0 + 1?", "1"), ("1 + 1?", "2"), ("2 + 1?", "3")]


def test_a_folder_of_files_is_read_by_split(tmp_path: Path, monkeypatch) -> None:
    """As data sets lie on the hub: a file per split."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        jsonl(tmp_path / "rows" / f"{split}.jsonl", [{"prompt": split, "answer": "1"}])
    for split in ("train", "test"):
        (prompt,) = load_prompts(str(tmp_path / "rows"), split=split)
        assert (str(prompt), prompt.answer) == (split, "1")


def test_wording_joins_columns_and_system_comes_first() -> None:
    rows = [{"context": "Sky is blue.", "q": "Colour?", "answer": "blue"}]
    prompt = load_prompts(rows, wording="{context}\n{q}", system="Be brief.")[0]
    assert [dict(m) for m in prompt.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sky is blue.\nColour?"},
    ]
    assert set(prompt.columns) == {"context", "q", "answer"}


def test_strings_conversations_and_ready_prompts() -> None:
    assert load_prompts(["1+1?"])[0].messages == ({"role": "user", "content": "1+1?"},)
    plain = load_prompts(["1+1="], chat=False)[0]
    assert plain.text == "1+1=" and plain.messages == ()
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert load_prompts([{"prompt": turns}], system="other")[0].messages == tuple(turns)
    ready = [Prompt(id="a", text="x"), Prompt(id="b", text="y")]
    assert load_prompts(ready) == ready


def test_ids_follow_content_and_tell_equal_rows_apart() -> None:
    first = load_prompts(["a", "b", "a"])
    assert len({p.id for p in first}) == 3
    assert [p.id for p in load_prompts(["b", "a", "a"])] == [first[1].id, first[0].id, first[2].id]
    rows = [{"prompt": "a", "key": 3}, {"prompt": "b", "key": 4}]
    assert [p.id for p in load_prompts(rows, id_column="key")] == ["3", "4"]
    with pytest.raises(UsageError, match="holds the id '3' twice"):
        load_prompts([rows[0], rows[0]], id_column="key")


def test_generators_by_name() -> None:
    train, test = (
        load_prompts("word_problems", limit=3),
        load_prompts("word_problems", split="test", limit=3),
    )
    assert [p.id.split("/")[1] for p in (train[0], test[0])] == ["train", "held_out"]
    with pytest.raises(UsageError, match="data.split = 'validation'"):
        load_prompts("word_problems", split="validation")


def test_values_that_are_no_text_become_json_answers() -> None:
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": ["x", "y"]}]
    assert [p.answer for p in load_prompts(rows)] == ["7", '["x", "y"]']
    rows = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": " "}]
    assert [p.answer for p in load_prompts(rows)] == [None, None]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "data.prompt_column = 'prompt': .* no such column; known: answer, n, question"),
        ({"prompt_column": "Question"}, "did you mean question"),
        ({"prompt_column": "question", "answer_column": "anwser"}, "did you mean answer"),
        ({"prompt_column": "question", "id_column": "key"}, "data.id_column = 'key'"),
        ({"wording": "{questoin}"}, "data.wording = 'questoin': .*did you mean question"),
        ({"wording": "no field"}, "must name columns like"),
        ({"wording": "{0}"}, "must name columns like"),
        ({"wording": "{question"}, "is not a template"),
        ({"prompt_column": "question", "answer_style": "gsm8"}, "did you mean gsm8k"),
        ({"prompt_column": "n"}, "row 1: 'n' must be text or a list of messages"),
        ({"prompt_column": "question", "limit": 0}, "data.limit = 0"),
        ({"prompt_column": "question", "answer_style": "boxed"}, "row 1: 'answer' .*no answer"),
    ],
)
def test_wrong_settings_say_what_to_type_instead(settings: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_prompts(ROWS, **settings)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"a.jsonl:2: is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n\n[1]\n', r"a.jsonl:3: must be an object"),
        ("a.jsonl", "\n\n", "contains no rows"),
        ("a.jsonl", "", "contains no rows"),
        ("a.jsonl", '{"prompt": "a"}\n{"pompt": "b"}\n', "row 2: has no column 'prompt'"),
        ("a.jsonl", '{"prompt": " "}\n', "row 1: 'prompt' is empty"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', "role and content"),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": [1]}]}\n', "not text but list"),
        ("a.json", '[{"prompt": "a"},\n{]', r"a.json:2: is not JSON"),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', "is a .jsonl file"),
        ("a.json", '{"prompt": "a"}', "must be a list of objects"),
        ("a.csv", "prompt,answer\na,1\nb\n", r"a.csv:3: must have 2 fields"),
        ("a.csv", "prompt,answer\n", "contains no rows"),
        ("a.parquet", "PAR0", "is not a parquet file"),
        ("a.txt", "a", r"cannot read files that end in '.txt'; known: .csv, .json"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_prompts(write(tmp_path / name, content))


def test_bytes_that_are_no_text_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=r"a.jsonl:2: is not UTF-8"):
        load_prompts(str(tmp_path / "a.jsonl"))


def test_a_missing_file_is_missed_by_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "Makefile").touch()
    with pytest.raises(UsageError) as error:
        load_prompts(str(tmp_path / "other.jsonl"))
    # What cannot be read as data is no suggestion.
    assert "train.jsonl" in str(error.value) and "Makefile" not in str(error.value)
    with pytest.raises(UsageError, match="no such file; did you mean train.jsonl"):
        load_prompts(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UsageError, match="folder .* does not exist"):
        load_prompts(str(tmp_path / "nowhere" / "train.jsonl"))
    with pytest.raises(UsageError, match="'word-problems': no such file; did you mean word_prob"):
        load_prompts("word-problems")


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match="rows.jsonl': must be a regular file or a folder"):
        load_prompts(str(tmp_path / "rows.jsonl"))


def test_the_current_folder_is_called_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such file; this folder contains no data files"):
        load_prompts("train.jsonl")


def test_a_hub_name_that_cannot_be_loaded_is_a_usage_error(monkeypatch) -> None:
    import datasets

    def fails(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UsageError, match=r"'someone/data': is not a file.*Couldn't reach the hub"):
        load_prompts("someone/data")


def test_empty_and_mixed_lists_are_refused() -> None:
    with pytest.raises(UsageError, match=r"prompts = \[\]"):
        load_prompts([])
    with pytest.raises(UsageError, match="prompts, item 2: must be a string or a row"):
        load_prompts(["a", 3])  # type: ignore[list-item]


def test_answers_are_taken_from_the_last_mark() -> None:
    assert ANSWERS.get("gsm8k")("first #### 1\n#### -2,000") == "-2000"
    assert ANSWERS.get("gsm8k")("no mark") is None
    assert ANSWERS.get("boxed")(r"\boxed{1} then \boxed{2^{3}} \boxed{open") == "2^{3}"
    assert ANSWERS.get("plain")("#### 7 ") == "#### 7"
    assert COMPLETIONS.get("gsm8k_tagged")("a <<1+1=2>>2\n#### 2") == (
        "<reasoning>a 2</reasoning><answer>2</answer>"
    )
    assert COMPLETIONS.get("gsm8k_tagged")("no mark") is None


def test_the_real_gsm8k_file() -> None:
    path = data_file("gsm8k/test.jsonl")
    prompts = load_prompts(path, prompt_column="question", answer_style="gsm8k")
    assert len(prompts) == 1319 and len({p.id for p in prompts}) == 1319
    assert prompts[0].answer == "18"
    assert all(p.answer and p.answer.lstrip("-").replace(".", "").isdigit() for p in prompts)


def test_compressed_lines_are_read_like_plain_ones(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "1+1?"}\n{"prompt": "2+2?"}\n'))
    assert [str(prompt) for prompt in load_prompts(str(path))] == ["1+1?", "2+2?"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is not a complete gzip file"):
        load_prompts(str(path))

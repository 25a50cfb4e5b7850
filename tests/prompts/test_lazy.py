"""Data sets that are not held in memory: the same prompts, read when they are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RunError, UsageError
from groupwise.prompts.lazy import LazySequence, line_rows
from groupwise.prompts.sources import load_prompts
from groupwise.prompts.templates import render_all
from small_runs import letters, prepared, tiny

ROWS = [{"question": f"{n} and {n}?", "answer": f"{2 * n}", "n": n} for n in range(50)]


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.prompts.rows.LARGE_BYTES", 1)


def written(folder: Path, ending: str) -> Path:
    file = folder / f"data{ending}"
    if ending == ".jsonl":
        lines = [json.dumps(row) + ("\r\n" if row["n"] % 3 else "\n\n") for row in ROWS]
        file.write_bytes("".join(lines).encode())
    else:
        import datasets

        table = datasets.Dataset.from_list(ROWS)
        {".csv": table.to_csv, ".parquet": table.to_parquet}.get(ending, table.save_to_disk)(file)
    return file


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet", ""])
def test_a_large_file_gives_the_prompts_of_a_small_one(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    file = written(tmp_path, ending)
    small = load_prompts(str(file), prompt_column="question")
    monkeypatch.setattr("groupwise.prompts.rows.LARGE_BYTES", 1)
    large = load_prompts(str(file), prompt_column="question")
    assert isinstance(large, LazySequence) and len(large) == len(small) == 50
    for place, prompt in enumerate(small):
        other = large[place]
        assert other.messages == prompt.messages and other.answer == prompt.answer
        assert other.columns["n"] == (str if ending == ".csv" else int)(place) or ending == ".csv"
    assert len({prompt.id for prompt in large}) == 50
    assert [p.answer for p in large[-3:]] == ["94", "96", "98"] and len(large[:200]) == 50


@pytest.mark.usefixtures("small_is_large")
def test_a_bad_row_is_named_when_it_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1?"}\n{broken\n[1]\n{"prompt": "  "}\n')
    prompts = load_prompts(str(file))
    assert str(prompts[0]) == "1?"
    for place, says in ((1, "row 2: is not JSON"), (2, "row 3: must be an object"), (3, "empty")):
        with pytest.raises(UsageError, match=says):
            prompts[place]


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1?"}\n{"prompt": "2?"}')
    rows = line_rows(file)
    assert [row["prompt"] for row in rows] == ["1?", "2?"]
    file.write_text('{"prompt": "one?"}\n')
    with pytest.raises(UsageError, match="has changed"):
        rows[0]


@pytest.mark.usefixtures("small_is_large")
def test_prompts_that_are_too_long_are_passed_over_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    words = ["1?" if n % 2 else "1 and " * 40 for n in range(20)]
    file.write_text("".join(json.dumps({"prompt": w}) + "\n" for w in words))
    tokenizer = tiny().tokenizer
    prompts = load_prompts(str(file))
    ready = render_all(prompts, tokenizer, limit=30, too_long="drop")
    assert [bool(tokens) for tokens in ready.tokens] == [False, True] * 10
    refusing = render_all(prompts, tokenizer, limit=30)
    with pytest.raises(UsageError, match="at most 30 leave room"):
        refusing.tokens[0]
    run = prepared(tmp_path / "run", "data.max_prompt_tokens=30", "data.too_long=drop",
                   prompts=prompts)  # fmt: skip
    for step in range(3):
        scored = run.trainer.source.take(3, step=step)
        assert all(str(group.prompt) == "1?" for group in scored.groups)
    nothing = prepared(tmp_path / "none", "data.max_prompt_tokens=1", "data.too_long=drop",
                       prompts=prompts)  # fmt: skip
    with pytest.raises(RunError, match=r"none of 2\d is short enough"):
        nothing.trainer.source.take(3, step=0)


@pytest.mark.usefixtures("small_is_large")
def test_a_run_on_drawn_prompts_resumes(tmp_path: Path) -> None:
    from small_runs import timeless

    file = written(tmp_path, ".jsonl")
    more = (f"data.train={file}", "data.prompt_column=question", "data.limit=40", "steps=4")

    def run(folder: str, **given: Any) -> Any:
        return prepared(tmp_path / folder, *more, functions=[letters], **given)

    whole = run("whole")
    whole.trainer.run()
    first = run("parts")
    first.trainer.advance(), first.trainer.advance()
    first.trainer.save(wait=True)
    first.close()
    second = run("parts", resume=True)
    second.trainer.run()
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")


MILLION = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, {support!r})
from small_runs import letters, prepared, tiny
folder, count = Path({folder!r}), {count}
with open(folder / "data.jsonl", "w") as file:
    for n in range(count):
        json.dump({{"prompt": f"{{n}} and {{n}} and some more words?", "answer": str(2 * n)}}, file)
        file.write("\\n")
policy = tiny()
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
before, start = memory(), time.monotonic()
train = f"data.train={{folder / 'data.jsonl'}}"
run = prepared(folder / "run", train, "data.limit=", policy=policy)
run.trainer.source.take(3, step=0)
print(json.dumps({{"seconds": time.monotonic() - start, "megabytes": memory() - before}}))
"""


@pytest.mark.verify
def test_a_million_prompts_start_within_ten_seconds_and_take_no_memory(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    program = MILLION.format(support=support, folder=str(tmp_path), count=1_000_000)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # 16 MB say where lines begin and end, 8 MB hold the order; a list of prompts takes a gigabyte.
    assert found["seconds"] < 10 and found["megabytes"] < 120, found
    print(found)

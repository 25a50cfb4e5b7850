"""Samples are written whole, go on where they stopped, and say what made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.models import save_policy
from groupwise.rundir.provenance import origin_path
from groupwise.training.stages.rows import read_samples
from groupwise.training.stages.sample import BLOCK, Sampled, sample
from small_runs import Quiet, config, tiny

PROMPTS = BLOCK + 8


Taken = Callable[..., Sampled]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    """Samples of a tiny model."""
    model = tmp_path_factory.mktemp("model")
    save_policy(tiny(), model)

    def take(path: Path, **more: Any) -> Sampled:
        settings = config(path.parent, f"data.limit={PROMPTS}", "sampling.max_tokens=4")
        return sample(settings, model, path, **{"count": 2, "progress": Quiet(), **more})

    return take


@pytest.fixture(scope="module")
def whole(taken: Taken, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "rows.jsonl"
    taken(path)
    return path


def rows(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_has_the_answer_its_score_and_the_columns_of_its_prompt(whole: Path) -> None:
    found = rows(whole)
    assert len(found) == 2 * PROMPTS
    assert [row["sample"] for row in found[:4]] == [0, 1, 0, 1]
    first = found[0]
    assert first["prompt"][0]["role"] == "user" and first["level"] >= 1
    assert first["correct"] in (0, 1) and 1 <= first["tokens"] <= 4
    assert read_samples(whole) == found


def cuts(path: Path) -> Iterator[bytes]:
    """What a kill may leave: within the first block, at its end, within the second, without the
    mark of the end."""
    content = path.read_bytes()
    ends = [n for n, byte in enumerate(content) if byte == 0x0A]
    for length in (0, 9, ends[5] + 20, ends[2 * BLOCK - 1] + 1, ends[2 * BLOCK + 2] + 7):
        yield content[:length]
    yield content


def test_an_interrupted_file_goes_on_to_the_same_bytes(
    taken: Taken, whole: Path, tmp_path: Path
) -> None:
    origin = json.loads(origin_path(whole).read_text(encoding="utf-8"))
    del origin["finished"], origin["rows"]
    for number, left in enumerate(cuts(whole)):
        path = tmp_path / str(number) / "rows.jsonl"
        path.parent.mkdir()
        path.write_bytes(left)
        origin_path(path).write_text(json.dumps(origin), encoding="utf-8")
        taken(path)
        assert path.read_bytes() == whole.read_bytes(), f"after cut {number}"
        assert origin_path(path).read_bytes() == origin_path(whole).read_bytes()


def test_shards_together_are_the_whole(taken: Taken, whole: Path, tmp_path: Path) -> None:
    for place in range(3):
        taken(tmp_path / f"{place}.jsonl", shard=(place, 3))
    shards = [rows(tmp_path / f"{place}.jsonl") for place in range(3)]
    assert sorted((r["id"], r["sample"], r["completion"]) for each in shards for r in each) == (
        sorted((r["id"], r["sample"], r["completion"]) for r in rows(whole))
    )


def test_a_file_of_other_settings_is_refused(taken: Taken, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"was made with count = 2, not 3"):
        taken(whole, count=3)
    unknown = tmp_path / "mine.jsonl"
    unknown.write_text("{}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="there is no record of what made it"):
        taken(unknown)
    assert unknown.read_text(encoding="utf-8") == "{}\n"


@pytest.mark.parametrize("wrong", [{"count": 0}, {"split": "tset"}, {"shard": (2, 2)}])
def test_impossible_requests_are_refused(taken: Taken, tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(UsageError):
        taken(tmp_path / "rows.jsonl", **wrong)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_file_of_other_data_is_refused(split: str, tmp_path: Path) -> None:
    save_policy(tiny(), tmp_path / "model")
    data, output = tmp_path / "data.jsonl", tmp_path / "rows.jsonl"
    given = [f"data.{split}={data}", "sampling.max_tokens=4", "data.limit=4"]
    for prompt in ("1+1?", "2+2?"):
        data.write_text(f'{{"prompt": "{prompt}", "answer": "2"}}\n', encoding="utf-8")
        if prompt == "2+2?":
            with pytest.raises(UsageError, match="other data made it"):
                sample(config(tmp_path, *given), tmp_path / "model", output, split=split, count=1)
        else:
            sample(config(tmp_path, *given), tmp_path / "model", output, split=split, count=1)
            output.write_text("", encoding="utf-8")  # as if it had been interrupted


def test_more_held_out_prompts_are_other_settings(tmp_path: Path) -> None:
    save_policy(tiny(), tmp_path / "model")
    for prompts in (2, 3):
        settings = config(tmp_path, f"evaluation.prompts={prompts}", "sampling.max_tokens=4")
        given = (settings, tmp_path / "model", tmp_path / "rows.jsonl")
        if prompts == 2:
            assert sample(*given, split="eval", count=1, progress=Quiet()).prompts == 2
        else:
            with pytest.raises(UsageError, match="evaluation.prompts = 2, not 3"):
                sample(*given, split="eval", count=1, progress=Quiet())

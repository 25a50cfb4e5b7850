"""Candidate contexts become a column and a prompt; a pick among them is rewarded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.models import save_policy
from groupwise.pipelines import plan_table, read_pipeline, run_pipeline
from groupwise.prompts.rows import read_rows
from groupwise.rewards.builtin.contexts import context_pick
from groupwise.training.stages.contexts import find_contexts, read_rules
from groupwise.training.stages.warmup import worked_examples
from small_runs import Quiet, tiny

ITEMS = [
    {"id": "a", "question": "깍두기와 깍뚜기", "answer": "깍두기", "rule": "된소리 깍두기"},
    {"id": "b", "question": "해돋이와 해도지", "answer": "해돋이", "rule": "구개음화 해돋이"},
    {"id": "c", "question": "xyz", "answer": "z"},
]
RULES = "된소리 깍두기\n구개음화 해돋이\n\n띄어쓰기\n된소리 깍두기\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in ITEMS)
    (tmp_path / "data.jsonl").write_text(data, encoding="utf-8")
    (tmp_path / "rules.txt").write_text(RULES, encoding="utf-8")
    return tmp_path


def config(folder: Path):
    columns = ("data.prompt_column='question'", "data.answer_column='answer'")
    where = f"data.train='{folder / 'data.jsonl'}'"
    return load("word-problems", [where, *columns, "data.id_column='id'"])


def test_candidates_by_search_need_no_answer(folder: Path) -> None:
    rules = folder / "rules.txt"
    path = find_contexts(
        config(folder), rules, folder / "o.jsonl", by="search", count=2, progress=Quiet()
    )
    rows = list(read_rows(str(path)))
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    for row, item in zip(rows[:2], ITEMS, strict=False):
        assert row["candidates"][row["gold"] - 1] == item["rule"]
        assert (
            f"{row['gold']}. {item['rule']}" in row["prompt"] and item["question"] in row["prompt"]
        )
    assert (rows[2]["candidates"], rows[2]["gold"]) == ([], None)
    assert "completion" not in rows[2]
    answered = f"<context>{rows[0]['gold']}</context><answer>깍두기</answer>"
    assert rows[0]["completion"] == answered
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 30])
    find_contexts(config(folder), rules, path, by="search", count=2, progress=Quiet())
    assert path.read_bytes() == whole
    with pytest.raises(UsageError, match="made with count = 2"):
        find_contexts(config(folder), rules, path, by="search", count=3, progress=Quiet())


def test_candidates_by_perplexity_hold_the_known_rule(folder: Path) -> None:
    save_policy(tiny(), folder / "model")
    given = {"model": str(folder / "model"), "count": 1, "progress": Quiet()}
    path = find_contexts(config(folder), folder / "rules.txt", folder / "p.jsonl", **given)
    rows = list(read_rows(str(path)))
    assert [row["candidates"] for row in rows[:2]] == [[item["rule"]] for item in ITEMS[:2]]
    assert [row["gold"] for row in rows[:2]] == [1, 1]
    assert rows[2]["gold"] == (1 if rows[2]["candidates"] else None)


def test_a_pipeline_learns_to_pick_the_candidates_by_perplexity(folder: Path) -> None:
    save_policy(tiny(), folder / "model")
    data = f"data.train='{folder / 'data.jsonl'}'"
    columns = ("prompt_column='question'", "id_column='id'", "answer_column='answer'")
    given = f"recipe = 'word-problems'\nmodel = '{folder / 'model'}'\n"
    (folder / "pipeline.toml").write_text(
        f"""
[[stages]]
name = "candidates"
stage = "contexts"
{given}
rules = '{folder / "rules.txt"}'
count = 2
set = {json.dumps([data, *(f"data.{each}" for each in columns)])}

[[stages]]
name = "started"
stage = "sft"
{given}
rows = "@candidates"
set = ["warmup.steps=2", "warmup.batch_size=2", "sampling.max_tokens=200"]
"""
    )
    run_pipeline(read_pipeline(folder / "pipeline.toml", output=folder / "out"), progress=Quiet())
    record = json.loads((folder / "out" / "candidates" / "stage.json").read_text())
    figures = record["figures"]
    rows = list(read_rows(str(folder / "out" / "candidates" / "rows.jsonl")))[:2]
    first = 0
    for row in rows:
        ranked = {
            score: text
            for score, text in zip(row["scores"], row["candidates"], strict=True)
            if score
        }
        first += row["rule"] == (ranked[max(ranked)] if ranked else row["candidates"][0])
    share = first / 2
    assert figures["questions"] == 3 and figures["rule_first"] == share
    assert json.loads((folder / "out" / "started" / "stage.json").read_text())["finished"]


def test_rules_are_distinct_lines(folder: Path) -> None:
    assert read_rules(folder / "rules.txt") == ["된소리 깍두기", "구개음화 해돋이", "띄어쓰기"]
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match="contains no rules"):
        read_rules(folder / "empty.txt")
    with pytest.raises(UsageError, match="name no reasons"):
        find_contexts(config(folder), None, folder / "n.jsonl", by="search", progress=Quiet())
    with pytest.raises(UsageError, match="by = 'bm25'"):
        find_contexts(config(folder), None, folder / "n.jsonl", by="bm25")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<context>2</context>…", 2, 1.0),
        ("<context> 2 </context>", [1, 2], 1.0),
        ("<context>12</context>", 2, 0.0),
        ("<context>1</context><context>2</context>", 2, 0.0),
        ("2", 2, 0.0),
        ("<context>²</context>", 2, 0.0),
        ("<context>2</context>", None, None),
        ("<context>2</context>", [], None),
    ],
)
def test_a_pick_is_right_by_its_number(text: str, gold: object, value: float | None) -> None:
    assert context_pick(text, {"gold": gold}) == value


def test_the_korean_pipeline_plans_candidates_for_both_splits() -> None:
    states = plan_table(read_pipeline("korean-competition"))
    kinds = [(state.stage.name, state.stage.kind.name) for state in states]
    assert ("candidates", "contexts") in kinds and ("tested", "contexts") in kinds
    assert not any("rows.jsonl" in name for state in states for name in state.missing)


def test_the_packaged_items_are_worked_answers() -> None:
    settings = load("korean-norms", ["sampling.max_tokens=2000"])
    examples = worked_examples(settings, tiny())
    assert len(examples) == 60 and all("옳다. " in each.completion for each in examples)

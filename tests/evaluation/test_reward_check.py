"""`groupwise reward try`: the reward of a recipe on examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.evaluation.reward_check import try_reward


def test_gold_earns_most_and_own_samples_are_judged(tmp_path: Path) -> None:
    config = load("word-problems")
    plain = try_reward(config, prompts=1)
    prompt = plain.rows[0].prompt
    path = tmp_path / "samples.jsonl"
    rows = [
        {"prompt": prompt, "text": "<answer>-1</answer>"},
        {"prompt": prompt, "text": plain.rows[0].text},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    check = try_reward(config, prompts=1, samples=str(path))
    own = [row.total for row in check.rows if row.kind == "sample"]
    assert check.passed and own == [0.0, 1.0]
    path.write_text(json.dumps({"prompt": "nobody asked this", "text": "x"}))
    with pytest.raises(UsageError, match="is neither the id nor the text"):
        try_reward(config, samples=str(path))


def test_a_reward_that_cannot_be_earned_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    blind = ["--set", "rewards.0.after=never-written", "--json", str(out)]
    assert main(["reward", "try", "word-problems", *blind]) == 1
    assert "problem:" in capsys.readouterr().out
    assert json.loads(out.read_text())["problems"]

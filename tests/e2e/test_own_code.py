"""One file with an own reward, used by every command that takes a recipe; a run goes on from its
folder alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REWARD = """
from groupwise.rewards import verifier

@verifier
def right(text: str, answer: str) -> float:
    return float(f"<answer>{answer}</answer>" in text)
"""
SMALL = [
    "steps=2", "prompts_per_step=2", "group_size=4", "evaluation.prompts=4",
    "sampling.max_tokens=24", "evaluation.samples=2", "reward_pool.workers=1",
    "threads=1", "checkpoint.every_steps=1",
]  # fmt: skip


@pytest.mark.verify
def test_an_own_reward_works_in_every_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    shell = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "groupwise", *arguments],
            cwd=tmp_path, env=shell, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    given = [a for s in [*SMALL, 'rewards=[{name="mine.py:right"}]'] for a in ("--set", s)]
    assert "right" in command("reward", "try", "word-problems", *given)
    command("doctor", "word-problems", *given)
    command("train", "word-problems", *given, "--set", "output=run")
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["config"]
    assert config["rewards"][0]["name"] == "mine.py:right"
    assert "greedy" in command("eval", "run/final", "--task", "word-problems", *given)
    command("train", "--resume", "run", "--set", "steps=3", "--trust-recipe")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    compared = command(
        "compare", "word-problems", *given, "--seeds", "1", "--jobs", "2", "--output", "both"
    )
    assert "softrank" in compared

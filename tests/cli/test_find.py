"""Commands that find things: recipes, show, runs, and the completion of names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.algorithms import ALGORITHMS
from groupwise.cli import main
from groupwise.cli.output import print_table
from groupwise.config import packaged
from groupwise.environments import ENVIRONMENTS
from groupwise.experiments.results import place
from groupwise.rewards import REWARDS
from groupwise.rundir.lock import RunLock
from groupwise.rundir.overview import overview


def test_recipes_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(packaged())
    assert all(len(line.split()) > 3 for line in lines)
    (tuned,) = [line for line in lines if line.startswith("word-problems-sft ")]
    assert tuned.endswith("with held-out loss and early stop.")


def test_a_table_is_wrapped_by_words_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("a", "about"), [("one", "words " * 12)])
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("a", "about"), [("one", "words " * 12)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40 and lines[2].startswith("     words words")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("word-problems", "[algorithm]"),
        ("grpo", "advantage    zscore"),
        ("exact_answer", '; default "answer_tag"'),
        ("calculator", "environment calculator"),
        ("optimizer.learning_rate", "values: number, ≥ 0; default: 1e-06"),
        ("rewards.0.weight", "Weight of this component"),
        ("checkpoint", "checkpoint.every_steps\n    "),
        ("algorithm.surrogate.low", "surrogate dual_clip: width of the band below 1."),
        ("algorithm.surrogate", "dual_clip, gmpo"),
        ("learning_rate", "optimizer.learning_rate\n    Peak learning rate"),
        ("low", "algorithm.surrogate.low\n    surrogate dppo: allowed fall of the probability."),
    ],
)
def test_show_knows_names_of_every_kind(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name]) == 0
    assert said in capsys.readouterr().out


def test_show_says_all_that_a_name_means_and_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "softrank"]) == 0
    shown = capsys.readouterr().out
    assert "algorithm softrank\n" in shown and "advantage softrank\n" in shown
    assert main(["show", "normalised_match"]) == 0
    assert '\n    source: "final" or "tag" or "all"; default "final"' in capsys.readouterr().out
    assert main(["show", "optimizer.learning_rate"]) == 0
    assert "metric" not in capsys.readouterr().out  # not that of a learner named `optimizer`
    assert main(["show", "optimizer.learnin_rate"]) == 2
    assert "did you mean optimizer.learning_rate" in capsys.readouterr().err
    assert main(["show", "num_generations"]) == 2
    assert "did you mean group_size" in capsys.readouterr().err


def test_explain_describes_what_a_recipe_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "word-problems", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "steps = 80  (word-problems)\n    Number of training steps; each takes one " in shown
    assert "rewards.0.name" in shown and "default: required" in shown


def write_run(folder: Path, *, steps: int, done: int, final: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if final:
        (folder / "final").mkdir()
    config = {"config": {"algorithm": {"name": "grpo"}, "steps": steps}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = [{"step": n, "reward": n / 10, "seconds": 2.0} for n in range(1, done + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")


def test_runs_of_a_folder_are_listed_with_their_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a" / "done", steps=2, done=2, final=True)
    write_run(tmp_path / "halfway", steps=50, done=3)
    lock = RunLock(tmp_path / "now")
    write_run(tmp_path / "now", steps=5, done=1)
    figures = {"greedy": {"value": 0.25, "low": 0.1, "high": 0.4}}
    harder = {"greedy": {"value": 0.125, "low": 0.0, "high": 0.2}}
    splits = {"held_out": figures, "harder": harder}
    rows = [json.dumps({"step": 3, "split": k, "figures": v}) for k, v in splits.items()]
    file = tmp_path / "halfway" / "evaluations.jsonl"
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    write_run(tmp_path / "torn", steps=5, done=0)
    (tmp_path / "torn" / "metrics.jsonl").write_text("{]\n{}\n", encoding="utf-8")
    try:
        found = {run.name: run for run in overview(tmp_path)}
        assert main(["runs", str(tmp_path)]) == 0
    finally:
        lock.close()
    states = {name: run.state for name, run in found.items()}
    assert states == {
        "a/done": "finished", "halfway": "stopped", "now": "running", "torn": "damaged",
    }  # fmt: skip
    assert (found["halfway"].held_out, found["halfway"].seconds) == (0.25, 6.0)
    shown = capsys.readouterr().out
    assert "halfway  grpo       stopped   3/50  0.300   0.250     6s" in shown
    assert main(["runs", str(tmp_path / "a" / "done" / "final")]) == 2
    assert "contains no run directory" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "none")]) == 2


def test_a_run_of_a_comparison_is_finished_when_it_has_a_result(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").touch()
    for arm, status in (("a", "finished"), ("b", "failed"), ("c", None)):
        write_run(tmp_path / "runs" / arm / "seed-1", steps=2, done=2)
        if status is not None:
            result = place(tmp_path, arm=arm, seed=1)
            result.parent.mkdir(exist_ok=True)
            result.write_text(json.dumps({"status": status}), encoding="utf-8")
    write_run(tmp_path / "runs" / "tuning" / "a-lr-0.1" / "seed-9", steps=2, done=1)
    tuned = place(tmp_path, arm="a", seed=9, rate=0.1)
    tuned.parent.mkdir()
    tuned.write_text('{"status": "finished"}', encoding="utf-8")
    states = [run.state for run in overview(tmp_path)]
    assert states == ["finished", "stopped", "stopped", "finished"]
    [arm] = overview(tmp_path / "runs" / "a" / "seed-1")
    assert arm.state == "finished"


def test_the_shell_completes_commands_recipes_and_algorithms() -> None:
    def completed(words: str) -> list[str]:
        shell = {"_GROUPWISE_COMPLETE": "complete_bash", "COMP_WORDS": words,
                 "COMP_CWORD": str(len(words.split()) - 1), "PATH": "/usr/bin:/bin",
                 "PYTHONPATH": ":".join(sys.path)}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "groupwise"], env=shell, capture_output=True, text=True
        )
        return done.stdout.split()

    assert "recipes" in completed("groupwise rec")
    assert completed("groupwise train logic") == ["logic-rl"]


def test_every_name_of_a_registry_can_be_shown() -> None:
    from groupwise.cli.find import _known

    known = _known()
    assert all(known["algorithm"](name) for name in ALGORITHMS)
    assert all(known["reward"](name) for name in REWARDS)
    assert all(known["environment"](name) for name in ENVIRONMENTS)

"""`groupwise compare` from the command line to the report, killed in between, and A against A."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.experiments import Result, make_plan, read_results, run_plan
from groupwise.rundir.overview import overview

pytestmark = pytest.mark.slow

SMALL = [
    "steps=3",
    "data.limit=40",
    "prompts_per_step=3",
    "group_size=4",
    "sampling.max_tokens=24",
    "evaluation.prompts=4",
    "evaluation.samples=2",
    "optimizer.warmup_steps=0",
]
CLOCK = ("seconds",)


def arguments(output: Path, *more: str) -> list[str]:
    settings = [part for text in SMALL for part in ("--set", text)]
    return ["compare", "word-problems", *settings, "--output", str(output), "--jobs", "1", *more]


def timeless(result: Result) -> dict[str, list[float | None]]:
    return {key: list(values) for key, values in result.curve.items() if key not in CLOCK}


def test_an_algorithm_against_itself_is_the_same_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--algorithms", "one=grpo,other=grpo,softrank", "--seeds", "3", "--against", "one"]
    assert main(arguments(tmp_path / "x", *given, "--json", str(tmp_path / "x.json"))) == 0
    found = {(r.arm, r.seed): r for r in read_results(tmp_path / "x")}
    assert len(found) == 9
    for seed in (0, 1, 2):
        one, other = found["one", seed], found["other", seed]
        assert timeless(one) == timeless(other)
        assert one.evaluations == other.evaluations
        assert timeless(one) != timeless(found["softrank", seed])
    assert timeless(found["one", 0]) != timeless(found["one", 1])
    # Before and after on the held-out problems; before, all arms are one model.
    steps = [(row["step"], row["split"]) for row in found["one", 0].evaluations]
    assert steps == [(0, "held_out"), (3, "held_out")]
    assert len(list((tmp_path / "x" / "base").iterdir())) == 1
    said = json.loads((tmp_path / "x.json").read_text())
    assert said == json.loads((tmp_path / "x" / "comparison.json").read_text())
    contrasts = [c for c in said["comparison"]["contrasts"] if c["first"] == "other"]
    assert contrasts and all(c["difference"]["value"] == 0 for c in contrasts)
    assert "one and other" in capsys.readouterr().out.replace("other and one", "one and other")
    assert (tmp_path / "x" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "x" / "report.png").exists()
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    differ = page.split("Settings that differ")[1].split("</table>")[0]
    assert "algorithm.name</th><td>grpo</td><td>grpo</td><td>softrank</td>" in differ
    assert {run.state for run in overview(tmp_path / "x")} == {"finished"}
    assert main(["report", str(tmp_path / "x"), "--figure", "paper"]) == 0
    assert (tmp_path / "x" / "figure-paper.png").exists()
    # The second time everything is there; other settings are another experiment.
    before = (tmp_path / "x" / "results" / "one-seed-0.json").stat().st_mtime_ns
    assert main(arguments(tmp_path / "x", *given)) == 0
    assert (tmp_path / "x" / "results" / "one-seed-0.json").stat().st_mtime_ns == before
    assert main(arguments(tmp_path / "x", *given, "--seeds", "4")) == 2
    assert "contains an experiment that differs in seeds" in capsys.readouterr().err


def test_tokens_are_matched_and_a_rate_is_tuned_on_other_seeds(tmp_path: Path) -> None:
    plan = make_plan(
        {
            "recipe": "word-problems",
            "set": SMALL,
            "seeds": [0, 1],
            "match": "tokens",
            "tuning": {"seeds": [9], "learning_rates": [1e-4, 2e-4], "extensions": 1},
            "arms": [{"algorithm": "softrank", "set": ["group_size=2"]}, {"algorithm": "grpo"}],
        }
    )
    analysis = run_plan(plan, output=tmp_path, jobs=1).analysis
    found = {(r.arm, r.seed): r for r in read_results(tmp_path) if not r.tuning}
    for seed in (0, 1):
        budget, used = found["grpo", seed].used("tokens"), found["softrank", seed].used("tokens")
        # Groups of half the size take about twice the steps, and stop at the first beyond.
        last = used - (found["softrank", seed].curve["tokens"][-2] or 0)
        assert used - last < budget <= used
        assert len(found["softrank", seed].curve["step"]) > 3
        assert found["softrank", seed].ended == "budget"
    # Two rates always have the best one at an edge, so each arm tries a third.
    assert {len(choice.areas) for choice in analysis.choices.values()} == {3}
    assert {r.learning_rate for r in found.values() if r.arm == "grpo"} == {
        analysis.choices["grpo"].learning_rate
    }
    assert analysis.runs[0].axis == "thousand tokens"


def test_an_interrupted_experiment_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*arguments(tmp_path / "x", "--algorithms", "grpo", "--seeds", "2"), "--set", "steps=6"]
    metrics = tmp_path / "x" / "runs" / "grpo" / "seed-1" / "metrics.jsonl"

    def interrupt() -> None:
        # Before its first step a run has nothing to keep.
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(given) == 130
    continues = f"the same command continues the experiment in {tmp_path / 'x'}"
    said = capsys.readouterr().err
    assert said.endswith(f"interrupted; {continues}\nerror: interrupted.\n")
    first = tmp_path / "x" / "results" / "grpo-seed-0.json"
    written = first.stat().st_mtime_ns
    assert not (tmp_path / "x" / "results" / "grpo-seed-1.json").exists()
    assert list((metrics.parent / "checkpoints").iterdir())
    assert main(given) == 0
    assert first.stat().st_mtime_ns == written
    again = {r.seed: r for r in read_results(tmp_path / "x")}
    assert again[1].curve["step"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in again[1].evaluations] == [0, 6]


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    # A learning rate at which the weights are no numbers any more after the first step.
    arms = [{"label": "wild", "algorithm": "grpo", "learning_rate": 1e30}, {"algorithm": "grpo"}]
    plan = make_plan({"recipe": "word-problems", "set": SMALL, "seeds": [0, 1], "arms": arms})
    analysis = run_plan(plan, output=tmp_path, jobs=os.cpu_count()).analysis
    assert [result.name for result in analysis.failed] == ["wild seed 0", "wild seed 1"]
    assert {run.label for run in analysis.runs} == {"grpo"}
    assert any("Failed: wild seed 0" in remark for remark in analysis.remarks())

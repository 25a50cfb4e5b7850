"""The list of metrics explains what runs write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.report.metrics import METRICS, figure_meaning, metric
from groupwise.training.monitor.metrics import tool_metrics
from groupwise.types import Completion


@pytest.mark.parametrize(
    ("more", "own"),
    [
        (("algorithm.name=ppo",), {"critic.loss", "explained_variance", "returns"}),
        (
            ("algorithm.name=oreal_token", "token_reward.freeze_policy_steps=0"),
            {"token_reward.loss", "token_reward_right", "token_reward_wrong", "token_weight"},
        ),
    ],
)
def test_every_metric_of_a_run_with_a_second_learner_is_explained(
    more: tuple[str, ...], own: set[str], tmp_path: Path
) -> None:
    few = ("steps=1", "prompts_per_step=2", "group_size=4", "threads=1", "evaluation.prompts=2")
    rows = (*more, "guards.silent_rewards=say", f"output={tmp_path / 'run'}")
    words = [word for value in (*few, *rows) for word in ("--set", value)]
    assert main(["train", "word-problems", *words]) == 0
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    keys = set(json.loads(row)) - {"step"}
    assert own | {"seconds.rollout"} <= keys
    assert [key for key in sorted(keys) if metric(key) is None] == []


def test_every_figure_of_an_evaluation_is_explained(tmp_path: Path) -> None:
    few = ("evaluation.prompts=4", "evaluation.samples=2", "threads=1", "sampling.max_tokens=32")
    words = [word for value in few for word in ("--set", value)]
    place = tmp_path / "x.json"
    assert main(["eval", "bundled", "--seeds", "2", *words, "--json", str(place)]) == 0
    [figures] = json.loads(place.read_text(encoding="utf-8"))["models"].values()
    assert {"greedy", "pass_at_2", "length", "seed_deviation"} <= set(figures)
    assert [name for name in sorted(figures) if not figure_meaning(name)] == []
    assert "with 2 tool calls" in figure_meaning("accuracy_after_2_calls")
    assert figure_meaning("no_such") == figure_meaning("no_such_at_3") == ""


def test_metrics_of_tools_are_explained() -> None:
    counted = {"calls": 1.0, "found": 1.0, "tool_seconds": 0.1, "wait_seconds": 0.3}
    answer = Completion(
        tokens=[1, 2], mask=[True, False], logprobs=[0.0, 0.0], text="", finish="stop",
        values=counted,
    )  # fmt: skip
    keys = tool_metrics([answer])
    keys |= {"accuracy_after_2_calls": 1.0}
    assert "tool_found" in keys and [key for key in keys if metric(key) is None] == []


def test_unknown_metrics_are_not_invented() -> None:
    assert metric("no_such") is None and metric("critic.no_such") is None


def test_meanings_are_sentences_and_titles_differ() -> None:
    assert [key for key, known in METRICS.items() if not known.meaning.endswith(".")] == []
    assert len({known.title for known in METRICS.values()}) == len(METRICS)

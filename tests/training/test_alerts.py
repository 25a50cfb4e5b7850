"""Alerts: each fires beyond its threshold, once, and says what to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.report import write_run_report
from groupwise.rundir.files import read_lines
from groupwise.settings import AlertsSettings
from groupwise.training.monitor.alerts import ALERT_RULES, Alerts
from groupwise.training.monitor.metrics import duplicates_and_correlation
from groupwise.training.stages.sft import save
from made_up import one_group
from small_runs import Quiet, letters, prepared, tiny

CALM = {
    "reward": 0.5,
    "reward_std": 0.5,
    "signal_share": 0.6,
    "valid_share": 1.0,
    "length": 20.0,
    "truncated_share": 0.0,
    "entropy": 0.7,
    "kl": 0.01,
    "parts_correlation": 0.2,
    "sampler_gap": 1e-6,
    "unmoved_share": 0.0,
    "duplicate_share": 0.1,
}
LOUD = {
    "equal_rewards": {"reward_std": 0.0},
    "no_signal": {"signal_share": 0.05},
    "length_growth": {"length": 61.0},
    "truncated": {"truncated_share": 0.51},
    "entropy": {"entropy": 0.01},
    "kl": {"kl": 1.1},
    "parts_against": {"parts_correlation": -0.6},
    "sampler_gap": {"sampler_gap": 0.03},
    "unmoved_parameters": {"unmoved_share": 0.1},
    "duplicates": {"duplicate_share": 0.9},
    "not_judged": {"valid_share": 0.8},
}


def names(alerts: Any) -> list[str]:
    return [alert.rule.threshold for alert in alerts]


def test_every_alert_has_a_threshold_that_is_a_setting_and_three_causes() -> None:
    thresholds = AlertsSettings.model_fields.keys() - {"patience"}
    assert {rule.threshold for rule in ALERT_RULES} == thresholds
    assert {*LOUD, "hacking"} == thresholds
    assert all(len(set(rule.causes)) == 3 for rule in ALERT_RULES)


def test_a_calm_run_is_silent() -> None:
    alerts = Alerts()
    assert [a for _ in range(10) for a in alerts.observe(CALM)] == []


@pytest.mark.parametrize("name", sorted(LOUD))
def test_each_alert_fires_once_after_its_patience(name: str) -> None:
    alerts, rule = Alerts(), next(rule for rule in ALERT_RULES if rule.threshold == name)
    for _ in range(3):
        assert alerts.observe(CALM) == []
    sounded = [names(alerts.observe({**CALM, **LOUD[name]})) for _ in range(6)]
    first = 0 if rule.at_once else 2
    assert sounded == [[name] if step == first else [] for step in range(6)]
    assert alerts.observe(CALM) == []
    again = [names(alerts.observe({**CALM, **LOUD[name]})) for _ in range(3)]
    assert [name] in again, "an alert that had recovered must fire again"


def test_an_alert_that_is_switched_off_is_silent() -> None:
    alerts = Alerts(thresholds=AlertsSettings(truncated=None, patience=1))
    assert alerts.observe({**CALM, "truncated_share": 1.0}) == []


def test_what_was_not_measured_sets_off_nothing() -> None:
    alerts = Alerts(thresholds=AlertsSettings(patience=1))
    assert alerts.observe({"reward": math.nan, "entropy": math.nan}) == []


def test_an_alert_names_metric_threshold_causes_and_what_to_try() -> None:
    alerts = Alerts(thresholds=AlertsSettings(patience=1, truncated=0.25))
    (alert,) = alerts.observe({**CALM, "truncated_share": 0.5})
    text = str(alert)
    assert "truncated_share = 0.5, above alerts.truncated = 0.25" in text
    assert all(f"({n}) " in text for n in (1, 2, 3)) and "Try a larger sampling.max_tokens" in text


def test_a_reward_that_rises_while_accuracy_falls_is_suspicious() -> None:
    alerts = Alerts()
    alerts.observe({**CALM, "reward": 0.2})
    assert alerts.observe_evaluation(math.nan) == [], "nothing could be judged"
    assert alerts.observe_evaluation(0.6) == []
    for _ in range(20):
        alerts.observe({**CALM, "reward": 0.9})
    assert names(alerts.observe_evaluation(0.4)) == ["hacking"]


def test_a_reward_that_falls_with_accuracy_is_not() -> None:
    alerts = Alerts()
    alerts.observe({**CALM, "reward": 0.9})
    alerts.observe_evaluation(0.6)
    for _ in range(20):
        alerts.observe({**CALM, "reward": 0.2})
    assert alerts.observe_evaluation(0.4) == []


def test_alerts_go_on_after_a_resume() -> None:
    whole, first, second = Alerts(), Alerts(), Alerts()
    steps = [CALM] * 3 + [{**CALM, "truncated_share": 0.9, "length": 90.0}] * 5
    expected = [names(whole.observe(step)) for step in steps]
    found = [names(first.observe(step)) for step in steps[:5]]
    second.restore(first.state())
    assert found + [names(second.observe(step)) for step in steps[5:]] == expected


def test_parts_that_pull_against_each_other() -> None:
    """(0, 1, 2, 3) against (3, 2, 1, 0) has correlation −1; a constant part has none."""
    tokens = [[1], [2], [1], [1]]
    parts = {"a": [0.0, 1, 2, 3], "b": [3.0, 2, 1, 0], "c": [1.0] * 4}
    found = duplicates_and_correlation(one_group(parts, tokens))
    assert found["parts_correlation"] == pytest.approx(-1.0)
    assert found["duplicate_share"] == 0.5  # of four, [1] is there three times and [2] once
    assert "parts_correlation" not in duplicates_and_correlation(
        one_group({"a": [0.0, 1, 2, 3]}, tokens)
    )


def test_answers_that_are_all_the_same_are_a_finding_only_where_they_are_not_right() -> None:
    """Four equal completions: three repeat the first, so 3/4; but not of a group that is right."""
    same = one_group({"a": [1.0] * 4}, [[1]] * 4)
    for correct, expected in ([1.0] * 4, 0.0), ([1.0, 1.0, 0.0, 1.0], 0.75), ([math.nan] * 4, 0.75):
        scores = replace(same.scores, correct=torch.tensor([correct]))
        assert (
            duplicates_and_correlation(replace(same, scores=scores))["duplicate_share"] == expected
        )
    unjudged = replace(
        same.scores,
        correct=torch.tensor([[1.0, 1.0, 1.0, math.nan]]),
        valid=torch.tensor([[True, True, True, False]]),
    )
    assert duplicates_and_correlation(replace(same, scores=unjudged))["duplicate_share"] == 0.0


def test_entropy_is_compared_with_that_of_the_first_steps() -> None:
    """A tenth of 0.04 is 0.004: a small model that always was that sure has lost nothing."""
    alerts = Alerts()
    heard = [0.04, 0.03, 0.05, 0.005, 0.005, 0.005, 0.004, 0.0039, 0.003]
    sounded = [names(alerts.observe({**CALM, "entropy": value})) for value in heard]
    assert sounded == [[]] * 8 + [["entropy"]]


def test_every_metric_that_is_watched_is_one_that_runs_have(tmp_path: Path) -> None:
    run = prepared(
        tmp_path,
        "algorithm.name=grpo",
        'algorithm.divergence={name="k3", coefficient=0.1}',
        functions=[letters, blanks],
    )
    metrics = run.trainer.step().metrics | run.trainer.step().metrics
    run.close()
    measured = metrics.keys() | run.trainer.monitor.alerts._changes(metrics).keys() | {"hacking"}
    assert {rule.metric for rule in ALERT_RULES} <= measured


def blanks(text: str) -> float:
    return float(text.count(" "))


def test_an_alert_says_of_which_run_and_step_it_is_and_is_written_down(tmp_path: Path) -> None:
    """A model made of noise hardly ever ends its 8 tokens; the third step exhausts the patience."""
    progress = Quiet()
    run = prepared(tmp_path, progress=progress, name="softrank #1")
    run.trainer.run()
    run.close()
    (said,) = [text for text in progress.said if "alert truncated" in text]
    assert said.startswith("softrank #1, step 3: alert truncated: many completions reach the")
    (line,) = [row for row in read_lines(tmp_path / "alarms.jsonl") if row["alarm"] == "truncated"]
    assert line["step"] == 3 and said.endswith(line["text"])


def test_what_alerts_tell_to_try_exists() -> None:
    import re

    from groupwise import ALGORITHMS, CORRECTIONS, FILTERS
    from groupwise.config import flat, load
    from groupwise.rewards import COMBINATIONS

    registries = {
        "algorithm.name": ALGORITHMS,
        "algorithm.correction.name": CORRECTIONS,
        "algorithm.filter.name": FILTERS,
        "combine": COMBINATIONS,
    }
    named = [m for rule in ALERT_RULES for m in re.findall(r"([\w.]+) = '(\w+)'", rule.attempt)]
    assert {path for path, _ in named} >= set(registries)
    for path, name in named:
        assert path not in registries or name in registries[path], (path, name)
    known = {path.partition(".")[0] for path in flat(load("word-problems"))}
    for rule in ALERT_RULES:
        for section in re.findall(r"\b([a-z_]+)\.[a-z_]+", rule.attempt):
            assert section in known, (rule.threshold, section)


@pytest.mark.parametrize("adapter", ["model.adapter={rank=2}", "model.adapter="])
def test_a_run_whose_parameters_all_move_fires_no_alert(adapter: str, tmp_path: Path) -> None:
    """The first update of an adapter moves one of its two factors only."""
    save(tiny(), tmp_path / "model")
    progress = Quiet()
    path = f"model.path={tmp_path / 'model'}"
    run = prepared(tmp_path / "run", path, adapter, "steps=3", progress=progress)
    run.trainer.run()
    run.close()
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [row.get("unmoved_share") for row in rows] == [None, 0.0, None]
    assert not [text for text in progress.said if "unmoved_parameters" in text]


def test_the_first_error_of_each_kind_is_shown_stored_and_reported(tmp_path: Path) -> None:
    def broken(text: str) -> float:
        return {}[text[:1]] if text and len(text) % 2 else 1.0

    quiet = Quiet()
    run = prepared(
        tmp_path,
        "steps=2",
        "guards.silent_rewards=say",
        functions=(letters, broken),
        progress=quiet,
    )
    run.trainer.run()
    told = [line for line in quiet.said if "was not scored: broken: " in line]
    assert len(told) == 1 and "broken: KeyError: " in told[0]
    assert "(test_alerts.py, line" in told[0] and "return {}[text[:1]]" in told[0]
    rows = list(read_lines(tmp_path / "alarms.jsonl"))
    stored = [row["text"] for row in rows if row["alarm"] == "reward_error"]
    assert [line.split(": ", 1)[1] for line in told] == stored
    page = write_run_report(tmp_path).read_text()
    assert "Alerts" in page and "test_alerts.py, line" in page

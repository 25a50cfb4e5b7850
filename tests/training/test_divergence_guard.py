"""Bad steps: counted, skipped, rolled back, or the end of the run."""

from __future__ import annotations

import math

import torch

from groupwise.settings import GuardsSettings
from groupwise.training.monitor.divergence_guard import DivergenceGuard, suspects
from groupwise.types import Batch, Update
from made_up import one_group

FINE = {"grad_norm": 1.0, "skipped_updates": 0.0, "valid_share": 1.0}
BAD = {"grad_norm": math.nan, "skipped_updates": 1.0, "valid_share": 1.0}
MUTE = {"grad_norm": 0.0, "skipped_updates": 0.0, "valid_share": 0.0}


def test_consecutive_bad_steps_stop_the_run() -> None:
    guard = DivergenceGuard(settings=GuardsSettings(max_bad_steps=3))
    found = [guard.judge(step) for step in (BAD, MUTE, FINE, BAD, BAD, MUTE)]
    assert found == ["bad", "bad", "fine", "bad", "bad", "stop"]
    assert "3 consecutive steps gave no usable gradient (guards.max_bad_steps = 3)" in guard.reason


def test_a_collapse_is_told_from_rewards_that_judge_nothing() -> None:
    guard = DivergenceGuard(settings=GuardsSettings(max_bad_steps=2))
    for step in (MUTE, MUTE):
        guard.judge(step)
    assert "no completion could be judged" in guard.reason and "diverged" not in guard.reason
    for broken in ({**BAD, "learning_rate": 0.5}, {**MUTE, "broken_share": 1.0}):
        guard = DivergenceGuard(settings=GuardsSettings(max_bad_steps=2))
        for step in (FINE, {**FINE, "grad_norm": 40.0}, broken, MUTE):
            guard.judge(step)
        assert "so the policy has probably diverged" in guard.reason
        assert "norms of the last gradients were 1 to 40" in guard.reason
    assert "optimizer.learning_rate = 0.5" not in guard.reason
    guard.judge({**BAD, "learning_rate": 0.5})
    assert "Lower optimizer.learning_rate = 0.5" in guard.reason


def test_a_collapse_without_earlier_norms_gives_no_advice_on_the_dtype() -> None:
    """The guard does not know it, and a run in float32 has no wider one."""
    guard = DivergenceGuard(settings=GuardsSettings(max_bad_steps=1))
    guard.judge(BAD)
    assert "diverged" in guard.reason and "dtype" not in guard.reason


def test_a_spike_is_one_against_the_usual_norm() -> None:
    guard = DivergenceGuard(settings=GuardsSettings(spike=5.0, rollbacks=1))
    assert guard.judge({**FINE, "grad_norm": 100.0}) == "fine", "nothing is usual yet"
    for _ in range(12):
        assert guard.judge(FINE) == "fine"
    assert guard.judge({**FINE, "grad_norm": 4.9}) == "fine"
    assert guard.judge({**FINE, "grad_norm": 5.1}) == "spike"
    assert guard.judge({**FINE, "grad_norm": 5.1}) == "stop"
    assert "2 gradient spikes" in guard.reason


def test_without_the_option_nothing_is_a_spike() -> None:
    guard = DivergenceGuard()
    assert {guard.judge(FINE) for _ in range(12)} == {"fine"}
    assert guard.judge({**FINE, "grad_norm": 1e9}) == "fine"


def test_the_guard_continues_after_a_resume() -> None:
    first, second = DivergenceGuard(), DivergenceGuard()
    first.judge(BAD), first.judge(BAD)
    second.restore(first.state())
    assert second.judge(BAD) == "stop"


def update(norm: float, logp: torch.Tensor) -> Update:
    return Update(
        version=1,
        logp=logp,
        entropy=torch.full_like(logp, math.nan),
        computed=torch.ones(len(logp), dtype=torch.bool),
        loss=0.0,
        grad_norm=norm,
        learning_rate=0.1,
    )


def test_the_completion_that_broke_the_gradient_is_named() -> None:
    scored = one_group({"a": [0.0, 1.0, 2.0]}, [[1, 2], [3], [4, 5]], texts=["x", "y", "z"])
    logp = torch.tensor([[-1.0, -1.0], [math.nan, 0.0], [-1.0, -1.0]])
    batch = Batch(
        prompts=(torch.tensor([1]),),
        group=torch.zeros(3, dtype=torch.long),
        tokens=torch.tensor([[1, 2], [3, 0], [4, 5]]),
        length=torch.tensor([2, 1, 2]),
        mask=torch.tensor([[True, True], [True, False], [True, True]]),
        advantage=torch.ones(3, 2),
        weight=torch.ones(3, 2),
    )
    updates = [update(math.nan, logp)]
    found = suspects(scored, [batch], updates)
    assert found == [{"prompt": "a", "text": "y", "not_finite": "log-probability"}]
    everything = suspects(scored, [batch], [update(math.inf, torch.full((3, 2), -1.0))])
    assert [row["text"] for row in everything] == ["x", "y", "z"]

"""SoftRank, and others, inside the installed TRL's own trainer."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.errors import UsageError
from groupwise.integrations.trl import with_advantage
from groupwise.integrations.trl.advantage import _relog, group_advantages
from groupwise.registry import spec
from trl_peer import REWARDS, fixed, require_trl, rows, trl_trainer


class Alike:
    """The two methods that an heir of TRL's trainer must have."""

    def _calculate_rewards(self) -> None: ...

    def _generate_and_score_completions(self) -> None: ...


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_softrank_is_used_and_logged(tmp_path: Path, scale_rewards: str) -> None:
    trl = require_trl()
    softrank = with_advantage(trl.GRPOTrainer, "softrank", tau=0.5)
    trainer = trl_trainer(
        fixed(tmp_path / "model"), tmp_path / "out", trainer=softrank, scale_rewards=scale_rewards
    )
    assert isinstance(trainer, trl.GRPOTrainer)
    output = trainer._generate_and_score_completions(rows())
    wanted = ADVANTAGES.get("softrank")(torch.tensor(REWARDS), tau=0.5).flatten()
    torch.testing.assert_close(output["advantages"], wanted, rtol=0, atol=1e-6)
    assert list(trainer._logs["advantages"]) == pytest.approx(wanted.tolist(), abs=1e-6)
    # the loss is the one of these advantages: −A ρ per token, mean over the tokens, at ρ = 1
    loss = trainer._compute_loss(trainer.model, output)
    lengths = output["completion_mask"].sum(-1)
    assert loss.item() == pytest.approx(float(-(wanted * lengths).sum() / lengths.sum()), abs=1e-6)


def test_a_completion_nobody_judged_leaves_its_group(tmp_path: Path) -> None:
    trl = require_trl()
    rewards = [(1.0, None, 0.25), (0.5, 1.5, -0.5)]
    trainer = trl_trainer(
        fixed(tmp_path / "model"),
        tmp_path / "out",
        trainer=with_advantage(trl.GRPOTrainer, "centered"),
        rewards=rewards,
    )
    output = trainer._generate_and_score_completions(rows())
    # mean(1, .25) = .625, mean(.5, 1.5, −.5) = .5
    wanted = [0.375, 0.0, -0.375, 0.0, 1.0, -1.0]
    assert output["advantages"].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_run_trains_and_logs(tmp_path: Path) -> None:
    trl = require_trl()
    trainer = trl_trainer(
        fixed(tmp_path / "model"),
        tmp_path / "out",
        trainer=with_advantage(trl.GRPOTrainer, "softrank", tau=1),
        learning_rate=1e-3,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(
        not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)
    )
    wanted = ADVANTAGES.get("softrank")(torch.tensor(REWARDS), tau=1.0).flatten().tolist()
    assert sorted(trainer._logs["advantages"]) == pytest.approx(sorted(wanted), abs=1e-6)
    assert [row["reward"] for row in trainer.state.log_history[:2]] == pytest.approx([4 / 6] * 2)


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean softrank"):
        with_advantage(Alike, "sofrank")
    with pytest.raises(UsageError, match="advantage.temperature"):
        with_advantage(Alike, "softrank", temperature=0.5)
    with pytest.raises(UsageError, match="needs mask, which TRL"):
        with_advantage(Alike, "discounted_whitened")
    with pytest.raises(UsageError, match="no method _calculate_rewards"):
        with_advantage(dict, "softrank")


def table(*columns: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(columns).mT


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # totals 2·r₁ + r₂ = (2, 1, −, 2.5): the third has no judge; mean 5.5/3
        ("centered", [1 / 6, -5 / 6, 0.0, 2 / 3]),
    ],
)
def test_totals_are_weighted_sums_of_what_was_said(name: str, wanted: list[float]) -> None:
    nan = float("nan")
    rewards = table((1.0, 0.0, nan, 1.0), (nan, 1.0, nan, 0.5))
    got = group_advantages(
        ADVANTAGES.bind(spec(name)),
        rewards,
        torch.tensor([2.0, 1.0]),
        names=["a", "b"],
        lengths=torch.ones(4),
        group=4,
    )
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)


def test_parts_and_lengths_reach_the_advantage() -> None:
    given: dict[str, Any] = {
        "names": ["same", "same"],
        "lengths": torch.tensor([1.0, 1.0, 3.0, 1.0]),
        "group": 4,
    }
    rewards = table((1.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.0, 0.0))
    parts = group_advantages(ADVANTAGES.bind(spec("parts_zscore")), rewards, torch.ones(2), **given)
    alone = ADVANTAGES.get("parts_zscore")(
        {"a": rewards[None, :, 0], "b": rewards[None, :, 1]}, lengths=given["lengths"][None]
    )
    torch.testing.assert_close(parts, alone.flatten())
    weighted = group_advantages(
        ADVANTAGES.bind(spec("length_weighted")), rewards, torch.ones(2), **given
    )
    # baseline: rewards (1.1, .1, 0, 0) weighted by lengths: 1.2 / 6
    assert weighted.tolist() == pytest.approx([0.9, -0.1, -0.2, -0.2], abs=1e-6)


def test_only_the_newest_lines_of_a_longer_log_are_replaced() -> None:
    logged = deque([9.0, 8.0, 1.0, 2.0], maxlen=6)
    _relog(logged, torch.tensor([0.25, 0.5]))
    assert list(logged) == [9.0, 8.0, 0.25, 0.5]

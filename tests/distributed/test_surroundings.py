"""Processes of a run have the same packages, functions and imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from groupwise.algorithms.losses import SURROGATES
from groupwise.config import load
from groupwise.distributed import surroundings
from groupwise.distributed.surroundings import compare, received
from groupwise.errors import UsageError
from groupwise.rewards import REWARDS
from small_runs import settings


def test_another_version_is_named_with_its_process() -> None:
    own = surroundings.surroundings()
    compare(own, {"rank 1": dict(own)}, here="rank 0")
    with pytest.raises(UsageError, match="^rank 2 has torch 1.0, but rank 0 has torch "):
        compare(own, {"rank 1": own, "rank 2": {**own, "torch": "1.0"}}, here="rank 0")


def test_a_function_with_another_default_is_another_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = surroundings.surroundings()

    def ppo_clip(log_ratio, advantage, mask, *, low: float = 0.3):  # type: ignore[no-untyped-def]
        return advantage

    monkeypatch.setitem(SURROGATES._functions, "ppo_clip", ppo_clip)
    with pytest.raises(UsageError, match="replica 0 has registered functions"):
        compare(own, {"replica 0": surroundings.surroundings()}, here="the driver")


def test_a_configuration_brings_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that receives a configuration has not imported what it names."""
    monkeypatch.setattr(REWARDS, "_functions", dict(REWARDS._functions))
    module = tmp_path / "sent_rewards.py"
    module.write_text(
        "from groupwise.rewards import REWARDS\n\n\n"
        "@REWARDS.register\ndef sent_reward(text: str) -> float:\n    return 1.0\n"
    )
    config = load("word-problems", settings(tmp_path / "run", f"imports=['{module}']"))
    values = {**json.loads(config.to_json()), "rewards": [{"name": "other_reward"}]}
    with pytest.raises(UsageError, match="other_reward"):
        received(json.dumps(values))
    module.write_text(module.read_text().replace("sent_reward", "other_reward"))
    values["imports"] = [str(module.rename(tmp_path / "other_rewards.py"))]
    assert received(json.dumps(values)).rewards[0].name == "other_reward"

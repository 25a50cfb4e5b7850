"""kill −9 at random instants: the resumed run ends as the unbroken one, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("kill_driver.py")

CRITIC = (
    "algorithm.name=ppo",
    "critic.optimizer.learning_rate=3e-3",
    "critic.minibatches=2",
    "critic.pretraining={batches=6, minibatches=2}",
)


def kill(folder: Path, *more: str, kills: int, seed: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder), str(kills), str(seed), *more],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    result = kill(tmp_path, kills=3, seed=0)
    assert result["kills"] == 3 and result["wrong"] == []


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path: Path) -> None:
    result = kill(tmp_path, kills=200, seed=1)
    assert result["kills"] == 200 and result["wrong"] == []
    assert result["drafts"], "no kill hit a checkpoint that was being written"


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_a_hundred_kills_of_a_run_with_a_critic(tmp_path: Path) -> None:
    """Also while the critic is pretrained; policy and critic both end with the same bits."""
    result = kill(tmp_path, *CRITIC, kills=100, seed=2)
    assert result["kills"] == 100 and result["wrong"] == []
    assert result["drafts"], "no kill hit a checkpoint that was being written"
    assert result["models"] == ["best", "critic", "final"]

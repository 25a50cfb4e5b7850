"""A run that samples ahead of its updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from groupwise.errors import UsageError
from small_runs import config, prepared, timeless

CORRECTED = "algorithm.correction={name='tis'}"


def settings(ahead: int) -> list[str]:
    return [f"ahead={ahead}", CORRECTED, "steps=6"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_resumed_run_equals_the_unbroken_one(ahead: int, tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole", *settings(ahead))
    whole.trainer.run()
    first = prepared(tmp_path / "broken", *settings(ahead))
    for _ in range(3):
        first.trainer.advance()
    first.trainer.save(wait=True)
    first.close()
    second = prepared(tmp_path / "broken", *settings(ahead), resume=True)
    assert second.trainer.done == 3
    second.trainer.run()
    one, other = (run.trainer.policy.trained() for run in (whole, second))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "broken")
    whole.close()
    second.close()


def test_the_gap_to_older_policies_is_measured_by_age(tmp_path: Path) -> None:
    run = prepared(tmp_path, *settings(2))
    run.trainer.run()
    run.close()
    rows = timeless(tmp_path)
    assert [row.get("token_age_max", 0.0) for row in rows] == [0, 1, 2, 2, 2, 2]
    assert rows[0]["sampler_kl"] < 1e-9 < rows[1]["kl_at_age.1"] < 1
    assert all("sampler_kl" not in row and 0.5 < row["ess_at_age.2"] < 1 for row in rows[2:])


def test_batches_in_flight_are_not_dropped_silently(tmp_path: Path) -> None:
    run = prepared(tmp_path, *settings(1))
    run.trainer.advance()
    run.trainer.save(wait=True)
    run.close()
    with pytest.raises(UsageError, match="ahead: 1 → 0"):
        prepared(tmp_path, *settings(0), resume=True)
    with pytest.raises(UsageError, match="ahead: the checkpoint holds groups"):
        prepared(tmp_path, *settings(0), resume=True, allow_changes=True)
    more = prepared(tmp_path, *settings(3), resume=True, allow_changes=True)
    more.trainer.run()
    more.close()


def test_an_error_between_steps_loses_no_batch(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole", *settings(2))
    whole.trainer.run()
    run = prepared(tmp_path / "broken", *settings(2))
    update, calls = run.trainer.policy.update, []

    def fails(*given: object) -> object:
        calls.append(given)
        if len(calls) == 3:
            raise MemoryError
        return update(*given)  # type: ignore[arg-type]

    run.trainer.policy.update = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run.trainer.run()
    run.close()
    again = prepared(tmp_path / "broken", *settings(2), resume=True)
    assert again.trainer.done == 2
    again.trainer.run()
    one, other = (each.trainer.policy.trained() for each in (whole, again))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    whole.close()
    again.close()


def test_stale_batches_need_a_word_about_correction(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ahead = 2: .*set algorithm\.correction\.name = 'tis'"):
        config(tmp_path, "ahead=2")
    assert config(tmp_path, "ahead=2", "algorithm.correction={name='none'}").ahead == 2


@pytest.mark.parametrize("setting", ["sampling.max_tokens", "rewards.0.weight"])
def test_what_is_sampled_early_cannot_follow_a_schedule(setting: str, tmp_path: Path) -> None:
    scheduled = f"schedules=[{{setting='{setting}', points=[[1, 5], [4, 8]]}}]"
    assert config(tmp_path, scheduled)
    with pytest.raises(UsageError, match=f"schedules: {setting} changes with the step"):
        config(tmp_path, "ahead=1", CORRECTED, scheduled)

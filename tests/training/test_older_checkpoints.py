"""A run that was begun before learners had names, and settings their present sections, resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import load_run
from groupwise.errors import UsageError
from small_runs import Quiet, prepared, timeless

FORMAT_2 = Path(__file__).parent / "format_2_run"
MORE = ("algorithm.name=grpo", "update.minibatches=2", "logging.rollouts_every=0")


def test_a_run_of_format_2_continues_where_it_was(tmp_path: Path) -> None:
    """`expected.jsonl` are the metrics of the unbroken run, by the version that began it. Sums may
    differ in the last bits on another processor, so the metrics are compared to 1e-4 and what was
    read is compared to the bit."""
    folder = tmp_path / "run"
    shutil.copytree(FORMAT_2, folder)
    saved = FORMAT_2 / "checkpoints" / "step-000002"
    state = torch.load(saved / "state.pt", weights_only=True)
    progress = Quiet()
    run = prepared(folder, *MORE, "guards.spike=50.0", resume=True, progress=progress)
    assert run.trainer.done == 2 and "resumed at step 2" in progress.said
    changed = [text for text in progress.said if text.startswith("changed ")]
    assert all(" → " in text and "alerts" not in text for text in changed)
    for name, weight in load_file(saved / "weights.safetensors").items():
        assert torch.equal(run.trainer.policy.trained()[name], weight), name
    moments = run.trainer.policy.optimizer.adam.state_dict()["state"]  # type: ignore[attr-defined]
    before = state["learner"]["optimizer"]["adam"]["state"]
    assert sum(float(m["exp_avg_sq"].sum()) for m in moments.values()) == pytest.approx(
        sum(float(m["exp_avg_sq"].sum()) for m in before.values()), rel=1e-6
    )
    run.trainer.run()
    run.close()
    expected = [json.loads(line) for line in (FORMAT_2 / "expected.jsonl").read_text().splitlines()]
    for found, wanted in zip(timeless(folder), expected, strict=True):
        wanted.pop("still_share", None)  # It is `unmoved_share` of the second step by now.
        for key, value in wanted.items():
            assert found.get(key) == pytest.approx(value, rel=1e-4, abs=1e-6), (key, wanted["step"])


def test_settings_of_an_earlier_version_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """Renamed settings have no alias; with the recipe, the run continues."""
    folder = tmp_path / "run"
    shutil.copytree(FORMAT_2, folder)
    with pytest.raises(UsageError, match=r"config\.json.*no such setting.*train RECIPE --resume"):
        load_run(folder)
    written = json.loads((folder / "config.json").read_text())
    written["config"] = {"steps": 4}
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(UsageError) as refused:
        load_run(folder, ["stepz=4"])
    assert "RECIPE" not in str(refused.value)

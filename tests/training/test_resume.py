"""Resuming never loses what is there without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.errors import UsageError
from small_runs import Quiet, prepared, timeless


def stopped(folder: Path, *more: str, **given: object) -> None:
    """A run that was stopped after two steps, with one checkpoint."""
    run = prepared(folder, *more, **given)
    for _ in range(2):
        run.trainer.advance()
    run.trainer.save(wait=True)
    run.close()


def test_a_run_without_an_intact_checkpoint_is_restarted_only_when_told_to(tmp_path: Path) -> None:
    stopped(tmp_path)
    (tmp_path / "checkpoints" / "step-000002" / "state.pt").write_bytes(b"damaged")
    before = timeless(tmp_path)
    with pytest.raises(UsageError, match="none of the 1 checkpoints .* is intact .* --restart"):
        prepared(tmp_path, resume=True)
    assert timeless(tmp_path) == before, "the metrics are still there"
    run = prepared(tmp_path, resume=True, restart=True)
    assert run.trainer.done == 0 and timeless(tmp_path) == []
    run.close()


def test_a_folder_without_a_run_is_named_when_it_is_resumed(tmp_path: Path) -> None:
    progress = Quiet()
    prepared(tmp_path / "mistyped", resume=True, progress=progress).close()
    assert any("mistyped holds no checkpoint; the run starts at step 0" in s for s in progress.said)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_lines_that_were_lost_are_named(name: str, tmp_path: Path) -> None:
    stopped(tmp_path, "evaluation.every_steps=2", eval_prompts=None)
    file = tmp_path / name
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    progress = Quiet()
    again = prepared(
        tmp_path, "evaluation.every_steps=2", eval_prompts=None, resume=True, progress=progress
    )
    again.close()
    assert any(f"{name} lacks step 2" in text for text in progress.said)


def test_an_output_beside_resume_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", "word-problems", "--resume", "runs/a", "--set", "output=runs/b"]
    assert main(given) == 2
    assert "--set = 'output=runs/b': --resume names the run directory" in capsys.readouterr().err

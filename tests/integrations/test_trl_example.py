"""The example of a migrated script, as users run it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_migrated_script_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = example("trl_migration").main(2, str(tmp_path / "run"))
    assert trainer.state.global_step == 2
    assert "step 2: reward" in capsys.readouterr().out
    assert 0 < trainer.state.log_history[0]["answered"] <= 1


@pytest.mark.parametrize("name", ["trl_migration", "unsloth_softrank"])
def test_examples_are_short_and_whole(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    compile(text, name, "exec")

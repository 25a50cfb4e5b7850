"""The folder of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_runs import tiny

collect_ignore = ["trl_suite"]
"""Run by `make trl-suite`, with a search path of its own."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    policy = tiny()
    folder = tmp_path / "model"
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)

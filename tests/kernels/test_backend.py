"""The choice of kernels: by setting, one by one, recorded, and none at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import groupwise
from groupwise.config import build
from groupwise.config.connect import load_configured
from groupwise.kernels import Backend, Reference, active, select, using
from groupwise.kernels.auto import KERNELS, Auto
from groupwise.kernels.interface import BACKENDS
from groupwise.kernels.reference import attention
from groupwise.training.resume import resume_facts
from small_runs import tiny

PACKAGE = Path(groupwise.__file__).parent
KEPT = {"four_bits", "__init__", "interface", "reference", "heap", "adapter"}
"""The modules of `kernels/` that remain when the kernels are deleted."""


@pytest.fixture(autouse=True)
def restored() -> None:
    """A selection ends with its test."""
    with using(active()):
        yield  # pyright: ignore[reportReturnType]


def test_the_setting_selects_the_backend() -> None:
    load_configured(build({"model": {"kernels": "torch"}}))
    assert type(active()) is Reference
    load_configured(build({}))
    assert type(active()) is BACKENDS["auto"]


def test_both_backends_implement_the_protocol() -> None:
    assert isinstance(Reference(), Backend)
    assert isinstance(Auto(), Backend)


def test_a_checkpoint_says_what_computed() -> None:
    select("torch")
    assert resume_facts(build({"model": {"kernels": "torch"}}), tiny())["kernels"] == "torch"


def test_every_kernel_can_be_turned_off() -> None:
    assert Auto(without=KERNELS).description(torch.device("cpu")) == "torch"
    assert Auto(without=KERNELS).description(torch.device("cuda")) == "torch"
    with pytest.raises(ValueError, match="sofmax"):
        Auto(without={"sofmax"})


def test_other_packages_import_kernels_through_their_package_alone() -> None:
    """So that deleting a kernel breaks no import."""
    inner = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "kernels"
        for line in path.read_text(encoding="utf-8").splitlines()
        if "groupwise.kernels." in line and "import" in line
    ]
    assert inner == []


def test_a_run_works_with_the_kernels_deleted(tmp_path: Path) -> None:
    """All that has to change is one line of `kernels/__init__.py`."""
    package = tmp_path / "src" / "groupwise"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("cpp"))
    for path in (package / "kernels").glob("*.py"):
        if path.stem not in KEPT:
            path.unlink()
    door = package / "kernels" / "__init__.py"
    lines = door.read_text(encoding="utf-8").splitlines(keepends=True)
    left = [line for line in lines if "import auto" not in line]
    assert len(left) == len(lines) - 1
    door.write_text("".join(left), encoding="utf-8")
    settings = (
        "steps=1", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=8", "threads=1",
        "evaluation.prompts=2", "data.limit=50", f"output={tmp_path / 'run'}",
    )  # fmt: skip
    done = subprocess.run(
        [
            *(sys.executable, "-m", "groupwise", "train", "word-problems"),
            *(part for setting in settings for part in ("--set", setting)),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "run" / "config.json").read_text())["kernels"] == "torch"


class Asked(TorchFunctionMode):
    """Writes down the heads of the keys that fused attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.heads.append((args[1].shape[1], kwargs["enable_gqa"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "masked", "heads"),
    [("meta", True, (4, False)), ("meta", False, (2, True)), ("cpu", True, (2, True))],
)
def test_a_card_gets_grouped_heads_without_a_mask_alone(
    device: str, masked: bool, heads: tuple[int, bool]
) -> None:
    """With both, PyTorch has no fused kernel there. A device without numbers stands for a card."""
    query, key = (torch.zeros(1, n, 5, 8, device=device) for n in (4, 2))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool, device=device).tril() if masked else None
    with Asked() as asked:
        found = attention(query, key, key, mask=mask, scaling=1.0, softcap=None)
    assert found.shape == query.shape and asked.heads == [heads]

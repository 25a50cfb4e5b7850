"""Models from folders: what is damaged is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.models.loading import resolve

NORM = "model.layers.0.input_layernorm.weight"


def missing(weights: dict[str, Tensor]) -> None:
    del weights[NORM]


def unexpected(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.input_layernorm.gain"] = weights[NORM].clone()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing, f"missing: {NORM}"),
        (unexpected, "unexpected: model.layers.0.input_layernorm.gain"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    damage: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path
) -> None:
    """transformers would make up what is missing."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("bundled"), folder)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied, which is no damage
    load_policy(folder)
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=said):
        load_policy(folder)

"""Models from folders: what is damaged is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.config import load
from groupwise.config.connect import load_to_answer
from groupwise.errors import UsageError
from groupwise.models import base_fingerprint, load_policy, make_policy, save_policy
from groupwise.models.loading import ModelSource, resolve
from small_runs import tiny

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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub with two revisions of a model: seed 0 as main, seed 1 as v2."""
    hub = tmp_path / "models--somebody--tiny"
    for seed, (commit, name) in enumerate([("a" * 40, "main"), ("b" * 40, "v2")]):
        save_policy(tiny(seed=seed), hub / "snapshots" / commit)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return hub


def test_a_revision_of_the_hub_is_loaded_and_a_folder_has_none(hub: Path) -> None:
    default, second = (load_policy("somebody/tiny", revision=r) for r in (None, "v2"))
    assert base_fingerprint(default.model) == f"commit:{'a' * 40}"
    assert base_fingerprint(second.model) == f"commit:{'b' * 40}"
    theirs = tiny(seed=1).model.state_dict()
    for name, weight in second.model.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    with pytest.raises(UsageError, match=r"with model.revision = 'v3' was found"):
        load_policy("somebody/tiny", revision="v3")
    with pytest.raises(UsageError, match=r"model.revision = 'v2': .* is a folder"):
        load_policy(hub / "snapshots" / ("a" * 40), revision="v2")


def test_the_revision_of_a_recipe_is_that_of_its_own_model(hub: Path) -> None:
    config = load("word-problems", ["model.path=somebody/tiny", "model.revision=v2"])
    own = load_to_answer(config, "somebody/tiny")
    assert base_fingerprint(own.model) == f"commit:{'b' * 40}"
    load_to_answer(config, hub / "snapshots" / ("a" * 40))


def test_a_long_rope_model_is_used_within_its_original_context() -> None:
    policy = tiny()
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    for name in ("rope_parameters", "rope_scaling"):
        config = policy.model.config
        before = getattr(config, name, None)
        setattr(config, name, rope)
        with pytest.warns(UserWarning, match=r"\(longrope\) .* limited to 128 tokens"):
            assert make_policy(policy.model, policy.tokenizer).context == 128
        setattr(config, name, before)
    assert make_policy(policy.model, policy.tokenizer).context == policy.context > 128


def test_tokenizer_and_weights_are_of_the_commit_that_is_recorded(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody uploads another model, and another program downloads it, while this one is read."""
    tokenizer = ModelSource.tokenizer

    def moved(self: ModelSource, **given: bool) -> Any:
        made = tokenizer(self, **given)
        (hub / "refs" / "main").write_text("b" * 40)
        return made

    monkeypatch.setattr(ModelSource, "tokenizer", moved)
    policy = load_policy("somebody/tiny")
    assert base_fingerprint(policy.model) == f"commit:{'a' * 40}"
    first = tiny(seed=0).model.state_dict()
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, first[name]), name

"""Averaged models: the weighted mean of every parameter, and only of models that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from groupwise.errors import UsageError
from groupwise.models import load_policy, save_policy
from groupwise.training.stages.average import average
from tiny_models import tiny_model, tiny_policy


def saved(folder: Path, seed: int) -> str:
    policy = tiny_policy(tiny_model("llama"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_policy(policy, folder)
    return str(folder)


def parameters(path: str) -> dict[str, torch.Tensor]:
    return dict(load_policy(path).model.named_parameters())


def test_every_parameter_is_the_weighted_mean(tmp_path: Path) -> None:
    models = [saved(tmp_path / str(seed), seed) for seed in (1, 2, 3)]
    average(models, tmp_path / "out", weights=[1, 1, 2])
    one, two, three = map(parameters, models)
    for name, value in parameters(str(tmp_path / "out")).items():
        wanted = 0.25 * one[name] + 0.25 * two[name] + 0.5 * three[name]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)


def test_the_mean_of_a_model_with_itself_is_the_model(tmp_path: Path) -> None:
    model = saved(tmp_path / "a", 1)
    average([model, model], tmp_path / "out")
    own = parameters(model)
    assert all(torch.equal(own[k], v) for k, v in parameters(str(tmp_path / "out")).items())


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0], "give one for each of"), ([0.0, 0.0], "not all 0"), ([1.0, -1.0], "at least 0")],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, weights, message) -> None:
    models = [saved(tmp_path / str(seed), seed) for seed in (1, 2)]
    with pytest.raises(UsageError, match=message):
        average(models, tmp_path / "out", weights=weights)
    assert not (tmp_path / "out").exists()


def test_models_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its parameter .* only models of one architecture"):
        average([saved(tmp_path / "a", 1), "bundled"], tmp_path / "out")
    with pytest.raises(UsageError, match="at least two"):
        average([saved(tmp_path / "b", 1)], tmp_path / "out")


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    model = saved(tmp_path / "a", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is in use"):
        average([model, model], tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"

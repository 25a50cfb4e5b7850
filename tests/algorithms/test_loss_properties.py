"""Properties of every registered part of a loss and of every row of the table, by enumeration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise import (
    ALGORITHMS,
    CORRECTIONS,
    DIVERGENCES,
    RATIOS,
    SURROGATES,
    WEIGHTINGS,
)
from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.algorithms.properties import broken
from groupwise.registry import Registry, spec
from groupwise.types import Batch, Outputs

B, T = 4, 5
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
GROUP = torch.tensor([0, 0, 1, 1])
POISON = [float("inf"), -float("inf"), float("nan")]
REQUIRED = {"constant_length": {"length": 7}}
EVERY = [
    (kind, name)
    for kind, registry in (
        ("ratio", RATIOS),
        ("surrogate", SURROGATES),
        ("divergence", DIVERGENCES),
        ("correction", CORRECTIONS),
    )
    for name in registry
]
REGISTRY: dict[str, Registry] = {
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "divergence": DIVERGENCES,
    "correction": CORRECTIONS,
}


def made(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities that moved by about ±.3, advantages constant in a row."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logp = -2 * rand(B, T) - 0.1
    others = ("old_logp", "ref_logp", "sampler_logp")
    near = {key: logp + 0.6 * (rand(B, T) - 0.5) for key in others}
    advantage = (rand(B, 1) - 0.5).expand(B, T).clone()
    return {
        "logp": logp,
        **near,
        "log_ratio": torch.where(MASK, logp - near["old_logp"], 0),
        "advantage": advantage,
        "mask": MASK,
    }


def value_and_slope(
    function: Any, data: dict[str, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The token values, and the gradient of Σ weight · value by every input that has one."""
    inputs = {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in data.items()}
    values = function(inputs)
    if not values.requires_grad:
        return values.detach(), torch.zeros(1)
    leaves = [v for v in inputs.values() if v.requires_grad]
    slopes = torch.autograd.grad((weight * values).sum(), leaves, allow_unused=True)
    found = [s for s in slopes if s is not None]
    return values.detach(), torch.stack(found)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_shape_and_finite(kind: str, name: str) -> None:
    data = made()
    values, slopes = value_and_slope(REGISTRY[kind].bind(spec(name)), data, torch.ones(B, T))
    assert values.shape == (B, T)
    assert torch.isfinite(values).all()
    assert torch.isfinite(slopes).all()
    outside = 1.0 if kind == "correction" else 0.0
    assert (values[~MASK] == outside).all() or (kind, name) == ("divergence", "none")


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_what_the_mask_hides_reaches_nothing(kind: str, name: str, poison: float) -> None:
    if name == "none":
        pytest.skip("depends on no value")
    function, data = REGISTRY[kind].bind(spec(name)), made(1)
    weight = MASK.double()
    clean, slopes = value_and_slope(function, data, weight)
    for hidden in ({"logp"}, data.keys() - {"mask"}):
        dirty = {k: torch.where(MASK, v, poison) if k in hidden else v for k, v in data.items()}
        got, got_slopes = value_and_slope(function, dirty, weight)
        torch.testing.assert_close(got[MASK], clean[MASK], rtol=0, atol=0)
        torch.testing.assert_close(got_slopes, slopes, rtol=0, atol=0)
        assert torch.isfinite(got_slopes).all()


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_huge_log_ratios_stay_finite(kind: str, name: str) -> None:
    for size in (1e3, -1e3):
        data = made(2)
        data["log_ratio"] = torch.where(MASK, size, 0.0).double()
        for key in ("old_logp", "ref_logp", "sampler_logp"):
            data[key] = data["logp"] - size
        values, slopes = value_and_slope(REGISTRY[kind].bind(spec(name)), data, torch.ones(B, T))
        assert torch.isfinite(values).all()
        assert torch.isfinite(slopes).all()


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_rows_do_not_see_each_other(kind: str, name: str) -> None:
    data, other = made(3), made(4)
    function = REGISTRY[kind].bind(spec(name))
    mixed = {k: v if k == "mask" else torch.cat([v[:2], other[k][2:]]) for k, v in data.items()}
    torch.testing.assert_close(function(mixed)[:2], function(data)[:2], rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_padding_does_not_matter(kind: str, name: str) -> None:
    data = made(5)
    function = REGISTRY[kind].bind(spec(name))

    def padded(values: Tensor) -> Tensor:
        extra = torch.zeros(B, 3, dtype=values.dtype)
        return torch.cat([values, extra if values.dtype == torch.bool else extra + 9], -1)

    wide = function({k: padded(v) for k, v in data.items()})
    torch.testing.assert_close(wide[:, :T][MASK], function(data)[MASK], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_corrections_are_constants_and_one_without_a_gap(name: str) -> None:
    data = made(6)
    data["old_logp"].requires_grad_()
    got = CORRECTIONS.bind(spec(name))(data)
    assert not got.requires_grad or name == "none"
    same = CORRECTIONS.bind(spec(name))({**data, "sampler_logp": data["old_logp"]})
    assert (same == 1).all()


@pytest.mark.parametrize("name", list(WEIGHTINGS))
def test_weights_sum_what_they_say(name: str) -> None:
    weight = WEIGHTINGS.bind(spec(name, **REQUIRED.get(name, {})))({"mask": MASK, "group": GROUP})
    assert weight.shape == MASK.shape
    assert (weight[MASK] > 0).all()
    assert (weight[~MASK] == 0).all()
    means = {"sequence_mean", "group_token_mean", "batch_token_mean"}
    assert (abs(weight.sum().item() - 1) < 1e-6) is (name in means)


@pytest.mark.parametrize("name", list(WEIGHTINGS))
def test_weights_are_constant_in_a_row_and_follow_it(name: str) -> None:
    function = WEIGHTINGS.bind(spec(name, **REQUIRED.get(name, {})))
    weight = function({"mask": MASK, "group": GROUP})
    for row, mask in zip(weight, MASK, strict=True):
        assert len(row[mask].unique()) <= 1
    order = torch.tensor([2, 0, 3, 1])
    moved = function({"mask": MASK[order], "group": GROUP[order]})
    torch.testing.assert_close(moved, weight[order], rtol=0, atol=0)


def batch_of(algorithm: BoundAlgorithm, data: dict[str, Tensor], **changes: Any) -> Batch:
    return Batch(
        prompts=(torch.tensor([1]), torch.tensor([2])),
        group=GROUP,
        tokens=torch.zeros(B, T, dtype=torch.long),
        length=torch.tensor([5, 3, 5, 5]),
        mask=MASK,
        advantage=data["advantage"],
        weight=algorithm.weighting(MASK, GROUP),
        **{
            "ref_logp": data["ref_logp"],
            "sampler_logp": data["sampler_logp"],
            **changes,
        },
    )


PLAIN = {"divergence": {"name": "none"}, "correction": {"name": "none"}}


def row_slope(
    algorithm: BoundAlgorithm, data: dict[str, Tensor], **changes: Any
) -> tuple[Tensor, Batch]:
    """The gradient of a step's loss by logp."""
    logp = data["logp"].clone().requires_grad_()
    batch = batch_of(algorithm, data, **changes)
    loss = (batch.weight * algorithm.objective(Outputs(logp=logp), batch)).sum()
    return torch.autograd.grad(loss, logp)[0], batch


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("name", list(SURROGATES))
def test_on_policy_gradient_is_minus_weight_times_advantage(name: str, ratio: str) -> None:
    for weighting in ("sequence_mean", "batch_token_mean", "sequence_sum"):
        changes = {
            **PLAIN,
            "surrogate": {"name": name},
            "ratio": {"name": ratio},
            "weighting": {"name": weighting},
        }
        algorithm, data = bind("grpo", changes), made(7)
        for old in (None, data["logp"]):
            slope, batch = row_slope(algorithm, data, old_logp=old)
            wanted = torch.where(MASK, -batch.weight * batch.advantage, 0)
            holds = torch.allclose(slope, wanted, rtol=0, atol=1e-9)
            assert holds is ("on_policy_gradient" not in broken(SURROGATES.get(name)))


def test_on_policy_gradient_of_token_advantages() -> None:
    for name in ("ppo_clip", "reinforce", "cispo", "sapo", "dppo", "importance", "dual_clip"):
        algorithm, data = bind("grpo", {**PLAIN, "surrogate": {"name": name}}), made(8)
        data["advantage"] = torch.rand(B, T, dtype=torch.float64) - 0.5
        slope, batch = row_slope(algorithm, data)
        wanted = torch.where(MASK, -batch.weight * batch.advantage, 0)
        torch.testing.assert_close(slope, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_zero_advantage_means_zero_gradient(name: str) -> None:
    algorithm, data = bind("grpo", {**PLAIN, "surrogate": {"name": name}}), made(9)
    data["advantage"][1] = 0
    slope, _ = row_slope(algorithm, data, old_logp=data["old_logp"])
    still = bool((slope[1] == 0).all())
    assert still is ("zero_at_zero_advantage" not in broken(SURROGATES.get(name)))
    assert still is algorithm.skips_zero_advantage


@pytest.mark.parametrize("name", list(SURROGATES))
def test_objective_ignores_what_the_mask_hides(name: str) -> None:
    changes = {
        "surrogate": {"name": name},
        "correction": {"name": "tis"},
        "divergence": {"name": "k3_weighted", "coefficient": 0.1},
    }
    algorithm, data = bind("grpo", changes), made(10)
    clean, _ = row_slope(algorithm, data, old_logp=data["old_logp"])
    for poison in POISON:
        dirty = {
            k: torch.where(MASK, v, poison) if v.is_floating_point() else v for k, v in data.items()
        }
        slope, _ = row_slope(algorithm, dirty, old_logp=dirty["old_logp"])
        torch.testing.assert_close(slope, clean, rtol=0, atol=0)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_any_split_of_a_batch_gives_the_same_gradient(name: str) -> None:
    algorithm, data = bind(name), made(11)
    whole, batch = row_slope(algorithm, data, old_logp=data["old_logp"])
    logp = data["logp"].clone().requires_grad_()
    for rows in ([2], [0, 3], [1]):
        index = torch.tensor(rows)
        part_of = batch.rows(index)
        time = part_of.mask.shape[-1]
        loss = algorithm.objective(Outputs(logp=logp[index, :time]), part_of)
        (part_of.weight * loss).sum().backward()
    torch.testing.assert_close(logp.grad, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_row_says_what_it_needs(name: str) -> None:
    algorithm, data = bind(name), made(12)
    lacking = {
        "ref_logp": data["ref_logp"] if "ref_logp" in algorithm.objective.needs else None,
        "sampler_logp": data["sampler_logp"] if "sampler_logp" in algorithm.needs else None,
    }
    slope, _ = row_slope(algorithm, data, old_logp=data["old_logp"], **lacking)
    assert torch.isfinite(slope).all()
    assert slope.abs().sum() > 0
    if "ref_logp" in algorithm.objective.needs:
        with pytest.raises(ValueError, match="ref_logp"):
            row_slope(algorithm, data, **{**lacking, "ref_logp": None})


def test_needs_follow_from_the_parts() -> None:
    plain = bind("dapo")
    assert "ref_logp" not in plain.needs
    assert "sampler_logp" not in plain.needs
    assert "entropy" not in plain.needs
    assert plain.skips_zero_advantage
    kl = bind("dapo", {"divergence": {"name": "k2", "coefficient": 0.1}})
    assert "ref_logp" in kl.needs
    assert not kl.skips_zero_advantage
    bonus = bind("dapo", {"entropy": {"coefficient": 0.1}})
    assert "entropy" in bonus.needs
    assert not bonus.skips_zero_advantage
    assert "sampler_logp" in bind("dapo", {"correction": {"name": "tis"}}).needs
    assert not bind("kimi").skips_zero_advantage
    reward = bind("reinforce++")
    assert "ref_logp" in reward.needs
    assert "ref_logp" not in reward.objective.needs
    assert reward.kl_in_reward == 0.01
    assert reward.skips_zero_advantage

"""Agreement with numbers that another project's functions gave, executed in float64.

The cases are read from `data/cases/rl_numeric.jsonl` beside the repository (or under
GROUPWISE_DATA) and are not part of it. Every case is either reproduced within 1e-6 or named in
DIFFERS with the reason; a case in neither fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise import ADVANTAGES
from groupwise.algorithms import bind
from groupwise.registry import FunctionSpec, spec
from groupwise.types import Batch, Outputs

DATA = Path(os.environ.get("GROUPWISE_DATA", Path(__file__).parents[2] / "../shared/data"))
FILE = DATA / "cases" / "rl_numeric.jsonl"
TOLERANCE = 1e-6

DIFFERS: dict[tuple[str, str], str] = {
    ("advantage", "remax"): "needs the reward of a greedy answer, which no algorithm here samples",
    ("advantage", "gae"): "needs a critic; this table is critic-free",
    ("value_loss", "clipped"): "needs a critic; this table is critic-free",
    ("entropy", "from_logits"): "the entropy comes from the learner, which owns the logits",
    ("kl", "abs"): "|x| estimates no divergence; not offered",
    ("kl", "k3+"): "value of k3 with the gradient of k2; use k2, whose value is only a metric",
}
"""Functions of the other project that have no counterpart here."""

ALONE = {"centered", "leave_one_out", "length_weighted", "signal_scaled"}
"""Advantages that give a group of one 0, as it has no baseline; there it gets its raw reward."""

ALONE_IN_BATCH = (
    "the raw reward of a group of one enters the batch statistics there, so every row differs"
)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Groups:
    """Ragged groups of a case as [prompt, group] tensors with a mask of what is there."""

    def __init__(self, index: list[int], count: int) -> None:
        names = sorted(set(index))
        rows = [[i for i, name in enumerate(index) if name == one] for one in names]
        width = max(2, *(len(row) for row in rows))
        self.valid = torch.tensor([[j < len(row) for j in range(width)] for row in rows])
        self.place = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        self.count = count
        self.alone = [row[0] for row in rows if len(row) == 1]

    def gather(self, rows: Tensor) -> Tensor:
        return rows[self.place]

    def scatter(self, values: Tensor) -> Tensor:
        out = torch.zeros(self.count, *values.shape[2:], dtype=values.dtype)
        out[self.place[self.valid]] = values[self.valid]
        return out


def advantage(case: dict[str, Any]) -> None:
    inputs, params = case["inputs"], case["params"]
    mask = tensor(inputs["response_mask"]) > 0
    scores = tensor(inputs["token_level_rewards"]).sum(-1)
    groups = Groups(inputs.get("index", [0] * len(scores)), len(scores))
    data = {
        "rewards": groups.gather(scores),
        "valid": groups.valid,
        "lengths": groups.gather(mask.sum(-1)),
        "mask": groups.gather(mask),
    }
    expected = case["outputs"]
    expected = tensor(expected["advantages"] if isinstance(expected, dict) else expected)
    chosen = ADVANTAGE_CASES[case["fn"]](params)
    found = groups.scatter(ADVANTAGES.bind(chosen)(data))
    found = found if found.ndim == 2 else found[:, None] * mask
    alone = torch.zeros(len(scores), dtype=torch.bool)
    if chosen.name in ALONE:
        alone[groups.alone] = True
    torch.testing.assert_close(found[~alone], expected[~alone], rtol=0, atol=TOLERANCE)
    assert (found[alone] == 0).all()


ADVANTAGE_CASES: dict[str, Callable[[dict], FunctionSpec]] = {
    "grpo": lambda p: (
        spec("zscore", ddof=1, eps=1e-6, raw_singletons=True)
        if p["norm_adv_by_std_in_grpo"]
        else spec("centered")
    ),
    "rloo": lambda p: spec("leave_one_out"),
    "opo": lambda p: spec("length_weighted"),
    "reinforce_plus_plus_baseline": lambda p: spec("centered_whitened"),
    "reinforce_plus_plus": lambda p: spec("discounted_whitened", gamma=p["gamma"]),
    "gpg": lambda p: spec("signal_scaled", counting="rewards"),
    "grpo_passk": lambda p: spec("leader_minus_second", divide_by_std=p["norm"]),
}


def divergence(case: dict[str, Any]) -> None:
    logp = tensor(case["inputs"]["logprob"]).requires_grad_()
    mask = tensor(case["inputs"]["mask"]) > 0
    data = {"logp": logp, "ref_logp": tensor(case["inputs"]["ref_logprob"]), "mask": mask}
    overrides = {"divergence": {"name": case["fn"], "coefficient": 1.0}}
    if case["fn"] == "k1":
        overrides["divergence"]["in"] = "reward"
    found = bind("grpo", overrides).objective.divergence(data)
    wanted = tensor(case["outputs"]["kl"])
    torch.testing.assert_close(found[mask], wanted[mask], rtol=0, atol=TOLERANCE)
    slope = torch.autograd.grad(found.sum(), logp)[0]
    wanted = tensor(case["outputs"]["grad_of_masked_sum"])
    torch.testing.assert_close(slope[mask], wanted[mask], rtol=0, atol=TOLERANCE)


WEIGHTING_CASES = {
    "token-mean": lambda width: {"name": "batch_token_mean"},
    "token-sum": lambda width: {"name": "token_sum"},
    "seq-mean-token-sum": lambda width: {"name": "sequence_sum"},
    "seq-mean-token-mean": lambda width: {"name": "sequence_mean"},
    # there the constant is the padded width of the batch
    "seq-mean-token-sum-norm": lambda width: {"name": "constant_length", "length": width},
}


def weighting(case: dict[str, Any]) -> None:
    values, mask = tensor(case["inputs"]["loss_mat"]), tensor(case["inputs"]["mask"]) > 0
    algorithm = bind("grpo", {"weighting": WEIGHTING_CASES[case["fn"]](mask.shape[-1])})
    weight = algorithm.weighting(mask, torch.zeros(len(mask), dtype=torch.long))
    scale = max(1.0, abs(case["outputs"]))
    found = (weight.double() * torch.where(mask, values, 0)).sum().item()
    assert abs(found - case["outputs"]) < TOLERANCE * scale


def _band(params: dict) -> dict:
    width = params["clip_ratio"]
    low, high = params.get("clip_ratio_low", width), params.get("clip_ratio_high", width)
    return {"low": low, "high": high}


def _cispo(params: dict) -> dict:
    band = _band(params)
    return {"name": "cispo", "floor": max(0.0, 1 - band["low"]), "cap": 1 + band["high"]}


SURROGATE_CASES: dict[str, Callable[[dict], dict[str, dict]]] = {
    "vanilla": lambda p: {
        "surrogate": {"name": "dual_clip", **_band(p), "bound": p["clip_ratio_c"]}
    },
    "gspo": lambda p: {
        "surrogate": {"name": "ppo_clip", **_band(p)},
        "ratio": {"name": "sequence"},
    },
    "geo_mean": lambda p: {"surrogate": {"name": "gmpo", **_band(p)}},
    "cispo": lambda p: {"surrogate": _cispo(p)},
    "sapo": lambda p: {"surrogate": {"name": "sapo"}},
    "gpg": lambda p: {"surrogate": {"name": "reinforce"}},
    "dppo_tv": lambda p: {"surrogate": {"name": "dppo", **_band(p), "cap": 20.0}},
}
IGNORE_THE_MODE = {"gspo", "sapo", "geo_mean"}
"""These average answers there, whatever aggregation is asked for."""


def policy_loss(case: dict[str, Any]) -> None:
    inputs, params = case["inputs"], case["params"]
    mask = tensor(inputs["response_mask"]) > 0
    mode = "seq-mean-token-mean" if case["fn"] in IGNORE_THE_MODE else params["loss_agg_mode"]
    overrides = {
        "divergence": {"name": "none"},
        "weighting": WEIGHTING_CASES[mode](mask.shape[-1]),
        **SURROGATE_CASES[case["fn"]](params),
    }
    algorithm = bind("grpo", overrides)
    group = torch.zeros(len(mask), dtype=torch.long)
    logp = tensor(inputs["log_prob"]).requires_grad_()
    batch = Batch(
        prompts=(torch.tensor([1]),),
        group=group,
        tokens=torch.zeros_like(mask, dtype=torch.long),
        length=mask.sum(-1),
        mask=mask,
        advantage=tensor(inputs["advantages"]),
        weight=algorithm.weighting(mask, group),
        old_logp=tensor(inputs["old_log_prob"]),
    )
    loss = (batch.weight * algorithm.objective(Outputs(logp=logp), batch)).sum()
    assert abs(loss.item() - case["outputs"]["loss"]) < TOLERANCE * max(1, abs(loss.item()))
    slope = torch.autograd.grad(loss, logp)[0]
    wanted = tensor(case["outputs"]["grad_log_prob"])
    torch.testing.assert_close(slope, wanted, rtol=0, atol=TOLERANCE)


CHECKS = {
    "advantage": (advantage, ADVANTAGE_CASES),
    "kl": (divergence, {"k1", "k2", "k3"}),
    "agg_loss": (weighting, WEIGHTING_CASES),
    "policy_loss": (policy_loss, SURROGATE_CASES),
}


def cases() -> list[dict[str, Any]]:
    if not FILE.exists():
        return []
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def why_not(case: dict[str, Any]) -> str | None:
    """Why a case is not reproduced; None where it is."""
    index = case["inputs"].get("index", [])
    if case["fn"] == "reinforce_plus_plus_baseline" and any(index.count(i) == 1 for i in index):
        return ALONE_IN_BATCH
    return DIFFERS.get((case["kind"], case["fn"]))


@pytest.mark.skipif(not FILE.exists(), reason=f"no external cases at {FILE}")
def test_there_are_cases_of_every_kind() -> None:
    found = {(case["kind"], case["fn"]) for case in cases()}
    compared = {(kind, name) for kind, (_, names) in CHECKS.items() for name in names}
    assert found == compared | set(DIFFERS)
    assert compared.isdisjoint(DIFFERS)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_agrees_with_the_other_project(case: dict[str, Any]) -> None:
    reason = why_not(case)
    if reason is not None:
        pytest.skip(reason)
    check, _ = CHECKS[case["kind"]]
    check(case)

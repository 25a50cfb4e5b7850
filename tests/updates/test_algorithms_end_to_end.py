"""Every row of the table, from rollouts to the gradient: how the work is cut changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from groupwise.algorithms import ALGORITHMS, BoundAlgorithm, bind
from groupwise.algorithms.losses import FunctionObjective
from groupwise.algorithms.properties import broken
from groupwise.rollouts import GroupEngine
from groupwise.types import (
    Batch,
    Objective,
    Prompt,
    Request,
    Sampling,
    ScoredGroups,
    Scores,
    Status,
)
from groupwise.updates import OptimizerSettings, TorchLearner, assemble, sequences
from tiny_models import VOCAB, tiny_model, tiny_policy

STILL = OptimizerSettings(learning_rate=0.0, max_grad_norm=None)
ENDS = (1, 7, 8, 9, 10, 11)
NAN = float("nan")
REWARDS = torch.tensor(
    [
        [1.0, 0.0, 0.0, 1.0, 0.0, 0.5],
        [1.0, 0.0, NAN, 0.0, NAN, 0.0],  # two that could not be judged
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],  # nothing to tell apart
        [NAN] * 6,  # a group that is out altogether
        [0.0, 1.0, 1.0, 1.0, 0.0, 1.0],
    ]
)

Given = tuple[ScoredGroups, Batch]


@pytest.fixture(scope="module")
def given() -> Given:
    """Rollouts of ragged lengths from prompts of 1 to 14 tokens, with rewards as above."""
    policy = tiny_policy(tiny_model("qwen2", dtype=torch.float64), ends=ENDS)
    generator = torch.Generator().manual_seed(3)
    requests = [
        Request(
            prompt=Prompt(id=str(place), text=""),
            tokens=torch.randint(12, VOCAB, (length,), generator=generator).tolist(),
            group=6,
        )
        for place, length in enumerate((1, 9, 4, 14, 2))
    ]
    made = {g.prompt.id: g for g in GroupEngine(policy).generate(requests, Sampling(max_tokens=12))}
    valid = ~torch.isnan(REWARDS)
    scores = Scores(
        total=REWARDS,
        correct=torch.where(valid, (REWARDS > 0.7).float(), NAN),
        parts={"one": REWARDS, "two": torch.where(valid, (REWARDS > 0.2).float(), NAN)},
        status=tuple(tuple(Status.OK if v else Status.ERROR for v in row) for row in valid),
        valid=valid,
    )
    groups = tuple(made[str(place)] for place in range(5))
    # A judged completion that a filter leaves out of the loss.
    keep = valid.clone()
    keep[4, 2] = False
    scored = ScoredGroups(groups=groups, scores=scores, keep=keep, drawn=5)
    return scored, sequences(scored)


def learner(*, tokens: int = 10**6, skip: bool = True) -> TorchLearner:
    model = tiny_model("qwen2", dtype=torch.float64)
    return TorchLearner(
        tiny_policy(model), optimizer=STILL, tokens_per_microbatch=tokens, skip_inert_rows=skip
    )


def ready(given: Given, algorithm: BoundAlgorithm, *, drift: float, apart: float) -> Batch:
    """The batch of one optimizer step; `drift` and `apart` say how far the policy has moved since
    sampling, and how far the reference is from it."""
    scored, batch = given
    here = learner().evaluate(batch, {"logp"})["logp"]
    noise = torch.Generator().manual_seed(7)

    def moved(scale: float) -> Tensor:
        step = scale * torch.randn(here.shape, generator=noise, dtype=here.dtype)
        return torch.where(batch.mask, here + step, 0)

    # What lies outside the mask must not matter, whatever it is.
    old = torch.where(batch.mask, moved(drift), torch.inf) if drift else None
    batch = replace(batch, old_logp=old, ref_logp=moved(apart))
    shape = scored.scores.total.shape
    kl = torch.where(batch.mask, here - moved(apart), 0).unflatten(0, shape)
    advantage = algorithm.advantage(
        {
            "rewards": scored.scores.total,
            "valid": scored.scores.valid,
            "correct": scored.scores.correct,
            "parts": scored.scores.parts,
            "lengths": batch.length.view(shape),
            "mask": batch.mask.unflatten(0, shape),
            "kl": kl,
            "values": torch.rand(kl.shape, generator=noise),
            "teacher_gap": torch.randn(kl.shape, generator=noise),
            "step_rewards": torch.rand(kl.shape, generator=noise),
            "token_scores": torch.randn(kl.shape, generator=noise),
        }
    )
    return assemble(batch, advantage, algorithm.weighting)[0]


def gradient(taught: TorchLearner, batch: Batch, objective: Objective) -> Tensor:
    taught.model.zero_grad()
    taught.optimizer.step = lambda: (0.0, 0.0)  # type: ignore[method-assign]
    taught.update(batch, objective)
    grads = [p.grad for p in taught.model.parameters()]
    sizes = [p.numel() for p in taught.model.parameters()]
    return torch.cat(
        [torch.zeros(n) if g is None else g.flatten() for g, n in zip(grads, sizes, strict=True)]
    )


def assert_same(found: Tensor, wanted: Tensor) -> None:
    # transformers computes norms and rotary angles in float32 even for a float64 model.
    torch.testing.assert_close(found, wanted, atol=3e-6 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_neither_microbatches_nor_skipped_rows_change_the_gradient(given: Given, name: str) -> None:
    algorithm = bind(name)
    batch = ready(given, algorithm, drift=0.3, apart=0.2)
    wanted = gradient(learner(skip=False), batch, algorithm.objective)
    assert float(wanted.abs().max()) > 0
    for tokens, skip in ((10**6, True), (32, True), (32, False)):
        assert_same(gradient(learner(tokens=tokens, skip=skip), batch, algorithm.objective), wanted)


IMITATION = FunctionObjective(loss=lambda outputs, batch: -batch.advantage * outputs["logp"])
"""−A · log π: what every surrogate is on-policy."""


OBEDIENT = [
    name
    for name in ALGORITHMS.names()
    if "on_policy_gradient" not in broken(bind(name).objective.surrogate.function)
]


@pytest.mark.parametrize("name", OBEDIENT)
def test_on_policy_the_gradient_is_that_of_weighted_imitation(given: Given, name: str) -> None:
    algorithm = bind(name)
    batch = ready(given, algorithm, drift=0.0, apart=0.0)
    assert batch.old_logp is None
    wanted = gradient(learner(skip=False), batch, IMITATION)
    assert_same(gradient(learner(), batch, algorithm.objective), wanted)

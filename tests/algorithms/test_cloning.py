"""OREAL's rows: their loss is the paper's, token for token, on batches of uneven answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.algorithms import bind
from groupwise.registry import spec
from groupwise.types import Batch, Outputs
from groupwise.updates import assemble

P, G, T = 3, 4, 5
RIGHT = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0], [1.0, 1, 1, 1]], dtype=torch.float64)


def batch_and_logp() -> tuple[Batch, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(1, T + 1, (P * G,), generator=generator)
    logp = -torch.rand(P * G, T, generator=generator, dtype=torch.float64)
    reference = -torch.rand(P * G, T, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(P * G, T)
    batch = Batch(
        prompts=(torch.tensor([1]),) * P,
        group=torch.arange(P).repeat_interleave(G),
        tokens=zeros.long(),
        length=length,
        mask=torch.arange(T) < length[:, None],
        advantage=zeros,
        weight=zeros,
        sampler_logp=zeros,
        ref_logp=reference,
    )
    return batch, logp.requires_grad_(), reference


def of_paper(
    logp: torch.Tensor,
    reference: torch.Tensor,
    batch: Batch,
    *,
    right: torch.Tensor,
    code: bool,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """The loss by loops: positives over their tokens, negatives over theirs, k3 over all."""
    positive = negative = k3 = torch.zeros((), dtype=torch.float64)
    tokens = {True: 0, False: 0}
    for row, outcome in enumerate(right.flatten().tolist()):
        group = right[row // G] * 2 - 1
        sign = 2 * outcome - 1
        score = (sign - group.mean()) / group.std(correction=0)
        if code:
            score = sign - (group.sum() - sign) / (G - 1)
        if group.std() == 0:
            score = torch.zeros(()).double()
            if not code:  # a group without signal is replaced by another one
                continue
        n = int(batch.length[row])
        own, gap = logp[row, :n], reference[row, :n] - logp[row, :n]
        k3 = k3 + (gap.exp() - gap - 1).sum()
        tokens[outcome > 0] += n
        omega = torch.ones(n, dtype=torch.float64)
        if scores is not None:
            for t in range(n):
                chance = torch.sigmoid(scores[row, : t + 1].mean())
                omega[t] = max(0.0, float(2 * chance - 1 if outcome else 1 - 2 * chance))
        if outcome:
            positive = positive - (score if code else 1.0) * (omega * own).sum()
        else:
            ratio = (own - own.detach()).exp()
            negative = negative - (score * omega * ratio).sum()
    whole = sum(tokens.values())
    return positive / tokens[True] + 0.5 * negative / tokens[False] + 0.01 * k3 / whole


@pytest.mark.parametrize("name", ["oreal", "oreal@internlm", "oreal_token"])
def test_the_gradient_is_that_of_the_papers_loss(name: str) -> None:
    algorithm = bind(name)
    batch, logp, reference = batch_and_logp()
    data = {"rewards": RIGHT, "correct": RIGHT, "valid": RIGHT >= 0}
    keep = algorithm.filter({**data, "truncated": RIGHT < 0})
    mask = (batch.mask & keep.flatten()[:, None]).view(P, G, T)
    scores = None
    if algorithm.second_learner == "token_reward":
        scores = torch.randn(P * G, T, generator=torch.Generator().manual_seed(1)).double()
        data["token_scores"] = scores.view(P, G, T)
    (step,) = assemble(
        batch, algorithm.advantage({**data, "mask": mask}), algorithm.weighting, keep=keep
    )
    step = replace(step, ref_logp=reference)
    losses = algorithm.objective(Outputs(logp=logp), step)
    (got,) = torch.autograd.grad((losses * step.weight).sum(), logp)
    code = name == "oreal@internlm"
    expected = of_paper(logp, reference, batch, right=RIGHT, code=code, scores=scores)
    (wanted,) = torch.autograd.grad(expected, logp)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


def test_sure_scores_give_the_advantages_of_whole_answers_and_scores_of_0_give_none() -> None:
    batch, _, _ = batch_and_logp()
    data = {"rewards": RIGHT, "mask": batch.mask.view(P, G, T)}
    sure = (200 * RIGHT - 100)[..., None].expand(P, G, T)
    token = ADVANTAGES.bind(spec("token_cloning"))
    whole = ADVANTAGES.bind(spec("cloning"))(data)[..., None] * data["mask"]
    torch.testing.assert_close(token({**data, "token_scores": sure}), whole, rtol=0, atol=1e-12)
    assert (token({**data, "token_scores": torch.zeros_like(sure)}) == 0).all()
    assert (token({**data, "token_scores": -sure}) == 0).all(), "sure of the other outcome"

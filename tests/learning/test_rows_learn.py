"""Every row of the table teaches a small policy, through the calls that a trainer makes.

The policy is a table of logits: 4 prompts, answers of up to 3 tokens out of 4 symbols, of which the
last ends the answer. An answer is right if its first symbol is the prompt's. The success
probability is exact: it starts at 1/4, and a row has learnt when it exceeds 0.9.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise import ALGORITHMS
from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.types import Batch, Outputs

P, G, T, V = 4, 8, 3, 4
TARGET = torch.tensor([0, 1, 2, 3])
STEPS = 50
LEARNT, MOSTLY, UNLEARNT = 0.9, 0.7, 0.6

DOES_NOT_LEARN = {
    "softrank@kaist": "one advantage for the whole group: nothing tells good from bad answers",
}
BEST_OF_K = {
    "pkpo": "raises pass@4, whose gradient is all but gone at p = .8",
    "pass_at_k_training": "raises pass@4 likewise",
    "softbok_loo": "raises the soft best of 8 likewise",
}


def success(logits: Tensor) -> float:
    """The probability of a right answer, averaged over the prompts."""
    first = torch.softmax(logits[:, 0], -1)
    return first[torch.arange(P), TARGET].mean().item()


def sample(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [P, G, T] and the mask of those up to the first end symbol."""
    chances = torch.softmax(logits.detach(), -1)
    drawn = [
        torch.multinomial(chances[:, t], G, replacement=True, generator=generator) for t in range(T)
    ]
    tokens = torch.stack(drawn, dim=-1)
    ended = (tokens == V - 1).cumsum(-1) - (tokens == V - 1).long()
    return tokens, ended == 0


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    table = torch.log_softmax(logits, -1)[:, None].expand(P, G, T, V)
    return table.gather(-1, tokens[..., None]).squeeze(-1).flatten(0, 1)


def teacher_gap(tokens: Tensor, old: Tensor) -> Tensor:
    """log π_T − log π for a teacher that begins with the right token, nearly always."""
    logits = torch.zeros(P, T, V, dtype=torch.float64)
    logits[torch.arange(P), 0, TARGET] = 6.0
    return (logprobs(logits, tokens) - old).view(P, G, T)


def evidence(tokens: Tensor, mask: Tensor, kl: Tensor, old: Tensor) -> dict[str, Any]:
    rewards = (tokens[..., 0] == TARGET[:, None]).double()
    # A critic that knows the reward once it has read the first token.
    values = rewards[..., None].repeat(1, 1, T)
    values[..., 0] = rewards.mean(-1, keepdim=True)
    first = torch.arange(T) == 0
    last = torch.arange(T) == mask.sum(-1, keepdim=True) - 1
    return {
        "rewards": rewards,
        "valid": torch.ones_like(rewards, dtype=torch.bool),
        "correct": rewards,
        "lengths": mask.sum(-1),
        "parts": {"accuracy": rewards, "half": 0.5 * rewards},
        "mask": mask,
        "kl": kl.view(P, G, T),
        "truncated": ~mask.any(-1),
        "values": values,
        "teacher_gap": teacher_gap(tokens, old),
        # The first token is a step, and the rest of the answer is another.
        "step_rewards": rewards[..., None] * mask.double().where(first | last, torch.nan),
        # A token reward model that knows the outcome from the start.
        "token_scores": (6 * rewards - 3)[..., None].expand(P, G, T),
    }


def step(
    algorithm: BoundAlgorithm, logits: Tensor, start: Tensor, generator: torch.Generator
) -> Batch | None:
    """The batch of one step; None where the filter keeps nothing."""
    tokens, mask = sample(logits, generator)
    old, ref = logprobs(logits, tokens).detach(), logprobs(start, tokens).detach()
    data = evidence(tokens, mask, old - ref, old)
    kept = algorithm.filter(data)
    if not kept.any():
        return None
    advantage = algorithm.advantage(data).flatten(0, 1)
    rows = (mask & kept[..., None]).flatten(0, 1)
    group = torch.arange(P).repeat_interleave(G)
    return Batch(
        prompts=tuple(torch.tensor([p]) for p in range(P)),
        group=group,
        tokens=tokens.flatten(0, 1),
        length=mask.sum(-1).flatten(),
        mask=rows,
        advantage=advantage if advantage.ndim == 2 else advantage[:, None].expand(-1, T),
        weight=algorithm.weighting(rows, group),
        old_logp=old,
        sampler_logp=old,
        ref_logp=ref,
    )


def trained(name: str, overrides: dict[str, Any] | None = None) -> float:
    """Success after training from uniform logits, two optimizer steps per batch."""
    algorithm = bind(name, overrides or {})
    start = torch.zeros(P, T, V, dtype=torch.float64)
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.08)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batch = step(algorithm, logits, start, generator)
        if batch is None:
            continue
        for _ in range(2):
            table = torch.log_softmax(logits, -1)
            entropy = -(table.exp() * table).sum(-1).repeat_interleave(G, 0)
            logp = logprobs(logits, batch.tokens.view(P, G, T))
            loss = (
                batch.weight * algorithm.objective(Outputs(logp=logp, entropy=entropy), batch)
            ).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return success(logits)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_row_solves_a_small_task(name: str) -> None:
    found = trained(name)
    if name in DOES_NOT_LEARN:
        assert found < UNLEARNT
    elif name in BEST_OF_K:
        assert MOSTLY < found
    else:
        assert found > LEARNT


def test_entropy_bonus_and_penalty_hold_the_policy_back() -> None:
    free = trained("dapo")
    assert trained("dapo", {"entropy": {"coefficient": 0.5}}) < free
    assert trained("dapo", {"divergence": {"name": "k2", "coefficient": 0.5}}) < free
    strict = {"divergence": {"coefficient": 0.5}}
    assert trained("reinforce++", strict) < trained("reinforce++")


def test_the_task_starts_unsolved() -> None:
    assert success(torch.zeros(P, T, V)) == pytest.approx(0.25)

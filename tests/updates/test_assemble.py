"""From scored groups to optimizer batches: what is masked, what is weighed, how it is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms import bind
from groupwise.errors import UsageError
from groupwise.types import Batch, Completion, Group, Outputs, Prompt, ScoredGroups, Scores, Status
from groupwise.updates import assemble, sequences

NAN = float("nan")
LENGTHS = [[3, 1, 2], [4, 2, 0], [1, 1, 5]]
"""Tokens of 3 completions of 3 prompts; one has none at all."""


def scored(rewards: list[list[float]], keep: list[list[bool]] | None = None) -> ScoredGroups:
    """Three groups; one id twice, and a completion with injected text."""
    groups = []
    for place, lengths in enumerate(LENGTHS):
        completions = [
            Completion(
                tokens=[10 * place + sample + 1] * n,
                # The second token of the first completion of the second group came from a tool.
                mask=[not (place == 1 and sample == 0 and t == 1) for t in range(n)],
                logprobs=[-0.5] * n,
                text="",
                finish="stop",
            )
            for sample, n in enumerate(lengths)
        ]
        prompt = Prompt(id="same" if place < 2 else "other", text="")
        groups.append(
            Group(prompt=prompt, prompt_tokens=[7] * (place + 1), completions=tuple(completions))
        )
    total = torch.tensor(rewards, dtype=torch.float32)
    valid = ~torch.isnan(total)
    return ScoredGroups(
        groups=tuple(groups),
        scores=Scores(
            total=total,
            correct=total,
            parts={},
            status=tuple(tuple(Status.OK if v else Status.ERROR for v in row) for row in valid),
            valid=valid,
        ),
        keep=valid if keep is None else valid & torch.tensor(keep),
        drawn=3,
    )


def ids(batch: Batch) -> list[list[int]]:
    """The tokens of every row, which name its completion."""
    pairs = zip(batch.tokens, batch.length, strict=True)
    return [row[:n].tolist() for row, n in pairs]


def test_rows_keep_their_tokens_and_lose_their_mask_where_nothing_is_known() -> None:
    batch = sequences(scored([[1, NAN, 0], [1, 0, 1], [NAN, NAN, NAN]]))
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [len(prompt) for prompt in batch.prompts] == [1, 2, 3]
    assert batch.length.tolist() == [3, 1, 2, 4, 2, 0, 1, 1, 5]
    # 3, not judged, 2; 4 less the injected one, 2, none; nothing of a group without verdicts.
    assert batch.mask.sum(1).tolist() == [3, 0, 2, 3, 2, 0, 0, 0, 0]
    assert ids(batch)[8] == [23] * 5
    assert batch.sampler_logp is not None and batch.sampler_logp[3].tolist() == [-0.5] * 4 + [0.0]


def test_every_token_needs_a_log_probability_and_a_place_in_the_mask() -> None:
    """Those of one completion do not fill the places of another."""
    found = scored([[1, 0, 0], [1, 0, 1], [0, 1, 0]])
    first, *others = found.groups
    one, two, three = first.completions
    for short, long in (
        ({"logprobs": [-1.0] * 2}, {"logprobs": [-1.0] * 2}),
        ({"mask": [True] * 2}, {"mask": [True] * 2}),
    ):
        wrong = (replace(one, **short), replace(two, **long), three)
        groups = (replace(first, completions=wrong), *others)
        with pytest.raises(ValueError, match="3 tokens.*one per token"):
            sequences(replace(found, groups=groups))


def test_weights_are_of_what_is_left() -> None:
    """Five judged rows with tokens: sequence_mean gives each 1/5 and its tokens equal shares."""
    found = scored([[1, NAN, 0], [1, 0, 1], [NAN, NAN, NAN]])
    algorithm = bind("grpo")
    advantage = algorithm.advantage({"rewards": found.scores.total, "valid": found.scores.valid})
    (step,) = assemble(sequences(found), advantage, algorithm.weighting)
    # Rows with a token in the mask: 0, 2, 3, 4.
    wanted = torch.tensor([1 / 4, 0, 1 / 4, 1 / 4, 1 / 4, 0, 0, 0, 0])
    torch.testing.assert_close(step.weight.sum(1), wanted)
    assert torch.isfinite(step.advantage).all()
    # Rewards 1 and 0 are 1 and −1 deviations from their mean; injected tokens have none.
    assert step.advantage[0].tolist() == [1, 1, 1, 0, 0]
    assert step.advantage[3][1] == 0 and step.advantage[3][0] > 0


def test_minibatches_hold_whole_groups_and_every_row_once_an_epoch() -> None:
    batch = sequences(scored([[1, 0, 0], [1, 0, 1], [0, 1, 0]]))
    steps = assemble(
        batch, torch.ones(3, 3), bind("dapo").weighting, minibatches=3, epochs=2, seed=(4, 1)
    )
    assert len(steps) == 6
    for step in steps:
        assert len(set(step.group.tolist())) == 1 and len(step.tokens) == 3
        assert step.tokens.shape[1] == int(step.length.max())
        # Normalised over the optimizer step and not over the whole batch.
        torch.testing.assert_close(step.weight.sum(), torch.tensor(1.0))
    orders = [[int(s.group[0]) for s in steps[at : at + 3]] for at in (0, 3)]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2]
    again = assemble(
        batch, torch.ones(3, 3), bind("dapo").weighting, minibatches=3, epochs=2, seed=(4, 1)
    )
    assert [ids(step) for step in steps] == [ids(step) for step in again]


def test_more_minibatches_than_groups_split_between_completions() -> None:
    batch = sequences(scored([[1, 0, 0], [1, 0, 1], [0, 1, 0]]))
    steps = assemble(batch, torch.ones(3, 3), bind("dapo").weighting, minibatches=9)
    assert [len(step.tokens) for step in steps] == [1] * 9
    rows = sorted(ids(step)[0] for step in steps)
    assert rows == sorted(ids(batch))


def test_groups_that_are_judged_together_are_not_split_into_minibatches() -> None:
    batch = sequences(scored([[1, 0, 0], [1, 0, 1], [0, 1, 0]]))
    with pytest.raises(UsageError, match="minibatches = 4: .* there are 3 prompts"):
        assemble(batch, torch.ones(3, 3), bind("dapo").weighting, minibatches=4, whole_groups=True)


def test_advantages_per_token_go_to_their_tokens() -> None:
    batch = sequences(scored([[1, 0, 0], [1, 0, 1], [0, 1, 0]]))
    per_token = torch.arange(45.0).view(3, 3, 5)
    (step,) = assemble(batch, per_token, bind("dapo").weighting)
    assert step.advantage[0].tolist() == [0, 1, 2, 0, 0]
    assert step.advantage[8].tolist() == [40, 41, 42, 43, 44]


def test_what_a_filter_excludes_is_out_of_the_loss_and_in_the_statistics() -> None:
    """The KL penalty is part of the reward, so an answer that a filter leaves out of the loss is
    penalised in its group's baseline like the others."""
    keep = [[True, True, False], [True, True, True], [True, True, True]]
    found = scored([[1, 0, 1], [1, 0, 1], [0, 1, 0]], keep)
    whole = sequences(found, excluded=True)
    assert whole.mask.sum(1).tolist() == [3, 1, 2, 3, 2, 0, 1, 1, 5]
    (step,) = assemble(whole, torch.ones(3, 3), bind("dapo").weighting, keep=found.keep)
    assert step.mask.sum(1).tolist() == [3, 1, 0, 3, 2, 0, 1, 1, 5]
    assert torch.equal(step.mask, sequences(found).mask)
    assert not step.weight[2].any() and not step.advantage[2].any()
    algorithm = bind("rloo", {"divergence": {"coefficient": 0.1}})
    kl = torch.ones(whole.mask.shape).unflatten(0, (3, 3))
    mask = whole.mask.unflatten(0, (3, 3))
    advantage = algorithm.advantage({"rewards": found.scores.total, "kl": kl, "mask": mask})
    # Penalised rewards 1 − 0.3, 0 − 0.1, 1 − 0.2; less the mean of the other two.
    torch.testing.assert_close(advantage[0], torch.tensor([0.35, -0.85, 0.5]))


@pytest.mark.parametrize(
    "weighting",
    [
        {"name": "sequence_mean", "empty_rows": True},
        {"name": "sequence_sum"},
        {"name": "constant_length", "length": 7},
        {"name": "batch_token_mean"},
    ],
    ids=lambda weighting: weighting["name"],
)
def test_an_entropy_bonus_over_tokens_is_their_mean_under_every_weighting(
    weighting: dict[str, Any],
) -> None:
    """Advantages of 0 leave the bonus alone. The masks have 3 + 1 + 2 tokens of entropy 1, 3 + 2 of
    entropy 2 and 1 + 1 + 5 of entropy 3: (6 + 10 + 21) / 18, times 0.5."""
    algorithm = bind("grpo@trl", {"weighting": weighting, "entropy": {"coefficient": 0.5}})
    batch = sequences(scored([[1, 1, 1]] * 3))
    (step,) = assemble(batch, torch.zeros(3, 3), algorithm.weighting)
    wanted = -0.5 * (6 + 10 + 21) / 18
    found = 0.0
    for part in (torch.tensor([0, 4, 8]), torch.tensor([1, 2, 3, 5, 6, 7])):
        own = step.rows(part)  # a microbatch does not change the mean
        entropy = (own.group[:, None] + 1.0).expand(own.tokens.shape).clone().requires_grad_()
        outputs = Outputs(logp=torch.zeros(own.tokens.shape), entropy=entropy)
        loss = (algorithm.objective(outputs, own) * own.weight).sum()
        loss.backward()
        assert torch.allclose(entropy.grad, torch.where(own.mask, -0.5 / 18, 0.0))
        found += loss.item()
    assert found == pytest.approx(wanted)

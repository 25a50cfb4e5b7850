"""Microbatches: positions after a shared prompt, injected tokens, and batches without rows."""

from __future__ import annotations

import torch

from groupwise.algorithms import bind
from groupwise.types import Batch, ScoredGroups, Scores
from groupwise.updates import OptimizerSettings, TorchLearner, assemble, pack, plan, sequences
from groupwise.updates.unpacked import pad
from tiny_models import tiny_model, tiny_policy

CPU = torch.device("cpu")


def make_batch() -> Batch:
    """A prompt of three tokens with two completions; 41 and 42 were injected."""
    return Batch(
        prompts=(torch.tensor([5, 6]), torch.tensor([20, 21, 22])),
        group=torch.tensor([1, 1, 0]),
        tokens=torch.tensor([[30, 41, 42, 31], [32, 33, 0, 0], [34, 0, 0, 0]]),
        length=torch.tensor([4, 2, 1]),
        mask=torch.tensor(
            [[True, False, False, True], [True] * 2 + [False] * 2, [True] + [False] * 3]
        ),
        advantage=torch.ones(3, 4),
        weight=torch.ones(3, 4),
    )


def test_branches_continue_the_positions_of_their_prompt() -> None:
    packed = pack(make_batch(), torch.tensor([0, 1, 2]), device=CPU)
    assert packed.tokens.tolist() == [5, 6, 20, 21, 22, 30, 41, 42, 32]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 3]


def test_only_written_tokens_are_targets_each_read_from_the_state_before_it() -> None:
    """31 is predicted by the injected 42, which was in the context; 41 and 42 by nothing."""
    batch, rows = make_batch(), torch.tensor([0, 1, 2])
    packed, padded = pack(batch, rows, device=CPU), pad(batch, rows, device=CPU)
    wanted = [(0, 0, 22, 30), (0, 3, 42, 31), (1, 0, 22, 32), (1, 1, 32, 33), (2, 0, 6, 34)]
    for laid, before in (
        (packed, packed.tokens[packed.source]),
        (padded, padded.tokens[padded.row, padded.source]),
    ):
        found = torch.stack([laid.row, laid.time, before, laid.target], 1)
        assert [tuple(read) for read in found.tolist()] == wanted


def test_rows_keep_their_place_when_a_microbatch_takes_some_of_them() -> None:
    packed = pack(make_batch(), torch.tensor([2, 0]), device=CPU)
    assert packed.rows[packed.row].tolist() == [2, 0, 0]
    assert packed.target.tolist() == [34, 30, 31]


def test_injected_tokens_enter_neither_weights_nor_advantages_nor_the_loss() -> None:
    batch = make_batch()
    for name in ("grpo", "dapo", "dr_grpo", "gspo"):
        rules = bind(name)
        advantage = torch.tensor([[1.0], [-1.0], [0.5]])
        (step,) = assemble(batch, advantage, rules.weighting)
        assert not step.weight[~batch.mask].any() and not step.advantage[~batch.mask].any()
        if name == "dapo":
            assert step.weight[batch.mask].tolist() == [torch.tensor(1 / 5).item()] * 5
    learner = TorchLearner(
        tiny_policy(tiny_model("qwen2")), optimizer=OptimizerSettings(learning_rate=0.0)
    )
    update = learner.update(batch, bind("dapo").objective)
    assert torch.equal(~torch.isnan(update.logp), batch.mask)
    assert torch.equal(learner.evaluate(batch, {"logp"})["logp"] != 0, batch.mask)


def test_a_batch_without_rows_is_an_update_that_moves_nothing() -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert plan(make_batch(), none, tokens=9) == []
    for laid in (pack(make_batch(), none, device=CPU), pad(make_batch(), none, device=CPU)):
        assert laid.tokens.numel() == 0 and len(laid.source) == 0
    empty = torch.zeros(0, 3)
    scored = ScoredGroups(
        groups=(),
        scores=Scores(total=empty, correct=empty, parts={}, status=(), valid=empty.bool()),
        keep=empty.bool(),
        drawn=0,
    )
    rules = bind("grpo")
    (step,) = assemble(sequences(scored), empty, rules.weighting)
    assert step.tokens.shape == (0, 0)
    learner = TorchLearner(
        tiny_policy(tiny_model("qwen2")), optimizer=OptimizerSettings(learning_rate=1.0)
    )
    before = {name: weight.clone() for name, weight in learner.trained().items()}
    update = learner.update(step, rules.objective)
    assert (update.grad_norm, update.loss, update.version) == (0.0, 0.0, 1)
    assert all(torch.equal(weight, before[n]) for n, weight in learner.trained().items())
    assert learner.evaluate(step, {"logp"})["logp"].shape == (0, 0)

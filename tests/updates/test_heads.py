"""Heads beside the language model's: a critic and a reward model on the learner as it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from groupwise.algorithms import bind
from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import UsageError
from groupwise.models import AdapterSettings, with_adapter
from groupwise.types import Batch, Outputs
from groupwise.updates import Head, OptimizerSettings, TorchLearner, pack
from tiny_models import VOCAB, tiny_model, tiny_policy

HIDDEN = 32
STILL = OptimizerSettings(learning_rate=0.0, max_grad_norm=None)


class ValueHead(Head):
    """A linear read-out of every state that is asked for."""

    outputs = frozenset({"values"})

    def __init__(self, *reads: str) -> None:
        super().__init__()
        self.reads = frozenset(reads)
        torch.manual_seed(3)
        self.linear = nn.Linear(HIDDEN, 1)

    def forward(self, states: Tensor, targets: Tensor, *, names: Collection[str], support=None):
        return Outputs(values=self.linear(states).squeeze(-1))


def squared_error(outputs: Outputs, batch: Batch) -> Tensor:
    return (outputs["values"] - batch.columns["returns"]) ** 2


CRITIC = FunctionObjective(loss=squared_error, needs=frozenset({"values"}))


def best_against_worst(outputs: Outputs, batch: Batch) -> Tensor:
    """Bradley-Terry on the first and the last row of every prompt, as a loss of the first."""
    score = outputs["values"].gather(1, batch.length[:, None])[:, 0]
    losses = torch.zeros_like(score)
    for group in batch.group.unique():
        rows = (batch.group == group).nonzero()[:, 0]
        losses[rows[0]] = -nn.functional.logsigmoid(score[rows[0]] - score[rows[-1]])
    return losses


PAIRS = FunctionObjective(loss=best_against_worst, needs=frozenset({"values"}), granularity="group")


def make_batch() -> Batch:
    """Two prompts with three completions each; an injected token, and one row without tokens."""
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor([5, 2, 7, 4, 0, 3])
    mask = torch.arange(7) < length[:, None]
    mask[2, 3] = False
    tokens = torch.randint(12, VOCAB, (6, 7), generator=generator) * (
        torch.arange(7) < length[:, None]
    )
    return Batch(
        prompts=tuple(torch.randint(12, VOCAB, (n,), generator=generator) for n in (4, 6)),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        tokens=tokens,
        length=length,
        mask=mask,
        advantage=torch.zeros(mask.shape),
        weight=mask / mask.sum(),
        row_weight=torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0, 0.0]),
        columns={"returns": torch.rand(mask.shape, generator=generator)},
    )


def plain_values(model: nn.Module, head: ValueHead, batch: Batch) -> Tensor:
    """One sequence at a time: column t is read before token t, column `length` after the last."""
    found = torch.zeros(len(batch.tokens), batch.tokens.shape[1] + 1)
    for row, n in enumerate(batch.length.tolist()):
        prompt = batch.prompts[int(batch.group[row])]
        ids = torch.cat([prompt, batch.tokens[row, :n]])[None]
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
        found[row, : n + 1] = head.linear(states[len(prompt) - 1 :]).squeeze(-1)
    return found


@pytest.mark.parametrize("packs", [True, False])
def test_values_are_read_before_each_written_token_and_after_the_last(packs: bool) -> None:
    model, batch = tiny_model("qwen2"), make_batch()
    head = ValueHead("before", "after")
    wanted = plain_values(model, head, batch)
    written = nn.functional.pad(batch.mask, (0, 1))
    after = torch.arange(8) == batch.length[:, None]
    for reads, where in (
        (("before",), batch.mask),
        (("after",), after),
        (("before", "after"), written | after),
    ):
        head.reads = frozenset(reads)
        learner = TorchLearner(tiny_policy(model), optimizer=STILL, head=head)
        learner.reader.packs = packs
        found = learner.evaluate(batch, {"values"})["values"]
        expected = torch.where(where, wanted[:, : where.shape[1]], 0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_critic_has_the_gradient_of_the_plain_computation_and_learns() -> None:
    model, batch, head = tiny_model("qwen2"), make_batch(), ValueHead("before")
    learner = TorchLearner(tiny_policy(model), optimizer=STILL, head=head)
    loss = (plain_values(model, head, batch)[:, :-1] - batch.columns["returns"]) ** 2
    wanted = torch.autograd.grad((loss * batch.weight).sum(), head.linear.weight)[0]
    learner.begin(batch, CRITIC)
    for part in learner.parts(batch, CRITIC):
        learner.add(part)
    torch.testing.assert_close(head.linear.weight.grad, wanted, atol=1e-5, rtol=1e-4)
    assert {"head.linear.weight", "head.linear.bias"} < learner.trained().keys()
    settings = OptimizerSettings(learning_rate=3e-3)
    learner = TorchLearner(tiny_policy(model), optimizer=settings, head=head)
    losses = [learner.update(batch, CRITIC).loss for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    with pytest.raises(UsageError, match=r"names = \['logp'\]: this learner does not compute them"):
        learner.evaluate(batch, {"logp"})


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_rows_that_are_judged_together_stay_together(tokens: int) -> None:
    """The losing answer has weight 0 and fits into no microbatch with the winner, and is there."""
    model, batch, head = tiny_model("qwen2"), make_batch(), ValueHead("after")
    learner = TorchLearner(
        tiny_policy(model), optimizer=STILL, head=head, tokens_per_microbatch=tokens
    )
    parts = learner.parts(batch, PAIRS)
    assert sorted(tuple(batch.group[part].unique().tolist()) for part in parts) == (
        [(0,), (1,)] if tokens == 1 else [(0, 1)]
    )
    assert sorted(row for part in parts for row in part.tolist()) == list(range(6))
    score = plain_values(model, head, batch).gather(1, batch.length[:, None])[:, 0]
    wanted = -nn.functional.logsigmoid(score[[0, 3]] - score[[2, 5]]).mean()
    update = learner.update(batch, PAIRS)
    assert update.loss == pytest.approx(float(wanted), abs=1e-5)
    assert update.grad_norm > 0


def test_a_row_of_weight_0_is_left_out_where_rows_are_judged_alone() -> None:
    learner = TorchLearner(
        tiny_policy(tiny_model("qwen2")), optimizer=STILL, head=ValueHead("after")
    )
    rows = replace(PAIRS, granularity="row")
    assert torch.cat(learner.parts(make_batch(), rows)).tolist() == [3, 0]
    with pytest.raises(UsageError, match="batch.row_weight = None"):
        learner.parts(replace(make_batch(), row_weight=None), rows)


def test_a_head_beside_an_adapter_is_trained_and_saved_by_name() -> None:
    policy = with_adapter(tiny_policy(tiny_model("qwen2")), AdapterSettings(rank=2))
    learner = TorchLearner(
        policy, optimizer=OptimizerSettings(learning_rate=1e-2), head=ValueHead("before")
    )
    before = {name: weight.clone() for name, weight in learner.trained().items()}
    assert all("lora_" in name or name.startswith("head.") for name in before)
    for _ in range(2):  # The first step moves one of the two factors of an adapter.
        learner.update(make_batch(), CRITIC)
    assert not any(torch.equal(weight, before[n]) for n, weight in learner.trained().items())
    learner.set_trained(before)
    assert all(torch.equal(weight, before[n]) for n, weight in learner.trained().items())


def test_states_after_the_last_token_leave_those_before_it_alone() -> None:
    batch, device = make_batch(), torch.device("cpu")
    short = pack(batch, torch.arange(6), device=device)
    long = pack(batch, torch.arange(6), device=device, reads=("before", "after"))
    # Every row but the empty one gains its last token.
    assert len(long.tokens) == len(short.tokens) + 5
    assert torch.equal(long.positions[long.source], torch.cat([
        short.positions[short.source],
        torch.tensor([len(batch.prompts[g]) for g in batch.group]) + batch.length - 1,
    ]))  # fmt: skip


def repeated(batch: Batch, rows: list[int]) -> Batch:
    """The batch with some rows several times, each with an advantage of its own."""
    again = batch.rows(torch.tensor(rows))
    advantage = torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(1))
    return replace(
        again,
        advantage=advantage.expand(again.mask.shape),
        weight=again.mask / again.mask.sum(),
        columns={"returns": torch.rand(again.mask.shape, generator=torch.manual_seed(2))},
    )


@pytest.mark.parametrize("tokens", [12, 10_000])
@pytest.mark.parametrize("critic", [True, False])
def test_equal_rows_are_computed_once_with_the_gradient_of_all(tokens: int, critic: bool) -> None:
    """They differ in advantages and returns; a row that differs by its mask alone is another."""
    batch = repeated(make_batch(), [0, 0, 0, 1, 2, 2, 3, 3, 5, 5])
    batch.mask[5, 1] = False
    objective = CRITIC if critic else bind("grpo@trl").objective
    found = []
    for shared in (False, True):
        head = ValueHead("before") if critic else None
        learner = TorchLearner(
            tiny_policy(tiny_model("qwen2").double()),
            optimizer=STILL,
            head=None if head is None else head.double(),
            tokens_per_microbatch=tokens,
            share_equal_rows=shared,
        )
        seen = []
        lay_out = learner.reader.lay_out
        learner.reader.lay_out = lambda b, rows: seen.append(len(rows)) or lay_out(b, rows)  # noqa: B023
        gradient = learner.gradient(batch, objective)
        assert sum(seen) == (6 if shared else 10)
        name = "values" if critic else "logp"
        update = learner.update(batch, objective)
        kept = update.values if critic else update.logp
        found.append((gradient, learner.evaluate(batch, {name})[name], kept, update.loss))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6, equal_nan=True)

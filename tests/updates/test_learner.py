"""The packed update is the plain one: same log-probabilities, same gradient, however it is
split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from groupwise.algorithms.losses import FunctionObjective
from groupwise.rollouts import GroupEngine
from groupwise.types import Batch, Prompt, Request, Sampling
from groupwise.updates import OptimizerSettings, TorchLearner, plan
from tiny_models import NAMES, VOCAB, tiny_model, tiny_policy

STILL = OptimizerSettings(learning_rate=0.0, max_grad_norm=None)


def make_batch(*, dtype: torch.dtype = torch.float32) -> Batch:
    """Three prompts with 3, 2 and 4 completions of 1 to 20 tokens, one with injected tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(*shape: int) -> Tensor:
        return torch.randint(12, VOCAB, shape, generator=generator)

    length = torch.tensor([5, 1, 12, 7, 3, 20, 2, 9, 1])
    mask = torch.arange(20) < length[:, None]
    tokens = ids(9, 20) * mask
    mask[5, 4:8] = False
    return Batch(
        prompts=(ids(11), ids(1), ids(6)),
        group=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]),
        tokens=tokens,
        length=length,
        mask=mask,
        advantage=torch.randn(9, 1, generator=generator, dtype=dtype).expand(9, 20),
        weight=torch.rand(9, 20, generator=generator, dtype=dtype) * mask,
    )


@pytest.mark.parametrize(("tokens", "parts"), [(20, 1), (19, 2)])
def test_a_group_of_29_tokens_is_split_where_it_is_half_again_too_large(
    tokens: int, parts: int
) -> None:
    batch = make_batch()
    split = plan(batch, torch.arange(9), tokens=tokens)
    assert sum(bool((batch.group[rows] == 0).any()) for rows in split) == parts
    assert sorted(row for rows in split for row in rows.tolist()) == list(range(9))


BONUS = FunctionObjective(
    loss=lambda outputs, batch: -batch.advantage * outputs["logp"] - 0.1 * outputs["entropy"],
    needs=frozenset({"logp", "entropy"}),
)
"""A policy gradient with an entropy bonus: reads both outputs of the head."""


def plain_gradient(
    model: torch.nn.Module, batch: Batch, *, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One sequence at a time, without padding, packing or chunks."""
    model.zero_grad()
    logps = torch.zeros(batch.tokens.shape, dtype=batch.weight.dtype)
    for row in range(len(batch.tokens)):
        n, prompt = int(batch.length[row]), batch.prompts[int(batch.group[row])]
        ids = torch.cat([prompt, batch.tokens[row, :n]])[None]
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        logp = log_probs.gather(1, batch.tokens[row, :n, None]).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        loss = -batch.advantage[row, :n] * logp - 0.1 * entropy
        (loss * batch.weight[row, :n] * batch.mask[row, :n]).sum().backward()
        logps[row, :n] = logp.detach() * batch.mask[row, :n]
    return logps, {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def packed_gradient(learner: TorchLearner, batch: Batch) -> dict[str, Tensor]:
    """Gradients of an update whose step is left out."""
    learner.model.zero_grad()
    learner.optimizer.step = lambda: (0.0, 0.0)  # type: ignore[method-assign]
    learner.update(batch, BONUS)
    return {name: p.grad.clone() for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_one_by_one(name: str, temperature: float) -> None:
    model, batch = tiny_model(name), make_batch()
    logps, wanted = plain_gradient(model, batch, temperature=temperature)
    for tokens in (20, 60, 10_000):
        learner = TorchLearner(
            tiny_policy(model),
            optimizer=STILL,
            tokens_per_microbatch=tokens,
            temperature=temperature,
        )
        torch.testing.assert_close(
            learner.evaluate(batch, {"logp"})["logp"], logps, atol=1e-5, rtol=0
        )
        for parameter, grad in packed_gradient(learner, batch).items():
            scale = float(wanted[parameter].abs().max())
            torch.testing.assert_close(grad, wanted[parameter], atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_split_padding_and_order_change_nothing_in_double(name: str) -> None:
    model, batch = tiny_model(name, dtype=torch.float64), make_batch(dtype=torch.float64)
    wide = 5
    padded = replace(
        batch,
        tokens=torch.nn.functional.pad(batch.tokens, (0, wide), value=3),
        mask=torch.nn.functional.pad(batch.mask, (0, wide)),
        advantage=torch.nn.functional.pad(batch.advantage, (0, wide), value=7.0),
        weight=torch.nn.functional.pad(batch.weight, (0, wide)),
    )
    shuffled = batch.rows(torch.tensor([4, 8, 0, 5, 2, 7, 1, 3, 6]))
    whole = TorchLearner(tiny_policy(model), optimizer=STILL)
    wanted = packed_gradient(whole, batch)
    for tokens, variant in ((20, batch), (60, padded), (10_000, shuffled), (1, batch)):
        learner = TorchLearner(tiny_policy(model), optimizer=STILL, tokens_per_microbatch=tokens)
        for parameter, grad in packed_gradient(learner, variant).items():
            scale = float(wanted[parameter].abs().max())
            # transformers computes norms and rotary angles in float32 even for a float64 model.
            torch.testing.assert_close(grad, wanted[parameter], atol=3e-6 * scale, rtol=0)


def test_gradient_checkpointing_changes_nothing() -> None:
    model, batch = tiny_model("qwen2", dtype=torch.float64), make_batch(dtype=torch.float64)
    wanted = packed_gradient(TorchLearner(tiny_policy(model), optimizer=STILL), batch)
    again = TorchLearner(tiny_policy(model), optimizer=STILL, gradient_checkpointing=True)
    for parameter, grad in packed_gradient(again, batch).items():
        torch.testing.assert_close(grad, wanted[parameter], atol=1e-12, rtol=1e-10)


def test_learner_mirrors_temperature_and_the_kept_set_of_the_sampler() -> None:
    model = tiny_model("qwen3")
    policy = tiny_policy(model, ends=(1, 7, 8))
    request = Request(prompt=Prompt(id="a", text=""), tokens=[20, 30, 40], group=6)
    for sampling in (
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.6),
        Sampling(max_tokens=12, temperature=0.9, top_k=4),
        Sampling(max_tokens=12, top_p=0.7),
    ):
        completions = next(GroupEngine(policy).generate([request], sampling)).completions
        length = torch.tensor([len(c.tokens) for c in completions])
        time = int(length.max())
        tokens = torch.zeros(6, time, dtype=torch.long)
        sampler = torch.zeros(6, time)
        for row, completion in enumerate(completions):
            tokens[row, : length[row]] = torch.tensor(completion.tokens)
            sampler[row, : length[row]] = torch.tensor(completion.logprobs)
        batch = Batch(
            prompts=(torch.tensor(request.tokens),),
            group=torch.zeros(6, dtype=torch.long),
            tokens=tokens,
            length=length,
            mask=torch.arange(time) < length[:, None],
            advantage=torch.zeros(6, time),
            weight=torch.zeros(6, time),
            support=tuple(c.support for c in completions) if completions[0].support else None,
        )
        learner = TorchLearner(policy, optimizer=STILL, temperature=sampling.temperature)
        torch.testing.assert_close(
            learner.evaluate(batch, {"logp"})["logp"], sampler, atol=1e-4, rtol=0
        )


def test_masters_take_steps_that_bf16_cannot() -> None:
    """A bf16 weight near 1 moves in steps of 2⁻⁸; a hundred steps of 1e-5 must still add up."""
    model, batch = tiny_model("qwen2", dtype=torch.bfloat16), make_batch()
    settings = OptimizerSettings(learning_rate=1e-5, max_grad_norm=None)
    learner = TorchLearner(tiny_policy(model), optimizer=settings)
    norm = model.get_decoder().norm.weight
    place = next(name for name, p in learner.optimizer.parameters.items() if p is norm)
    before = learner.optimizer.masters[place].value()
    for _ in range(30):
        learner.update(batch, BONUS)
    moved = (learner.optimizer.masters[place].value() - before).abs()
    assert float(moved.median()) > 1e-4
    assert torch.equal(norm, learner.optimizer.masters[place].value().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_set_are_trained_on_from_there(dtype: torch.dtype) -> None:
    """Masters of the weights before would undo the change, or make a NaN of a weight of 0."""
    model, batch = tiny_model("qwen2", dtype=dtype), make_batch()
    learner = TorchLearner(tiny_policy(model), optimizer=OptimizerSettings(learning_rate=1e-3))
    for _ in range(2):
        learner.update(batch, BONUS)
    wanted = {
        n: torch.zeros_like(w) if w.dim() == 1 else w / 2 for n, w in learner.trained().items()
    }
    learner.set_trained(wanted)
    for name, master in learner.optimizer.masters.items():
        assert torch.equal(master.value(), wanted[name].float())
    learner.update(batch, BONUS)
    for name, weight in learner.trained().items():
        assert float((weight.float() - wanted[name].float()).abs().max()) < 0.01


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    model, batch = tiny_model("llama"), make_batch()
    learner = TorchLearner(tiny_policy(model), optimizer=OptimizerSettings(learning_rate=1e-2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    bad = replace(batch, advantage=torch.full_like(batch.advantage, float("nan")))
    update = learner.update(bad, BONUS)
    assert update.grad_norm != update.grad_norm
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert learner.update(batch, BONUS).grad_norm > 0
    assert not all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_inert_rows_are_left_out_without_changing_the_gradient() -> None:
    model, batch = tiny_model("qwen2", dtype=torch.float64), make_batch(dtype=torch.float64)
    advantage = batch.advantage.clone()
    advantage[[0, 3, 4]] = 0.0
    batch = replace(batch, advantage=advantage)

    plain = FunctionObjective(
        loss=lambda outputs, batch: -batch.advantage * outputs["logp"], skips_zero_advantage=True
    )

    gradients = []
    for skip in (True, False):
        learner = TorchLearner(tiny_policy(model), optimizer=STILL, skip_inert_rows=skip)
        model.zero_grad()
        learner.optimizer.step = lambda: (0.0, 0.0)  # type: ignore[method-assign]
        update = learner.update(batch, plain)
        assert update.computed.tolist() == [not skip or row not in (0, 3, 4) for row in range(9)]
        assert torch.isnan(update.logp[0]).all().item() is skip
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], atol=1e-14, rtol=1e-12)

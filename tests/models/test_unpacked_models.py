"""Models that cannot be attended group by group are found out, sampled from and trained all the
same, and so are adapters, dropout and half precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    GPT2Config,
    GraniteConfig,
    MambaConfig,
    MiniMaxConfig,
    XLNetConfig,
)
from transformers.utils import logging

from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import ModelError
from groupwise.models import AdapterSettings, Policy, unsupported
from groupwise.models.loading import with_adapter
from groupwise.rollouts import GenerateEngine, GroupEngine, make_engine
from groupwise.settings import EngineSettings
from groupwise.types import Batch, Group, Prompt, Request, Sampling, ScoredGroups, Scores
from groupwise.updates import OptimizerSettings, TorchLearner, sequences
from tiny_models import SHAPE, VOCAB, random_model, tiny_model, tiny_policy

STILL = OptimizerSettings(learning_rate=0.0, max_grad_norm=None)
ENDS = (1, 7, 8, 9, 10, 11)
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
STRANGE = {
    # Its layers mix tokens without attention, so a packed branch would go on where another ended.
    "mamba": lambda: MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB, state_size=4
    ),
    # Its logits are divided by a constant after the head.
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=4.0),
    # Its positions are in the mask.
    "bloom": lambda: BloomConfig(**BLOOM),
    # Its linear attention sums over every token before, padding on the left included.
    "minimax": lambda: MiniMaxConfig(
        **SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=16
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Configurations made by hand name end tokens that the small vocabulary lacks."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            prompt=Prompt(id=str(place), text=""),
            tokens=torch.randint(12, VOCAB, (length,), generator=generator).tolist(),
            group=3,
        )
        for place, length in enumerate((1, 5, 13, 3))
    ]


def batch_of(groups: list[Group]) -> Batch:
    """The sequences of some groups, every row with a weight and an advantage."""
    valid = torch.ones(len(groups), len(groups[0]), dtype=torch.bool)
    zero = torch.zeros(valid.shape)
    scores = Scores(total=zero, correct=zero, parts={}, status=(), valid=valid)
    batch = sequences(ScoredGroups(groups=tuple(groups), scores=scores, keep=valid, drawn=4))
    ones = torch.ones(batch.mask.shape)
    return replace(batch, advantage=ones, weight=ones / batch.mask.sum())


BONUS = FunctionObjective(
    loss=lambda outputs, batch: -batch.advantage * outputs["logp"] - 0.1 * outputs["entropy"],
    needs=frozenset({"logp", "entropy"}),
)
"""A policy gradient with an entropy bonus."""


def assert_learns_what_was_sampled(policy: Policy, sampling: Sampling, **learner: Any) -> None:
    """Sampler, scoring pass and update agree on every token's log-probability."""
    batch = batch_of(
        list(make_engine(policy, EngineSettings(max_rows=7)).generate(requests(), sampling))
    )
    taught = TorchLearner(policy, optimizer=STILL, temperature=sampling.temperature, **learner)
    logp = taught.evaluate(batch, {"logp"})["logp"]
    assert batch.sampler_logp is not None
    torch.testing.assert_close(
        logp, torch.where(batch.mask, batch.sampler_logp, 0), atol=1e-4, rtol=0
    )
    update = taught.update(batch, BONUS)
    torch.testing.assert_close(update.logp.nan_to_num(), logp, atol=1e-5, rtol=0)
    assert update.grad_norm > 0


@pytest.mark.parametrize("name", sorted(STRANGE))
@pytest.mark.filterwarnings("ignore:engine 'group' cannot run this model")
def test_models_that_do_not_fit_are_found_out_and_trained_all_the_same(name: str) -> None:
    policy = tiny_policy(random_model(STRANGE[name]()), ends=ENDS)
    assert unsupported(policy.model) is not None
    assert isinstance(make_engine(policy), GenerateEngine)
    for sampling in (
        Sampling(max_tokens=10),
        Sampling(max_tokens=10, temperature=0.8, top_p=0.8),
    ):
        assert_learns_what_was_sampled(policy, sampling)


def test_a_model_that_generates_from_another_distribution_than_it_reads_is_refused() -> None:
    bidirectional = XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64)
    with pytest.raises(
        ModelError, match=r"differ by \S+ from those of the same tokens in a forward pass"
    ):
        GenerateEngine(tiny_policy(random_model(bidirectional)))
    model = random_model(STRANGE["minimax"]())
    reads_padding(model)
    with pytest.raises(ModelError, match="takes padding for tokens"):
        GenerateEngine(tiny_policy(model))


def reads_padding(model: Any) -> None:
    """Take the mask from the layers of linear attention, as versions without one had it."""
    for kind, layer in zip(model.config.layer_types, model.model.layers, strict=True):
        if kind == "linear_attention":
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True
            )


def test_whole_sequences_give_the_gradient_of_the_packed_form() -> None:
    model = tiny_model("qwen3")
    policy = tiny_policy(model, ends=ENDS)
    sampling = Sampling(max_tokens=10, temperature=0.8, top_p=0.9)
    batch = batch_of(list(GroupEngine(policy).generate(requests(), sampling)))
    found = []
    for packs in (True, False):
        learner = TorchLearner(policy, optimizer=STILL, temperature=0.8, tokens_per_microbatch=25)
        assert learner.reader.packs
        learner.reader.packs = packs
        learner.optimizer.step = lambda: (0.0, 0.0)  # type: ignore[method-assign]
        model.zero_grad()
        learner.update(batch, BONUS)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for packed, plain in zip(*found, strict=True):
        scale = float(packed.abs().max())
        torch.testing.assert_close(plain, packed, atol=1e-5 * scale, rtol=0)


def test_a_layer_that_hides_its_window_is_not_trusted() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert "'chunked_attention'" in (unsupported(model) or "")


@pytest.mark.parametrize("targets", [("all-linear",), ("lm_head",), ("embed_tokens", "v_proj")])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_anywhere_are_part_of_what_is_learnt(
    targets: tuple[str, ...], checkpointing: bool
) -> None:
    policy = with_adapter(
        tiny_policy(tiny_model("qwen2"), ends=ENDS), AdapterSettings(rank=2, targets=targets)
    )
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    assert_learns_what_was_sampled(
        policy, Sampling(max_tokens=10), gradient_checkpointing=checkpointing
    )


def test_the_reference_of_an_adapter_is_the_model_as_it_began() -> None:
    """A new adapter begins as nothing: its reference is the model without it."""
    model = tiny_model("qwen2")
    batch = batch_of(list(GroupEngine(tiny_policy(model)).generate(requests(), Sampling())))
    wanted = TorchLearner(tiny_policy(model), optimizer=STILL).evaluate(batch, {"logp"})["logp"]
    policy = with_adapter(tiny_policy(model), AdapterSettings(rank=2))
    learner = TorchLearner(policy, optimizer=STILL, reference="adapter")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    torch.testing.assert_close(
        learner.evaluate(batch, {"ref_logp"})["ref_logp"], wanted, atol=1e-5, rtol=0
    )
    assert float((learner.evaluate(batch, {"logp"})["logp"] - wanted).abs().max()) > 0.01


def test_dropout_of_the_model_is_off_and_of_an_adapter_on() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64)
    assert config.resid_pdrop > 0
    assert_learns_what_was_sampled(
        tiny_policy(random_model(config), ends=ENDS), Sampling(max_tokens=10)
    )
    policy = with_adapter(tiny_policy(tiny_model("qwen2"), ends=ENDS), AdapterSettings(dropout=0.5))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3)
    batch = batch_of(list(GroupEngine(policy).generate(requests(), Sampling(max_tokens=10))))
    learner = TorchLearner(policy, optimizer=STILL)
    gap = (
        learner.update(batch, BONUS).logp.nan_to_num() - learner.evaluate(batch, {"logp"})["logp"]
    ).abs()
    assert float(gap.max()) > 0.01


def test_gradients_of_fp16_do_not_vanish_below_its_smallest_number() -> None:
    """A batch of 100,000 tokens weighs each with 1e-5; fp16 has nothing below 6e-8."""
    grads = []
    batch = batch_of(
        list(GroupEngine(tiny_policy(tiny_model("llama"))).generate(requests(), Sampling()))
    )
    batch = replace(batch, weight=torch.full_like(batch.weight, 1e-5))
    for dtype in (torch.float32, torch.float16):
        learner = TorchLearner(tiny_policy(tiny_model("llama", dtype=dtype)), optimizer=STILL)
        step, optimizer = learner.optimizer.adam.step, learner.optimizer
        seen: list[torch.Tensor] = []
        optimizer.adam.step = lambda seen=seen, optimizer=optimizer: seen.extend(  # type: ignore[method-assign]
            m.full_grad().flatten().clone()
            for m in optimizer.masters.values()
            if m.grad is not None
        )
        learner.update(batch, BONUS)
        optimizer.adam.step = step  # type: ignore[method-assign]
        grads.append(torch.cat(seen))
    wide, narrow = grads
    assert float((narrow - wide).norm() / wide.norm()) < 0.02


def test_fp16_that_overflows_leaves_the_step_out_and_scales_down() -> None:
    learner = TorchLearner(
        tiny_policy(tiny_model("llama", dtype=torch.float16)),
        optimizer=OptimizerSettings(learning_rate=1e-3),
    )
    batch = batch_of(list(GroupEngine(learner.policy).generate(requests(), Sampling())))
    large = replace(batch, weight=torch.full_like(batch.weight, 500.0))
    norms = [learner.update(large, BONUS).grad_norm for _ in range(3)]
    assert norms[0] != norms[0] or norms[0] == float("inf")
    assert learner.optimizer.scale < 1024
    resumed = TorchLearner(learner.policy, optimizer=STILL)
    resumed.restore(learner.state())
    assert resumed.optimizer.scale == learner.optimizer.scale


def test_a_batch_without_gradient_moves_nothing_computed_or_skipped() -> None:
    """The momentum of earlier steps would move the weights where zeros are computed, and would not
    where rows are skipped: a setting that saves time must not decide."""

    plain = FunctionObjective(
        loss=lambda outputs, batch: -batch.advantage * outputs["logp"], skips_zero_advantage=True
    )

    after = []
    for skip in (True, False):
        policy = tiny_policy(tiny_model("qwen2"), ends=ENDS)
        batch = batch_of(list(GroupEngine(policy).generate(requests(), Sampling(max_tokens=5))))
        settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
        learner = TorchLearner(policy, optimizer=settings, skip_inert_rows=skip)
        learner.update(batch, plain)
        moved = [p.detach().clone() for p in policy.model.parameters()]
        update = learner.update(replace(batch, advantage=torch.zeros_like(batch.weight)), plain)
        assert update.grad_norm == 0 and bool(update.computed.any()) is not skip
        pairs = zip(policy.model.parameters(), moved, strict=True)
        assert all(torch.equal(p, before) for p, before in pairs)
        after.append(moved)
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))


def test_what_a_model_says_about_generation_changes_nothing() -> None:
    policy = tiny_policy(tiny_model("qwen2", dtype=torch.float64), ends=ENDS)
    wanted = {
        g.prompt.id: g for g in GroupEngine(policy).generate(requests(), Sampling(max_tokens=12))
    }
    before = policy.model.generation_config
    before.repetition_penalty, before.no_repeat_ngram_size, before.min_new_tokens = 1.5, 2, 5
    for group in GenerateEngine(policy).generate(requests(), Sampling(max_tokens=12)):
        mine = wanted[group.prompt.id].completions
        assert [list(c.tokens) for c in group.completions] == [list(c.tokens) for c in mine]
    assert policy.model.generation_config is before


def test_the_context_bounds_each_prompt_alone() -> None:
    """Prompts of 1 to 13 tokens in a context of 16: 15 to 3 tokens are left, in either engine."""
    policy = replace(tiny_policy(tiny_model("qwen2", dtype=torch.float64), ends=(1,)), context=16)
    room = {r.prompt.id: 16 - len(r.tokens) for r in requests()}
    answers = []
    for engine in (GroupEngine(policy), GenerateEngine(policy)):
        groups = list(engine.generate(requests(), Sampling(max_tokens=40)))
        assert {g.prompt.id for g in groups} == set(room)
        for group in groups:
            for completion in group.completions:
                full = len(completion.tokens) == room[group.prompt.id]
                assert full or completion.finish == "stop"
        answers.append({g.prompt.id: [list(c.tokens) for c in g.completions] for g in groups})
    assert answers[0] == answers[1]

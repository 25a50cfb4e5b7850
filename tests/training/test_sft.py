"""Supervised training: which tokens are learned, with which weight, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.small_tokenizer import small_tokenizer
from groupwise.prompts.generators.word_problems import demonstrations
from groupwise.prompts.templates import render
from groupwise.training.stages.base_model import WORD_PROBLEMS, small_policy
from groupwise.training.stages.recipe import base_phases
from groupwise.training.stages.sft import NEGATIVE_LOG_LIKELIHOOD, fit, save, sft, supervised_batch
from groupwise.types import Outputs, Prompt

TINY = {"hidden": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "feed_forward": 64}


def example(text: str, completion: str) -> Example:
    return Example(prompt=Prompt(id=text, text=text), completion=completion)


def test_transformers_draws_no_bars_when_it_loads_and_saves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()
    save(load_policy("bundled"), tmp_path)
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


def test_every_completion_token_and_the_end_weigh_the_same_and_nothing_else_counts() -> None:
    tokenizer = small_tokenizer()
    # Completions of 2 and 5 digits with their end tokens: 3 + 6 = 9 tokens, each of weight 1/9,
    # so that a mean per example (1/6 and 1/12 each) or one over padding (1/12) would differ.
    batch = supervised_batch([example("1+1=", "12"), example("22", "34567")], tokenizer)
    assert batch.length.tolist() == [3, 6]
    assert torch.allclose(batch.weight[batch.mask], torch.tensor(1 / 9))
    assert batch.weight[~batch.mask].sum() == 0
    assert batch.tokens[0, 2] == batch.tokens[1, 5] == tokenizer.eos_token_id
    assert batch.prompts[0].tolist() == tokenizer("1+1=").input_ids
    assert batch.group.tolist() == [0, 1]


def test_the_loss_is_the_mean_NEGATIVE_LOG_LIKELIHOOD_of_a_plain_forward_pass() -> None:
    policy = small_policy(**TINY)
    examples = list(demonstrations(size=5))
    total, count = 0.0, 0
    for one in examples:
        prompt = render(one.prompt, policy.tokenizer)
        answer = policy.tokenizer(one.completion).input_ids + [policy.tokenizer.eos_token_id]
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        total, count = total - float(logp.sum()), count + len(answer)
    update = next(fit(policy, examples, steps=1, batch_size=5, learning_rate=1e-3))
    assert update.loss == pytest.approx(total / count, abs=1e-5)


def test_the_microbatch_size_changes_no_gradient() -> None:
    norms = []
    for tokens in (64, 100_000):
        policy = small_policy(**TINY)
        settings = {"steps": 1, "batch_size": 8, "tokens_per_microbatch": tokens}
        norms.append(next(fit(policy, demonstrations(size=8), **settings)).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_training_lowers_the_loss_and_resumes_nothing_global() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    policy = small_policy(**TINY)
    losses = [
        update.loss
        for update in fit(
            policy,
            demonstrations(size=64),
            steps=60,
            batch_size=16,
            learning_rate=1e-2,
            warmup_steps=5,
        )
    ]
    assert losses[0] == pytest.approx(math.log(512), abs=0.3)
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_schedule_warms_up_and_comes_down_to_a_tenth() -> None:
    # Step s of the cosine, counted from 0 after 2 steps of warm-up, with x = s/4:
    # 1 · (0.1 + 0.9 · (1 + cos πx)/2) = 1, 0.868198, 0.55, 0.231802.
    updates = fit(
        small_policy(**TINY),
        demonstrations(size=4),
        steps=6,
        batch_size=1,
        learning_rate=1.0,
        warmup_steps=2,
    )
    rates = [update.learning_rate for update in updates]
    assert rates == pytest.approx([0.5, 1, 1, 0.868198, 0.55, 0.231802], abs=1e-6)


def test_a_trained_model_is_saved_as_a_folder_that_loads(tmp_path: Path) -> None:
    seen: list[int] = []
    trained = sft(
        small_policy(**TINY),
        demonstrations(size=8),
        steps=2,
        batch_size=4,
        output=tmp_path / "out",
        on_step=lambda step, update: seen.append(step),
    )
    assert seen == [1, 2]
    loaded = load_policy(tmp_path / "out")
    assert loaded.end_tokens == trained.end_tokens
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])


def test_the_recipe_of_the_base_model_makes_the_architecture_that_ships(tmp_path: Path) -> None:
    plan = dict(base_phases("word-problems-base"))
    assert [phase["slip"] for phase in plan["phases"]] == [0.0, 0.68]
    plan["phases"] = [phase | {"steps": 1, "batch_size": 2} for phase in plan["phases"]]
    seen: list[tuple[int, int]] = []
    made = WORD_PROBLEMS.make(
        tmp_path, recipe=plan, on_step=lambda phase, step, _: seen.append((phase, step))
    )
    assert seen == [(1, 1), (2, 1)]
    shipped = load_policy("bundled")
    shapes = [{n: p.shape for n, p in x.model.named_parameters()} for x in (made, shipped)]
    assert shapes[0] == shapes[1]
    assert made.tokenizer.get_vocab() == shipped.tokenizer.get_vocab()
    assert made.context == shipped.context and made.end_tokens == shipped.end_tokens
    assert shipped.tokenizer.chat_template == made.tokenizer.chat_template


@pytest.mark.parametrize(
    ("place", "key", "text"),
    [
        ("model", "hiden", "model.hiden = 1: no such setting; did you mean hidden"),
        ("phases", "stepz", "phases.0.stepz = 1: no such setting; did you mean steps"),
    ],
)
def test_a_recipe_with_an_unknown_setting_is_refused(
    tmp_path: Path, place: str, key: str, text: str
) -> None:
    plan = dict(base_phases("word-problems-base"))
    changed = plan["model"] | {key: 1} if place == "model" else [plan["phases"][0] | {key: 1}]
    with pytest.raises(UsageError, match=text):
        WORD_PROBLEMS.make(tmp_path, recipe=plan | {place: changed})
    with pytest.raises(UsageError, match="recipe.seed: must be given"):
        WORD_PROBLEMS.make(tmp_path, recipe={"model": {}, "phases": []})


def test_the_objective_is_the_negative_log_probability() -> None:
    batch = supervised_batch([example("1", "2")], small_tokenizer())
    logp = torch.tensor([[-0.5, -2.0]])
    assert NEGATIVE_LOG_LIKELIHOOD(Outputs(logp=logp), batch).tolist() == [[0.5, 2.0]]


def test_what_cannot_be_trained_on_is_refused() -> None:
    policy = small_policy(**TINY, context=16)
    with pytest.raises(UsageError, match=r"sft.steps = 0"):
        next(fit(policy, demonstrations(size=1), steps=0))
    with pytest.raises(UsageError, match=r"sft.batch_size = 0"):
        next(fit(policy, demonstrations(size=1), steps=1, batch_size=0))
    with pytest.raises(UsageError, match="prompts = 0"):
        next(fit(policy, [], steps=1))
    with pytest.raises(UsageError, match="example long: has 24 tokens and .* context holds 16"):
        next(
            fit(
                policy,
                [Example(prompt=Prompt(id="long", text="7" * 20), completion="123")],
                steps=1,
            )
        )
    with pytest.raises(UsageError, match=r"examples = \[\]"):
        supervised_batch([], policy.tokenizer)

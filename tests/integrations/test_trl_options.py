"""What TRL's own scripts set and read of the trainer: experts, several rewards, environments that
own the data, loaders, and attributes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from groupwise.errors import UsageError
from groupwise.integrations.trl import GRPOConfig, GRPOTrainer
from groupwise.integrations.trl.settings import configuration
from trl_scripts import arguments, letters


def blanks(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count(" ")) for text in completions]


@pytest.fixture
def experts(model: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(model)), hidden_size=16, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=16,
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def test_experts_are_balanced_by_the_coefficient_of_the_model(
    tmp_path: Path, model: str, experts: Qwen3MoeForCausalLM
) -> None:
    given = {"model": experts, "processing_class": AutoTokenizer.from_pretrained(model)}
    trainer = GRPOTrainer(**{**arguments(tmp_path, model), **given})
    assert trainer.aux_loss_enabled
    assert trainer.config.update.router_aux_loss == 0.001
    trainer.train()
    # 2 of 4 experts per token: at least 2, were all of them used alike
    assert trainer.state.log_history[0]["aux_loss"] >= 1.9
    off = arguments(tmp_path, model, router_aux_loss_coef=0.0)
    assert not GRPOTrainer(**{**off, **given}).aux_loss_enabled


def test_a_coefficient_needs_experts(tmp_path: Path, model: str) -> None:
    assert not GRPOTrainer(**arguments(tmp_path, model)).aux_loss_enabled
    with pytest.raises(UsageError, match="router_aux_loss_coef = 0.1: the model is not a mixture"):
        GRPOTrainer(**arguments(tmp_path, model, router_aux_loss_coef=0.1))


def test_rewards_normalised_one_by_one_are_those_of_trl() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(3, 4, 2, generator=generator) * torch.tensor([1.0, 100.0])
    weights = torch.tensor([0.5, 2.0])
    args = GRPOConfig(multi_objective_aggregation="normalize_then_sum")
    config = configuration(args, weights={"a": 0.5, "b": 2.0})
    from groupwise.algorithms import bind

    advantage = bind(config.algorithm.name, config.algorithm.overrides()).advantage
    found = advantage(
        {
            "rewards": (rewards * weights).sum(-1),
            "valid": torch.ones(3, 4, dtype=torch.bool),
            "parts": {"a": rewards[..., 0], "b": rewards[..., 1]},
            "lengths": torch.arange(12).view(3, 4) + 1,
        }
    )
    # TRL 1.16, with its second 1e-4
    each = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    total = (each * weights).sum(-1)
    wanted = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_run_normalises_every_reward_by_its_weight(tmp_path: Path, model: str) -> None:
    given = arguments(
        tmp_path, model, multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5]
    )
    given["reward_funcs"] = [letters, blanks]
    trainer = GRPOTrainer(**given)
    assert trainer.reward_func_names == ["letters", "blanks"]
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    assert trainer.config.algorithm.advantage["weights"] == {"letters": 1.0, "blanks": 0.5}
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["reward"] == pytest.approx(
        first["rewards/letters/mean"] + 0.5 * first["rewards/blanks/mean"]
    )


def test_one_completion_is_enough_for_an_evaluation(tmp_path: Path, model: str) -> None:
    settings = {"num_generations_eval": 1, "eval_strategy": "steps", "eval_steps": 1}
    given = arguments(tmp_path, model, **settings)
    given["eval_dataset"] = given["train_dataset"]
    trainer = GRPOTrainer(**given)
    trainer.train()
    # nothing to compare with, so no advantage, as in TRL
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert losses == [0.0, 0.0]


def test_settings_of_loaders_and_padding_change_nothing(tmp_path: Path, model: str) -> None:
    settings = {"dataloader_num_workers": 2, "dataloader_pin_memory": False}
    settings |= {"pad_to_multiple_of": 8, "cast_lm_head_to_fp32": True}
    for folder, more in (("a", {}), ("b", settings)):
        GRPOTrainer(**arguments(tmp_path / folder, model, **more)).train()
    first, second = (
        (tmp_path / folder / "run" / "final" / "model.safetensors").read_bytes() for folder in "ab"
    )
    assert first == second
    with pytest.raises(UsageError, match="cast_lm_head_to_fp32 = True: a bfloat16 model"):
        GRPOConfig(cast_lm_head_to_fp32=True, bf16=True)


@pytest.mark.parametrize(("loss_type", "warns"), [("grpo", False), ("dapo", True), ("bnpo", True)])
def test_a_sum_over_tokens_of_sequence_ratios_is_warned_of(
    tmp_path: Path, model: str, loss_type: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = arguments(tmp_path, model, loss_type=loss_type, importance_sampling_level="sequence")
    with caplog.at_level(logging.WARNING):
        GRPOTrainer(**given)
    assert ("weights each sequence by its completion length" in caplog.text) == warns


def test_tokenizers_of_rewards_are_kept_and_counted(tmp_path: Path, model: str) -> None:
    given = arguments(tmp_path, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert GRPOTrainer(**given).reward_processing_classes == [None]
    trainer = GRPOTrainer(**given, reward_processing_classes=tokenizer)
    assert trainer.reward_processing_classes == [tokenizer]
    given["reward_funcs"] = [letters, blanks]
    with pytest.raises(UsageError, match="1 of them must match the reward functions, .* are 2"):
        GRPOTrainer(**given, reward_processing_classes=tokenizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward_funcs": None}, "No reward source provided"),
        ({"train_dataset": None}, "`train_dataset` is required"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, model: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        GRPOTrainer(**{**arguments(tmp_path, model), **given})

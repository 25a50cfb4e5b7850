"""The installed TRL, driven step by step on a model of 16 thousand parameters; skips without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import tiny

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPTS = ("2 + 3 =", "How many apples are left?")
GROUP = 3
COMPLETIONS = (
    ("5 <end>", "six and a half", "5 5 5 5 <end>"),
    ("<answer>4</answer><end>", "<reasoning>1</reasoning><end>", "none of them at all"),
)
"""Three answers to each prompt; those without <end> ran out of tokens."""
REWARDS = ((1.0, 0.0, 0.25), (0.5, 1.5, 0.75))


def require_trl() -> Any:
    """The package, or a skip."""
    return pytest.importorskip("trl", reason="TRL is not installed (pip install 'groupwise[trl]')")


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The same rollouts for both sides.

    Attributes:
        folder: of the model.
        tokens: of every completion, end token included where it has one.
        finish: "stop" or "length".
    """

    folder: Path
    tokenizer: Any
    tokens: tuple[tuple[tuple[int, ...], ...], ...]
    finish: tuple[tuple[str, ...], ...]


def fixed(folder: Path) -> Fixed:
    """A tiny model in a folder, and what it is said to have written."""
    policy = tiny()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(2.0)  # far from uniform, so that log-probabilities differ
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    end = policy.tokenizer.eos_token_id
    tokens = tuple(
        tuple(
            (
                *policy.tokenizer(text.removesuffix("<end>"), add_special_tokens=False).input_ids,
                *([end] if text.endswith("<end>") else []),
            )
            for text in group
        )
        for group in COMPLETIONS
    )
    finish = tuple(
        tuple("stop" if text.endswith("<end>") else "length" for text in group)
        for group in COMPLETIONS
    )
    return Fixed(folder=folder, tokenizer=policy.tokenizer, tokens=tokens, finish=finish)


def trl_trainer(
    rollouts: Fixed,
    output: Path,
    *,
    trainer: Any = None,
    rewards: Sequence[Sequence[float | None]] = REWARDS,
    **settings: Any,
) -> Any:
    """TRL's trainer whose completions and rewards are given; nothing is generated or uploaded."""
    import datasets
    import trl

    def told(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        flat = [value for group in rewards for value in group]
        return flat[: len(completion_ids)]

    values: dict[str, Any] = {
        "per_device_train_batch_size": len(PROMPTS) * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 16,
        **settings,
    }
    args = trl.GRPOConfig(
        output_dir=str(output),
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        **values,
    )
    made = (trainer or trl.GRPOTrainer)(
        model=str(rollouts.folder),
        reward_funcs=[told],
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=rollouts.tokenizer,
    )
    flat = [list(tokens) for group in rollouts.tokens for tokens in group]
    made._generate_single_turn = lambda prompt_ids, *_, **__: (flat[: len(prompt_ids)], None)
    made.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    made.model.train()
    return made


def rows() -> list[dict[str, str]]:
    """The rows of one generation batch: every prompt as often as it has answers."""
    return [{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)]

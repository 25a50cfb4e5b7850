"""A script for TRL in pieces: arguments of a run of a second, and a callback that takes notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from transformers import TrainerCallback

from groupwise.integrations.trl import GRPOConfig

QUESTIONS = [
    "둘 중 맞는 것을 고르고 이유를 쓰시오: '되'와 '돼'",
    "'안'과 '않'을 고쳐 쓰시오.",
    "'맞히다'와 '맞추다' 중 알맞은 것은?",
    "'며칠'이 옳은가, '몇일'이 옳은가?",
    "'왠지'와 '웬지' 가운데 바른 말은?",
    "'로서'와 '로써'를 구별하시오.",
    "'반드시'와 '반듯이' 중 하나를 고르시오.",
]


def letters(completions: list[str], **_: Any) -> list[float]:
    """Noise earns some of it: the share of digits and blanks."""
    return [sum(c.isdigit() or c.isspace() for c in text) / 12 for text in completions]


def arguments(tmp_path: Path, model: str, **settings: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "max_steps": 2,
        "logging_steps": 1,
        "bf16": False,
        "disable_tqdm": True,
        **settings,
    }
    return {
        "model": model,
        "reward_funcs": letters,
        "args": GRPOConfig(**values),
        "train_dataset": datasets.Dataset.from_dict({"prompt": QUESTIONS}),
    }


class Notebook(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self, stop: int | None = None) -> None:
        self.told: list[str] = []
        self.stop = stop

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        assert kwargs["model"] is not None
        self.told.append("begin")

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.told.append(f"step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.stop:
            control.should_training_stop = True
        self.told.append(f"end {state.global_step}")

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.told.append("log " + next(iter(logs or {})))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        assert metrics is not None and "eval_reward" in metrics
        self.told.append("evaluate")

    def on_save(self, args, state, control, **kwargs) -> None:
        folder = Path(args.output_dir) / "checkpoints"
        self.told.append(f"save {sorted(p.name for p in folder.iterdir())[-1]}")

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.told.append("epoch")

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.told.append("over")

"""A TRL script on groupwise: only the import has changed.

It was `from trl import GRPOConfig, GRPOTrainer`. Everything else is plain TRL: the data set with a
column `prompt`, reward functions with `completions`, columns and **kwargs, the settings, the
callback, `trainer.state.log_history`. The model is the bundled one; replace it by a hub name. A
model this small runs fastest on one thread, especially on a busy CPU.

    OMP_NUM_THREADS=1 python examples/trl_migration.py [STEPS] [FOLDER]
"""

import re
import sys

from datasets import Dataset
from transformers import TrainerCallback

from groupwise.integrations.trl import GRPOConfig, GRPOTrainer

ASK = "Put your thoughts between <reasoning> tags and the number between <answer> tags."


def problems(count: int) -> Dataset:
    """Sums as people ask for them, with their answers in a column of their own."""
    rows = []
    for i in range(count):
        a, b = 2 + i % 7, 3 + i % 5
        text = f"Tom has {a} apples. He buys {b} more apples. How many apples does Tom have now?"
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def exact(completions, answer, **kwargs):
    """1 for the right number between the answer tags."""
    texts = [completion[0]["content"] for completion in completions]
    found = [re.search(r"<answer>\s*(-?\d+)\s*</answer>", text) for text in texts]
    right = [m is not None and m.group(1) == a for m, a in zip(found, answer, strict=True)]
    kwargs["log_metric"]("answered", sum(m is not None for m in found) / len(found))
    return [float(r) for r in right]


def tagged(completions, **kwargs):
    """A little for the format."""
    return [float("</reasoning>" in c[0]["content"]) for c in completions]


class Printer(TrainerCallback):
    """Shows every log on a line."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.3f} loss {logs['loss']:.4f}")


def main(steps: int = 20, folder: str = "trl-migration") -> GRPOTrainer:
    """Train."""
    trainer = GRPOTrainer(
        model="bundled",
        reward_funcs=[exact, tagged],
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=96,
            learning_rate=3e-4,
            max_steps=steps,
            logging_steps=1,
            reward_weights=[1.0, 0.2],
            loss_type="dr_grpo",
            scale_rewards="none",
        ),
        train_dataset=problems(64),
        callbacks=[Printer],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:3]))

"""Steps of TRL's DPOTrainer and RewardTrainer on given tokens, each one when it is asked for.

Every pair is a row of its own, as their collators lay it out. Reference log-probabilities are
given, as `precompute_ref_log_probs` would have computed them. `microbatch` pairs go through the
model at once.
"""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import datasets
import torch
import trl
from channel import Channel, Memory, versions
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

DUMMY = {"prompt": "w2", "chosen": " w3", "rejected": " w4"}


class Steps:
    """A trainer whose data are given."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.memory = Memory()
        self.memory.reset()
        self.spec, self.scores = spec, spec["what"] == "reward"
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=f"{spec['model']}/tokenizer.json", pad_token="<pad>", eos_token="<end>"
        )
        common: dict[str, Any] = {
            "output_dir": spec["folder"],
            "per_device_train_batch_size": 1,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "learning_rate": 1e-6,
        }
        rows = datasets.Dataset.from_list([DUMMY])
        if self.scores:
            model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=1)
            model.config.pad_token_id = tokenizer.pad_token_id
            torch.nn.init.zeros_(model.score.weight)  # as ours begins
            self.trainer: Any = trl.RewardTrainer(
                model=model,
                args=trl.RewardConfig(**common),
                train_dataset=rows,
                processing_class=tokenizer,
            )
        else:
            args = trl.DPOConfig(precompute_ref_log_probs=True, max_length=None, **common)
            self.trainer = trl.DPOTrainer(
                model=spec["model"], args=args, train_dataset=rows, processing_class=tokenizer
            )
        self.trainer.model.train()
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-6, fused=True)

    def pairs(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Prompt, better and worse answer of every pair."""
        return [
            (prompt, better, worse)
            for prompt, answers in zip(self.spec["prompts"], self.spec["answers"], strict=True)
            for better, worse in combinations(answers, 2)
        ]

    def inputs(self, pairs: list[tuple[list[int], list[int], list[int]]]) -> dict[str, Any]:
        """A batch as TRL's collators make it."""
        whole = [prompt + better for prompt, better, _ in pairs]
        whole += [prompt + worse for prompt, _, worse in pairs]
        ids = torch.tensor(whole)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.scores:
            return made
        mask = torch.ones_like(ids)
        mask[:, : len(pairs[0][0])] = 0
        zero = torch.zeros(len(pairs))
        return made | {
            "completion_mask": mask,
            "ref_chosen_logps": zero,
            "ref_rejected_logps": zero,
        }

    def step(self) -> dict[str, Any]:
        """One optimizer step on all the data."""
        self.memory.reset()
        start = time.perf_counter()
        pairs, size = self.pairs(), self.spec["microbatch"]
        total = 0.0
        for first in range(0, len(pairs), size):
            part = pairs[first : first + size]
            inputs = self.inputs(part)
            if self.scores:
                loss = self.trainer.compute_loss(self.trainer.model, inputs)
            else:
                loss = self.trainer._compute_loss(self.trainer.model, inputs, False)
            share = loss * (len(part) / len(pairs))
            share.backward()
            total += float(share.detach())
        torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "seconds": time.perf_counter() - start,
            "peak_mb": self.memory.peak(),
            "loss": total,
        }


def main() -> None:
    channel = Channel()
    steps = Steps(channel.spec)
    names = ("trl", "transformers", "torch")
    channel.serve({"hello": lambda: {"versions": versions(*names)}, "step": lambda: steps.step()})


if __name__ == "__main__":
    main()

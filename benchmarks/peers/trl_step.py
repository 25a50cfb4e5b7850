"""Training steps of TRL's GRPOTrainer, one at a time: each waits until it is asked for.

A step is timed from the trainer's `on_step_begin` to its `on_step_end`: generation, rewards,
forward and backward passes, optimizer. Loading data and logging stay outside.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from channel import Channel, Memory, versions
from datasets import Dataset
from tasks import REWARDS, tokenizer_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """GRPOTrainer, with the time spent in its stages."""

    stages: dict[str, float] = {}

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = super()._generate(*args, **kwargs)
        self.stages["rollout"] = self.stages.get("rollout", 0.0) + time.perf_counter() - start
        return out

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = super()._calculate_rewards(*args, **kwargs)
        self.stages["reward"] = self.stages.get("reward", 0.0) + time.perf_counter() - start
        return out

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completions: list[list[int]]) -> list[list[float]]:
        """Of completions of equal length, by the pass that training uses."""
        ids = torch.tensor([prompt + tokens for tokens in completions], device=self.model.device)
        logp = self._get_per_token_logps_and_entropies(
            self.model, ids, torch.ones_like(ids), len(completions[0])
        )[0]
        return logp.float().tolist()


class Turns(TrainerCallback):
    """Holds every step back until the benchmark asks for it, and reports it."""

    def __init__(self, channel: Channel, memory: Memory) -> None:
        self.channel, self.memory, self.start = channel, memory, 0.0
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        while (message := self.channel.receive()) is not None:
            what = message.pop("do")
            if what == "hello":
                self.channel.send(versions=versions("torch", "transformers", "accelerate", "trl"))
            elif what == "logprobs":
                self.channel.send(logprobs=self.trainer.logprobs(**message))
            else:
                break
        if message is None:
            raise SystemExit(0)
        self.trainer.stages.clear()
        self.start = time.perf_counter()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        seconds = time.perf_counter() - self.start
        stages = dict(self.trainer.stages)
        stages["update"] = seconds - sum(stages.values())
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.channel.send(
            seconds=seconds,
            stages=stages,
            peak_mb=self.memory.peak(),
            tokens=rows * self.trainer._metrics["train"]["completions/mean_length"][-1],
        )
        return control


def low_rank(rank: int) -> Any:
    """An adapter of every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def four_bits(compute: torch.dtype) -> Any:
    """QLoRA's storage: normal-float 4 with doubly quantised scales."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def main() -> None:
    channel = Channel()
    spec, memory = channel.spec, Memory()
    memory.reset()
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    rows = spec["group"] * len(spec["prompts"])
    per_pass = spec["settings"].pop("rows_per_pass", 8)
    config = GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=rows // per_pass,
        num_generations=spec["group"],
        max_completion_length=spec["max_tokens"],
        learning_rate=spec["learning_rate"],
        max_steps=1_000_000,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        seed=spec["seed"],
        **spec["settings"],
    )
    # Weights in float32, as TRL loads them by default; lower precision is autocast's.
    stored = {"dtype": torch.float32}
    if spec["quantized"]:
        # Products in the precision of the rest: bfloat16 where TRL's autocast is on.
        compute = torch.bfloat16 if config.bf16 else torch.float32
        stored = {"dtype": compute, "quantization_config": four_bits(compute)}
    model = AutoModelForCausalLM.from_pretrained(spec["model"], **stored)
    for layer in model.modules():
        # On processors with AVX512-BF16, bitsandbytes would lay weights out for evaluation, and no
        # gradient would pass.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    turns = Turns(channel, memory)
    turns.trainer = Timed(
        model=model,
        args=config,
        reward_funcs=REWARDS[spec["reward"]],
        train_dataset=Dataset.from_list(
            [
                {"prompt": text, "answer": answer}
                for text, answer in zip(spec["prompts"], spec["answers"], strict=True)
            ]
        ),
        peft_config=None if spec["rank"] is None else low_rank(spec["rank"]),
        processing_class=tokenizer_of(spec["model"], endless=spec["endless"]),
        callbacks=[turns],
    )
    turns.trainer.train()


if __name__ == "__main__":
    main()

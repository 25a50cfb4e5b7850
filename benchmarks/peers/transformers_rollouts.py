"""Rollouts by `transformers`: `generate` and its continuous batching, `generate_batch`."""

from __future__ import annotations

import time
from typing import Any

import torch
from channel import Channel, Memory, until_end, versions
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE, BATCH_TOKENS = 64, 512
"""Of continuous batching on a CPU: tokens per page of the cache and per forward pass."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rollouts:
    """One model; `batching` chooses between the two ways."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.memory = Memory()
        model: Any = AutoModelForCausalLM.from_pretrained(
            spec["model"], dtype=DTYPES[spec["precision"]]
        )
        self.model = model.to(self.device).eval()
        self.batching = spec["batching"]

    def hello(self) -> dict[str, Any]:
        return {"versions": versions("torch", "transformers")}

    def run(
        self,
        *,
        prompts: list[list[int]],
        group: int,
        max_tokens: int,
        ends: list[int],
        rows: int,
        seed: int,
        greedy: bool = False,
    ) -> dict[str, Any]:
        """Complete every prompt `group` times, `rows` rows at a time."""
        torch.manual_seed(seed)
        config = GenerationConfig(
            do_sample=not greedy,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
        # What the given configuration leaves open is filled from the model's own.
        self.model.generation_config = config
        wanted = [prompt for prompt in prompts for _ in range(group)]
        self.memory.reset()
        start = time.perf_counter()
        if self.batching:
            made = self._continuous(wanted, config, rows=rows)
        else:
            parts = [wanted[at : at + rows] for at in range(0, len(wanted), rows)]
            made = [tokens for part in parts for tokens in self._padded(part, config)]
        made = [until_end(tokens, ends) for tokens in made]
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "tokens": sum(map(len, made)),
            "peak_mb": self.memory.peak(),
            "completions": made if greedy else None,
        }

    @torch.inference_mode()
    def _padded(self, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        real = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        out = self.model.generate(input_ids=ids, attention_mask=real, generation_config=config)
        return out[:, width:].tolist()

    def _continuous(
        self, prompts: list[list[int]], config: GenerationConfig, *, rows: int
    ) -> list[list[int]]:
        # -1 is this engine's way to say that no token ends a completion.
        config.eos_token_id = config.eos_token_id or -1
        settings = ContinuousBatchingConfig(max_requests_per_batch=rows, seed=torch.initial_seed())
        if self.device == "cpu":
            # Sized from a card's memory otherwise. A cache no larger than what `rows` rows fill is
            # what makes it fast here: attention goes over all of it.
            longest = max(map(len, prompts)) + (config.max_new_tokens or 0)
            settings.page_size = PAGE
            settings.num_blocks = min(rows, len(prompts)) * -(-longest // PAGE) + 1
            settings.max_batch_tokens = max(BATCH_TOKENS, rows)
        out = self.model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=settings
        )
        if len(out) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(out)} of {len(prompts)} prompts.")
        ordered = sorted(out.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for _, result in ordered]


def main() -> None:
    channel = Channel()
    rollouts = Rollouts(channel.spec)
    channel.serve({"hello": rollouts.hello, "run": rollouts.run})


if __name__ == "__main__":
    main()

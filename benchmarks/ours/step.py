"""Training steps of groupwise, each one when it is asked for.

A step is what a run does between two optimizer steps: generation, rewards, update, diagnostics and
the run's log on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from channel import Channel, Memory, versions
from policies import PACKAGES, batch_of, policy_of
from tasks import REWARDS

from groupwise.config import build
from groupwise.kernels.auto import Auto
from groupwise.kernels.interface import BACKENDS
from groupwise.models import AdapterSettings
from groupwise.training.prepare import prepare
from groupwise.types import Prompt


class Watching:
    """Progress that is not shown, only remembered."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, float] = {}

    def step(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics

    def log(self, text: str) -> None:
        print(text)

    def close(self) -> None: ...


class Steps:
    """A run that stands still between steps."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.memory = Memory()
        self.memory.reset()
        if without := frozenset(spec.get("without", ())):
            BACKENDS["auto"] = lambda: Auto(without=without)
        rank, quantized = spec["rank"], spec["quantized"]
        policy = policy_of(
            spec["model"],
            precision=spec["precision"],
            endless=spec["endless"],
            adapter=None if rank is None else AdapterSettings(rank=rank, alpha=2 * rank),
            quantized=quantized,
        )
        trained = {} if rank is None else {"adapter": {"rank": rank, "alpha": 2 * rank}}
        if quantized:
            trained["quantization"] = "nf4"
        config = build(
            {
                "steps": 1_000_000,
                "seed": spec["seed"],
                "prompts_per_step": len(spec["prompts"]),
                "group_size": spec["group"],
                "output": spec["folder"],
                "threads": spec["threads"],
                "model": {"path": spec["model"], "dtype": spec["precision"], **trained},
                "algorithm": {"name": "grpo@trl"},
                "sampling": {"max_tokens": spec["max_tokens"]},
                "optimizer": {"learning_rate": spec["learning_rate"]},
                **spec["settings"],
            }
        )
        prompts = [
            Prompt(id=str(place), text=text, answer=answer)
            for place, (text, answer) in enumerate(
                zip(spec["prompts"], spec["answers"], strict=True)
            )
        ]
        self.watching = Watching()
        self.trainer = prepare(
            config,
            progress=self.watching,
            policy=policy,
            functions=[REWARDS[spec["reward"]]],
            prompts=prompts,
            eval_prompts=[],
        ).trainer

    def hello(self) -> dict[str, Any]:
        return {"versions": versions(*PACKAGES)}

    def logprobs(self, *, prompt: list[int], completions: list[list[int]]) -> dict[str, Any]:
        """Of completions of equal length, by the pass that training uses."""
        batch = batch_of([prompt], completions, advantage=[1.0] * len(completions))
        logp = self.trainer.policy.evaluate(batch, {"logp"})["logp"]
        return {"logprobs": logp.float().tolist()}

    def step(self) -> dict[str, Any]:
        start, cpu = time.perf_counter(), time.process_time()
        scored = self.trainer.advance().scored
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        stages = dict(scored.seconds)
        stages["update"] = seconds - sum(stages.values())
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "stages": stages,
            "peak_mb": self.memory.peak(),
            "tokens": self.watching.metrics["tokens"],
            "computed_share": self.watching.metrics["computed_share"],
        }


def main() -> None:
    channel = Channel()
    steps = Steps(channel.spec)
    channel.serve({"hello": steps.hello, "logprobs": steps.logprobs, "step": steps.step})


if __name__ == "__main__":
    main()

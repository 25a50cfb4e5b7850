"""Rollouts by groupwise's group engine."""

from __future__ import annotations

import time
from typing import Any

import torch
from channel import Channel, Memory, versions
from policies import PACKAGES, policy_of

from groupwise.rollouts import GroupEngine
from groupwise.types import Prompt, Request, Sampling, Stream


class Rollouts:
    """One model in one engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.memory = Memory()
        self.policy = policy_of(spec["model"], precision=spec["precision"], endless=spec["endless"])

    def hello(self) -> dict[str, Any]:
        return {"versions": versions(*PACKAGES)}

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
        """Complete every prompt `group` times, at most `rows` completions at a time."""
        del ends  # Part of the policy.
        engine = GroupEngine(self.policy, max_rows=rows)
        requests = [
            Request(
                prompt=Prompt(id=str(place), text=""),
                tokens=tokens,
                group=group,
                stream=Stream(seed, 0, 0, place),
            )
            for place, tokens in enumerate(prompts)
        ]
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0 if greedy else 1.0)
        self.memory.reset()
        start = time.perf_counter()
        groups = list(engine.generate(requests, sampling))
        seconds = time.perf_counter() - start
        groups.sort(key=lambda made: made.stream.place)
        made = [list(one.tokens) for each in groups for one in each.completions]
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

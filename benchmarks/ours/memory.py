"""A run's plan of its memory, and what two of its steps then take, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from channel import MB, Channel, Memory, versions
from policies import DTYPES, PACKAGES, policy_of
from tasks import REWARDS
from transformers import AutoModelForCausalLM

from groupwise.config import Config, build
from groupwise.execution import memory_plan
from groupwise.models import Adapter, Policy, with_adapter
from groupwise.models.loading import four_bits
from groupwise.run import prepare
from groupwise.types import Prompt


class Silent:
    """Progress that is not shown."""

    def step(self, run: str, step: int, metrics: Any) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def configured(spec: dict[str, Any]) -> Config:
    """Steps in which every completion is as long as it may become and no row is left out."""
    values = {
        "prompts_per_step": len(spec["prompts"]),
        "group_size": spec["group"],
        "output": spec["folder"],
        "threads": spec["threads"],
        "model": {"path": spec["model"], **spec["settings"].pop("model", {})},
        "data": {"max_prompt_tokens": spec["prompt"]},
        "algorithm": {"name": "grpo"},
        "sampling": {"max_tokens": spec["max_tokens"]},
    }
    skip = {"skip_zero_rows": False, **spec["settings"].pop("update", {})}
    return build({**values, "update": skip, **spec["settings"]})


def policy_of_run(config: Config) -> Policy:
    """The policy of a configuration, which no token that it can write ends."""
    section = config.model
    policy = policy_of(section.path, precision=section.dtype, endless=True)
    if section.quantization is not None:
        dtype = DTYPES[section.dtype]
        small: Any = AutoModelForCausalLM.from_pretrained(
            section.path, dtype=dtype, quantization_config=four_bits(dtype)
        )
        policy = replace(policy, model=small)
    if section.adapter is not None:
        policy = with_adapter(policy, Adapter(**section.adapter.model_dump()))
    return policy


def main() -> None:
    channel = Channel()
    spec = channel.spec
    config = configured(spec)

    def plan() -> dict[str, Any]:
        found = memory_plan(config)
        parts = {**found.held, **getattr(found, found.phase)}
        sizes = {name: size / MB for name, size in parts.items() if size}
        return {"plan_mb": found.peak / MB, "phase": found.phase, "parts_mb": sizes}

    def measured() -> dict[str, Any]:
        memory = Memory()
        memory.reset()
        prompts = [Prompt(id=str(n), text=text) for n, text in enumerate(spec["prompts"])]
        run = prepare(
            config,
            progress=Silent(),
            policy=policy_of_run(config),
            functions=[REWARDS["checksum"]],
            prompts=prompts,
            eval_prompts=[],
        )
        for _ in range(2):
            run.trainer.step()
        return {"measured_mb": memory.peak()}

    channel.serve(
        {"hello": lambda: {"versions": versions(*PACKAGES)}, "plan": plan, "measured": measured}
    )


if __name__ == "__main__":
    main()

"""A run's plan of its memory, and what its steps then take, in one process."""

from __future__ import annotations

from typing import Any

import torch
from allocations import peak, traced
from channel import MB, Channel, Memory, versions
from policies import PACKAGES, policy_of
from tasks import REWARDS

from groupwise.config import Config, build
from groupwise.config.memory import memory_plan
from groupwise.models import AdapterSettings, Policy
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.prepare import Prepared, prepare
from groupwise.types import Prompt
from groupwise.updates import TorchLearner


def configured(spec: dict[str, Any]) -> Config:
    """Steps in which every completion is as long as it may become and no row is left out."""
    settings = dict(spec["settings"])
    values = {
        "prompts_per_step": len(spec["prompts"]),
        "group_size": spec["group"],
        "output": spec["folder"],
        "threads": spec["threads"],
        "model": {"path": spec["model"], **settings.pop("model", {})},
        "data": {"max_prompt_tokens": spec["prompt"]},
        "algorithm": {"name": "grpo"},
        "sampling": {"max_tokens": spec["max_tokens"]},
        "evaluation": {"prompts": 1, "samples": 1},  # steps alone are measured
    }
    skip = {"skip_zero_rows": False, **settings.pop("update", {})}
    return build({**values, "update": skip, **settings})


def policy_of_run(config: Config) -> Policy:
    """The policy of a configuration, which no token that it can write ends."""
    section = config.model
    adapter = None if section.adapter is None else AdapterSettings(**section.adapter.model_dump())
    return policy_of(
        section.path,
        precision=section.dtype,
        endless=True,
        adapter=adapter,
        quantized=section.quantization is not None,
    )


def prepared(config: Config, texts: list[str]) -> Prepared:
    """A run that is ready for its first step."""
    return prepare(
        config.model_copy(update={"prompts_per_step": len(texts)}),
        progress=NoProgress(),
        policy=policy_of_run(config),
        functions=[REWARDS["checksum"]],
        prompts=[Prompt(id=str(n), text=text) for n, text in enumerate(texts)],
        eval_prompts=[],
    )


def held(learner: TorchLearner) -> int:
    """Bytes that stay from one step to the next."""
    moments = [v for state in learner.optimizer.adam.state.values() for v in state.values()]
    tensors = [
        *learner.model.parameters(),
        *learner.model.buffers(),
        *(tensor for master in learner.optimizer.masters.values() for tensor in master.held),
        *learner.first.values(),
        *([] if learner.frozen is None else learner.frozen.parameters()),
        *(value for value in moments if isinstance(value, torch.Tensor)),
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


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
        other = {"model": spec["small"], "folder": spec["folder"] + "-small"}
        small = prepared(configured({**spec, **other}), spec["prompts"][:2])
        small.trainer.step()  # Libraries load some of their code when they are first used.
        small.close()
        memory = Memory()
        memory.reset()
        run = prepared(config, spec["prompts"])
        for _ in range(2):
            run.trainer.step()
        resident = memory.peak()
        if torch.cuda.is_available():
            return {"tensors_mb": resident}
        before = held(run.trainer.policy)
        tensors = (before + peak(traced(run.trainer.step))) / MB
        return {"tensors_mb": tensors, "resident_mb": resident}

    channel.serve(
        {"hello": lambda: {"versions": versions(*PACKAGES)}, "plan": plan, "measured": measured}
    )


if __name__ == "__main__":
    main()

"""Everything in this process, on one device: the engine and the learner share one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from groupwise.algorithms import Rules
from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.execution.heap import keep_freed_memory
from groupwise.models import Adapter, Policy, load_policy
from groupwise.rollouts import make_engine
from groupwise.types import Engine
from groupwise.updates import OptimizerSettings, TorchLearner


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Who writes and who learns."""

    policy: Policy
    engine: Engine
    learner: TorchLearner


def connect(config: Config, rules: Rules, *, policy: Policy | None = None) -> Connected:
    """Load the policy of a configuration and build the engine and the learner around it.

    Args:
        policy: a model at hand; None loads `config.model`.

    Raises:
        UsageError: the model cannot be loaded, or cannot be trained as asked.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if best_device().type == "cpu":
        keep_freed_memory()
    policy = policy or load_configured(config)
    if config.model.quantization is None:
        policy.model.to(best_device())
    learner = TorchLearner(
        policy,
        optimizer=optimizer_settings(config),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        temperature=config.sampling.temperature,
        reference=_reference(config, rules, policy.model),
        gradient_checkpointing=config.update.gradient_checkpointing,
        skip_inert_rows=config.update.skip_zero_rows,
    )
    engine = make_engine(policy, name=config.engine.name, max_rows=config.engine.max_rows)
    return Connected(policy=policy, engine=engine, learner=learner)


def load_configured(config: Config) -> Policy:
    """The policy of the model section, adapter and quantisation included."""
    section, adapter = config.model, None
    if section.adapter is not None:
        adapter = Adapter(**section.adapter.model_dump())
    return load_policy(
        section.path,
        dtype=section.dtype,
        trust_remote_code=section.trust_remote_code,
        adapter=adapter,
        quantization=section.quantization,
    )


def best_device() -> torch.device:
    """A CUDA card where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def optimizer_settings(config: Config) -> OptimizerSettings:
    """The optimizer section, with the number of optimiser steps that the run will take."""
    section = config.optimizer
    return OptimizerSettings(
        learning_rate=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=section.warmup_steps,
        schedule=section.schedule,
        total_steps=config.steps * config.update.epochs * config.update.minibatches,
        final_fraction=section.final_fraction,
    )


def _reference(config: Config, rules: Rules, model: Any) -> Any:
    """Where π_ref comes from, if it is needed at all."""
    wanted = config.model.reference
    if wanted == "none" and rules.needs_reference:
        raise UsageError(
            f"model.reference = 'none': algorithm {config.algorithm.name!r} has a KL term; set "
            "model.reference = 'auto', or algorithm.divergence.name = 'none'."
        )
    if wanted == "none" or (wanted == "auto" and not rules.needs_reference):
        return "none"
    return "adapter" if hasattr(model, "disable_adapter") else "frozen"

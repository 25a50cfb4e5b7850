"""Engine, learner and scorer of a configuration, in one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from groupwise.algorithms import BoundAlgorithm
from groupwise.config import Config
from groupwise.config.pool import check_limits
from groupwise.config.preferences import compares_with_reference
from groupwise.environments import Environment, build_environment
from groupwise.errors import UsageError, warn
from groupwise.kernels import keep_freed_memory, select
from groupwise.models import (
    Policy,
    check_same_tokenizer,
    is_adapted,
    load_policy,
    load_scorer,
    score_layer,
    scorer_of,
)
from groupwise.models.devices import best_device
from groupwise.models.seeds import own_random_numbers
from groupwise.prompts.templates import fix_variables
from groupwise.registry import FunctionSpec
from groupwise.rewards import REWARDS, Scorer, build_scorer, from_functions
from groupwise.rewards.scoring.adapters import place_of
from groupwise.rewards.scoring.pool import Start
from groupwise.rollouts import make_engine
from groupwise.rollouts.tools import ToolEngine
from groupwise.settings import EnvironmentSettings, OptimizerSettings, SecondLearnerSettings
from groupwise.types import Engine, Learner
from groupwise.updates import Score, TorchLearner
from groupwise.updates.heads import Read

MadeLearner = TypeVar("MadeLearner", bound=TorchLearner)


def second_model(config: Config, policy: Policy, section: str) -> Policy:
    """The initial model of a second learner: the one that its section names, or a copy of the
    policy.

    Raises:
        UsageError: it cannot be loaded, or its tokenizer differs from the policy's.
    """
    own: SecondLearnerSettings = getattr(config, section)
    whole = not is_adapted(policy.model) and config.model.quantization is None
    if own.model is None and own.adapter is None and whole:
        return scorer_of(policy, kind="token")
    path = own.model or config.model.path
    revision = None if own.model else config.model.revision
    with own_random_numbers(config.seed):  # adapters are initialised at random
        try:
            found = load_scorer(
                path,
                kind="token",
                revision=revision,
                dtype=config.model.dtype,
                trust_remote_code=config.model.trust_remote_code,
                adapter=own.adapter,
                attention=config.model.attention,
            )
        except UsageError as error:
            where = f"{section}.model" if own.model else "model.path"
            raise UsageError(str(error).replace("model.path", where, 1)) from None
    check_same_tokenizer(policy.tokenizer, found.tokenizer, where=f"{section}.model = {path!r}")
    found.model.to(best_device())
    return found


def second_learner(
    config: Config,
    model: Policy,
    *,
    optimizer: OptimizerSettings,
    total_steps: int,
    reads: Collection[Read] = ("before",),
    start: float = 0.0,
    make: Callable[..., MadeLearner] = TorchLearner,
) -> MadeLearner:
    """The learner of a second model, which computes one output before each token of the policy.

    Args:
        reads: the states with an output (see `Score`).
        start: the output everywhere of a head that has not been trained.
        make: the class, if it is not the one for a single process.
    """
    layer = score_layer(model.model)
    if layer.bias is not None and not layer.weight.any() and not layer.bias.any():
        with torch.no_grad():
            layer.bias.fill_(start)
    return make(
        model,
        optimizer=optimizer,
        total_steps=total_steps,
        head=Score(model.model, reads=reads),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        gradient_checkpointing=config.update.gradient_checkpointing,
        share_equal_rows=config.update.share_equal_rows,
        dropout_seed=config.seed,
    )


class Restartable(Learner, Protocol):
    """A learner that can be given another optimizer."""

    def restart(self, optimizer: OptimizerSettings, *, total_steps: int) -> None:
        """As `TorchLearner.restart`."""
        ...


SecondLearners = Callable[..., Restartable]
"""From the arguments of `second_learner`, without `make`, to the second learner of a run."""


@dataclass(frozen=True, kw_only=True)
class Connected:
    """The policy with its engine and its learner.

    Attributes:
        second: makes the second learner, if the algorithm has one.
        start_workers: starts the workers of rewards; None for those of this machine.
    """

    policy: Policy
    engine: Engine
    learner: Learner
    second: SecondLearners = second_learner
    start_workers: Start | None = None


def connect(
    config: Config, algorithm: BoundAlgorithm, *, policy: Policy | None = None
) -> Connected:
    """Load the policy of a configuration and build the engine and the learner around it.

    Args:
        policy: a loaded model; None loads `config.model`.

    Raises:
        UsageError: the model cannot be loaded, or cannot be trained as asked.
    """
    policy = policy or load_configured(config)
    select_device(config, policy)
    learner = configured_learner(config, algorithm, policy)
    engine = configured_engine(config, policy)
    return Connected(policy=policy, engine=engine, learner=learner)


def select_device(config: Config, policy: Policy) -> None:
    """Choose kernels and threads, and move the model to its device."""
    select(config.model.kernels)
    if config.threads is not None:  # A resumed run keeps those it had.
        torch.set_num_threads(config.threads)
    if best_device().type == "cpu":
        keep_freed_memory()
        if config.optimizer.offload:
            warn(
                "optimizer.offload = true: needs a CUDA GPU; on this machine everything is in CPU "
                "memory already. Remove it."
            )
    if config.model.quantization is None:
        policy.model.to(best_device())


def configured_learner(
    config: Config,
    algorithm: BoundAlgorithm,
    policy: Policy,
    *,
    make: Callable[..., MadeLearner] = TorchLearner,
) -> MadeLearner:
    """The learner of a configuration.

    Args:
        make: the class, if it is not the one for a single process.

    Raises:
        UsageError: the model cannot be trained as asked.
    """
    learner = make(
        policy,
        optimizer=config.optimizer,
        total_steps=optimizer_steps(config),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        temperature=config.sampling.temperature,
        reference=reference_kind(config, algorithm, policy.model),
        gradient_checkpointing=config.update.gradient_checkpointing,
        # Experts are balanced over all tokens, those without an advantage too.
        skip_inert_rows=config.update.skip_zero_rows and not config.update.router_aux_loss,
        router_aux_loss=config.update.router_aux_loss,
        share_equal_rows=config.update.share_equal_rows,
        dropout_seed=config.seed,
    )
    if config.model.head_dtype == "float32" and not learner.reader.packs:
        raise UsageError(
            "model.head_dtype = 'float32': the head of this model cannot be computed separately; "
            "set model.head_dtype = 'model'."
        )
    return learner


def configured_engine(config: Config, policy: Policy) -> Engine:
    """The engine of a configuration, with its environment if it has one.

    Raises:
        UsageError: a setting of the environment is invalid, or something that it needs is missing.
    """
    tools = config.environment
    longest = config.data.max_prompt_tokens
    injected = 0 if tools is None else tools.max_injected_tokens
    length = None if longest is None else longest + config.sampling.max_tokens + injected
    if tools is None:
        return make_engine(policy, config.engine, length=length)
    environment = make_environment(tools)
    engine = make_engine(policy, config.engine, length=length)
    return ToolEngine(
        engine, environment, policy=policy, settings=tools, max_rows=config.engine.max_rows
    )


def make_environment(settings: EnvironmentSettings) -> Environment:
    """The environment of a configuration."""
    chosen = FunctionSpec(name=settings.name, settings=settings.settings)
    return build_environment(chosen, where="environment")


def load_configured(config: Config) -> Policy:
    """The policy of a configuration, with adapter and quantisation."""
    model = config.model
    select(model.kernels)
    policy = load_policy(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        adapter=model.adapter,
        quantization=model.quantization,
        attention=model.attention,
        head_dtype=model.head_dtype,
    )
    fix_variables(policy.tokenizer, config.data.chat_template_kwargs)
    return policy


def load_to_answer(config: Config, model: str | Path) -> Policy:
    """A model that answers the prompts of a recipe without being trained, on its device.

    Args:
        model: folder, hub name or "bundled"; `model.revision` applies to the recipe's own model.
    """
    section = config.model
    policy = load_policy(
        model,
        revision=section.revision if str(model) == section.path else None,
        dtype=section.dtype,
        trust_remote_code=section.trust_remote_code,
    )
    fix_variables(policy.tokenizer, config.data.chat_template_kwargs)
    policy.model.to(best_device())
    return policy


def optimizer_steps(config: Config) -> int:
    """The number of optimizer steps of a run."""
    return config.steps * config.update.epochs * config.update.minibatches


def reference_kind(config: Config, algorithm: BoundAlgorithm, model: Any) -> Any:
    """The source of π_ref, or None if no reference is needed."""
    wanted = config.model.reference
    online = compares_with_reference(config)
    if wanted == "none" and online:
        raise UsageError(
            "model.reference = 'none': preference.loss needs a reference; set "
            "model.reference = 'auto', or preference.loss.name = 'simpo' or 'orpo'."
        )
    if wanted == "none" and "ref_logp" in algorithm.needs:
        raise UsageError(
            f"model.reference = 'none': algorithm {config.algorithm.name!r} has a KL term; set "
            "model.reference = 'auto', or algorithm.divergence.name = 'none'."
        )
    needed = online or "ref_logp" in algorithm.needs
    if wanted == "none" or (wanted == "auto" and not needed):
        return "none"
    return "adapter" if is_adapted(model) else "frozen"


Reward = str | Callable[..., Any]


def make_scorer(
    config: Config, functions: Sequence[Reward] = (), connected: Connected | None = None
) -> Scorer:
    """The scorer of a configuration, or of given functions.

    Args:
        connected: whose `start_workers` starts the workers.

    Raises:
        UsageError: there is no reward.
    """
    pool, start = config.reward_pool, None if connected is None else connected.start_workers
    limits: dict[str, Any] = {
        "workers": pool.workers if start is None else max(1, pool.workers),
        "timeout_s": pool.timeout_s,
        "memory_mb": pool.memory_mb,
        "max_tokens": config.sampling.max_tokens,
        "start": start,
    }
    if functions:
        if start is None:
            check_limits(pool, [place_of(f) for f in functions if callable(f)])
        return from_functions(list(functions), **limits)
    if not config.rewards:
        raise UsageError(
            "rewards = []: a run needs at least one reward; add a section [[rewards]] with a name. "
            f"Known: {', '.join(REWARDS.names())}."
        )
    return build_scorer(config.rewards, combine=config.combine, **limits)

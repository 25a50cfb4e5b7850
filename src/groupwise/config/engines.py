"""Checks of the engine's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.errors import UsageError, suggest

if TYPE_CHECKING:
    from groupwise.config.schema import Config

VLLM_ARGUMENTS = frozenset(
    {
        "--attention-backend",
        "--block-size",
        "--cpu-offload-gb",
        "--data-parallel-size",
        "--disable-custom-all-reduce",
        "--disable-log-requests",
        "--disable-log-stats",
        "--enable-chunked-prefill",
        "--enable-expert-parallel",
        "--enforce-eager",
        "--kv-cache-dtype",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--model-impl",
        "--no-enable-chunked-prefill",
        "--num-gpu-blocks-override",
        "--pipeline-parallel-size",
        "--seed",
        "--swap-space",
        "--tensor-parallel-size",
    }
)
"""Arguments of `vllm serve` that a recipe may set: they affect speed and memory only. Others could
open the server to the network, load plugins or run code."""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_registered(config: Config) -> None:
    """Raise an error for an engine or kernels that are not registered.

    Raises:
        UsageError: with the registered names.
    """
    from groupwise.kernels import BACKENDS

    known = {*BACKENDS, type(config.model)().kernels}  # the default may have been deleted
    if config.model.kernels not in known:
        raise UsageError(
            f"model.kernels = {config.model.kernels!r}: no such kernels; "
            + suggest(config.model.kernels, known)
        )
    if config.engine.name == type(config.engine)().name:
        return  # engines import transformers, which takes seconds
    from groupwise.rollouts.engines.registry import find_engine

    find_engine(config.engine.name)


def check_engine(config: Config) -> None:
    """Raise an error for settings that vLLM does not support, and for vLLM settings with other
    engines.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    engine = config.engine
    if engine.name != "vllm":
        fields = type(engine).model_fields
        for name in sorted(fields.keys() - {"name", "max_rows"}):
            if getattr(engine, name) != fields[name].default:
                raise UsageError(
                    f"engine.{name} = {getattr(engine, name)!r}: applies to vLLM only; set "
                    "engine.name = 'vllm'."
                )
        return
    watchdog = config.watchdog
    if watchdog.stop and watchdog.limit_minutes <= engine.patience_minutes:
        raise UsageError(
            f"watchdog.limit_minutes = {watchdog.limit_minutes:g}: must be greater than "
            "engine.patience_minutes, or the run ends while it waits for a server that does not "
            "answer (engine.patience_minutes = "
            f"{engine.patience_minutes:g}); raise the former or lower the latter."
        )
    if config.cluster is not None and engine.server is not None:
        raise UsageError(
            f"engine.server = {engine.server!r}: replicas of [cluster] cannot share a server; set "
            "engine.python, so that each of them starts its own."
        )
    if engine.server is not None and engine.python is not None:
        raise UsageError(
            f"engine.server = {engine.server!r}: cannot be combined with engine.python; use a "
            "running server, or start one."
        )
    for argument in engine.arguments:
        name = argument.partition("=")[0]
        if name.startswith("-") and not _is_number(name) and name not in VLLM_ARGUMENTS:
            raise UsageError(
                f"engine.arguments = {argument!r}: is not allowed; {suggest(name, VLLM_ARGUMENTS)}"
            )


def check_support(config: Config) -> None:
    """Raise an error for truncated sampling with vLLM in training.

    Evaluation and `groupwise sample` have no learner, so they allow it.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    if config.engine.name != "vllm":
        return
    sampling = config.sampling
    for name, free in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(sampling, name) != free:
            raise UsageError(
                f"sampling.{name} = {getattr(sampling, name)!r}: vLLM does not report which "
                "tokens it excluded, so the learner would compute probabilities of another "
                f"distribution; set sampling.{name} = {free!r}, or engine.name = 'group'."
            )

"""Losses that only the process of the training loop can compute."""

from __future__ import annotations

import typing

from groupwise.errors import UsageError

if typing.TYPE_CHECKING:
    from groupwise.config.schema import Config


def bound_to_one_process(config: Config) -> str | None:
    """The setting whose loss cannot be sent to another process, or None."""
    if config.preference is not None and config.preference.online:
        return "preference.online = true"
    if config.distillation is not None and config.distillation.top_k is not None:
        return f"distillation.top_k = {config.distillation.top_k}"
    return None


def check_processes(config: Config) -> None:
    """Raise an error for a cluster with a loss that only one process can compute.

    Raises:
        UsageError: with the setting to change.
    """
    setting = bound_to_one_process(config)
    if setting is not None and config.cluster is not None:
        raise UsageError(
            f"{setting}: cannot be combined with [cluster], because its loss cannot be sent to "
            "other processes; remove one of the two."
        )

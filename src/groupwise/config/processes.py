"""What is computed in the process of the loop alone, and cannot be spread over several."""

from __future__ import annotations

import typing

from groupwise.errors import UsageError

if typing.TYPE_CHECKING:
    from groupwise.config.schema import Config


def bound_to_one_process(config: Config) -> str | None:
    """The setting whose loss no other process can be sent; None where there is none."""
    if config.preference is not None and config.preference.online:
        return "preference.online = true"
    if config.distillation is not None and config.distillation.top_k is not None:
        return f"distillation.top_k = {config.distillation.top_k}"
    return None


def check_processes(config: Config) -> None:
    """Refuse a cluster for a loss that one process computes.

    Raises:
        UsageError: with the setting to change.
    """
    setting = bound_to_one_process(config)
    if setting is not None and config.cluster is not None:
        raise UsageError(
            f"{setting}: its loss cannot be sent to the processes of [cluster]; leave out one of "
            "the two."
        )

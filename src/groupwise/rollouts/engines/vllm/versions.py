"""Versions of vLLM that are supported."""

from __future__ import annotations

import re

from groupwise.errors import UsageError

OLDEST = (0, 15)
"""The oldest version that the extra `vllm` allows."""
OLDEST_RECEIVER = (0, 32)
"""The oldest version whose weight-transfer protocol was tested."""


def check_version(version: str, *, where: str, oldest: tuple[int, int] = OLDEST) -> None:
    """Refuse a vLLM that is too old; a version that is not a number (a branch build) passes.

    Raises:
        UsageError: older than `oldest`.

    Example:
        >>> check_version("0.8.2", where="engine.python")
        Traceback (most recent call last):
        ...
        groupwise.errors.UsageError: engine.python: is vLLM 0.8.2; at least 0.15 is needed.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < oldest:
        needed = ".".join(map(str, oldest))
        raise UsageError(f"{where}: is vLLM {version}; at least {needed} is needed.")

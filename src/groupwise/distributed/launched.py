"""Whether `torchrun` started this process; light to import."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether this process is one of several that `torchrun` started."""
    given = os.environ
    size = given.get("WORLD_SIZE", "1")
    return size.isdecimal() and int(size) > 1 and {"RANK", "MASTER_ADDR"} <= given.keys()


def follows() -> bool:
    """Whether this process is one of several, and not the first."""
    return launched() and os.environ["RANK"] != "0"

"""Random numbers that do not affect those of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_random_numbers(seed: int | None = None) -> Iterator[None]:
    """A context in which numbers are drawn from `seed`; afterwards the generators are as before.

    The states of the CPU and of the current card are kept. `fork_rng` by itself keeps those of all
    cards: it opens a context on each, which takes hundreds of MiB there, and warns.

    Args:
        seed: None continues from the present state.

    Example:
        >>> with own_random_numbers(0):
        ...     first = torch.rand(1)
        >>> with own_random_numbers(0):
        ...     assert torch.equal(first, torch.rand(1))
    """
    cards = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cards):
        if seed is not None:
            torch.manual_seed(seed)
        yield

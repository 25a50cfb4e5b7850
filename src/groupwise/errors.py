"""The errors a user can meet, each with the exit code that the command gives it.

GroupwiseError            exit 1   something failed while running
├── UsageError            exit 2   a setting, a file or an argument is wrong; nothing was started
├── RewardError           exit 1   a reward broke its contract (count of values, type, no verdict)
├── ModelError            exit 1   a model or tokenizer cannot be used for what was asked
└── RunError              exit 1   a run cannot go on (disk, checkpoint, non-finite numbers)

A message reads `where = value: what must hold; did you mean X? Known: a, b, c.` and never needs a
traceback to be understood; `--debug` shows one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GroupwiseError(Exception):
    """Base of every error that groupwise raises on purpose."""

    exit_code = 1


class UsageError(GroupwiseError, ValueError):
    """A setting, a file or an argument is wrong; raised before any work starts."""

    exit_code = 2


class RewardError(GroupwiseError):
    """A reward broke its contract: wrong number of values, wrong type, or nothing it scored was
    usable."""


class ModelError(GroupwiseError):
    """A model or its tokenizer cannot be used for what was asked of it."""


class RunError(GroupwiseError):
    """A run cannot go on; what it had learned so far is in its last checkpoint."""


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean X? Known: …` for a name that is not among the known ones.

    Example:
        >>> suggest("gpro", ["grpo", "dapo"])
        'did you mean grpo? Known: dapo, grpo.'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean {near[0]}? " if near else "") + f"Known: {', '.join(names) or 'none'}."

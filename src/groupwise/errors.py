"""The errors a user can meet, each with the exit code that the command gives it.

GroupwiseError            exit 1   something failed while running
├── UsageError            exit 2   a setting, a file or an argument is wrong; nothing was started
├── RewardError           exit 1   a reward broke its contract (count of values, type, no verdict)
├── ModelError            exit 1   a model or tokenizer cannot be used for what was asked
└── RunError              exit 1   a run cannot continue (disk, checkpoint, non-finite numbers)

A message reads `where = value: what must hold; did you mean X? Known: a, b, c.` and never needs a
traceback to be understood; `--debug` shows one.
"""

from __future__ import annotations

import difflib
import inspect
import os
import shlex
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path


class GroupwiseError(Exception):
    """Base of every error that groupwise raises on purpose."""

    exit_code = 1


class UsageError(GroupwiseError, ValueError):
    """A setting, a file or an argument is wrong; raised before any work starts."""

    exit_code = 2


class RewardError(GroupwiseError):
    """A reward broke its contract: wrong number of values, wrong type, or no usable score."""


class ModelError(GroupwiseError):
    """A model or its tokenizer cannot be used for what was asked of it."""


class RunError(GroupwiseError):
    """A run cannot continue; its last checkpoint keeps what it has learned."""


_PACKAGE = f"{Path(__file__).parent}{os.sep}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line of the caller's code which led into groupwise."""
    frame, level, outermost = inspect.currentframe(), 1, 1
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=outermost + 1)


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or the type of the error if it has
    none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def install_command(extra: str) -> str:
    """The command that installs an extra of groupwise, for messages; in a checkout, from there.

    Example:
        >>> install_command("ray").endswith("[ray]'")
        True
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install 'groupwise[{extra}]'"


def suggest(name: str, known: Iterable[str], *, meant: str = "") -> str:
    """`did you mean X? Known: …` for a name that is not among the known ones.

    Case is ignored; of equally close names, the one with the same letters is suggested.

    Args:
        meant: the suggestion, if it is certain and not among the known names.

    Example:
        >>> suggest("gpro", ["grpo", "gspo"])
        'did you mean grpo? Known: grpo, gspo.'
        >>> suggest("ppo", ["maxrl"])
        'known: maxrl.'
    """
    names = sorted(known)
    listed = ", ".join(names) or "none"
    meant = meant or _nearest(name, names)
    return f"did you mean {meant}? Known: {listed}." if meant else f"known: {listed}."


def _nearest(name: str, names: Sequence[str]) -> str:
    folded = {known.lower(): known for known in reversed(names)}
    near = difflib.get_close_matches(name.lower(), folded, n=len(folded) or 1, cutoff=0.5)
    letters = sorted(name.lower())
    return folded[max(near, key=lambda known: sorted(known) == letters)] if near else ""

"""Errors that do not end a run."""

from groupwise.errors import RunError


class RankLost(RunError):
    """A rank of the learner died, which ends the group, or a process died while it started. The run
    starts again by itself, from its checkpoint if there is one."""


class TransferError(RunError):
    """Weights did not arrive at a replica as they were sent. Another replica takes its place."""

"""The error after which a run starts again by itself, from its checkpoint if there is one."""

from groupwise.errors import RunError


class RankLost(RunError):
    """A rank of the learner died, which ends the group, or a process died while it started."""

"""The error after which a run starts again by itself, from its checkpoint if there is one."""

from groupwise.errors import RunError


class RankLost(RunError):
    """A rank of the learner has died, and with it the group; or a process that was starting."""

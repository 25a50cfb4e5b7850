"""The error after which a run continues from its checkpoint by itself."""

from groupwise.errors import RunError


class RankLost(RunError):
    """A rank of the learner has died, and with it the group."""

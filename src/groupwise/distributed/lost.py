"""The error after which a run resumes automatically from its checkpoint."""

from groupwise.errors import RunError


class RankLost(RunError):
    """A rank of the learner has died, and with it the group."""

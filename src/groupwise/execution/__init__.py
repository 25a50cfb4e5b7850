"""Where a run happens: functions from a configuration to the engine and the learner that serve
it."""

from groupwise.execution.local import Connected, connect

__all__ = ["Connected", "connect"]

"""Where a run happens: functions from a configuration to the engine and the learner that serve
it."""

from groupwise.execution.local import Connected, best_device, connect, load_configured

__all__ = ["Connected", "best_device", "connect", "load_configured"]

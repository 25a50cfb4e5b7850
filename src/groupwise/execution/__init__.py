"""Where a run happens: functions from a configuration to the engine and the learner that serve
it."""

from groupwise.execution.local import (
    Connected,
    best_device,
    configured_engine,
    connect,
    load_configured,
)
from groupwise.execution.memory import MemoryPlan, memory_plan, reliefs

__all__ = [
    "Connected",
    "MemoryPlan",
    "best_device",
    "configured_engine",
    "connect",
    "load_configured",
    "memory_plan",
    "reliefs",
]

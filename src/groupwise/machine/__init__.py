"""What this machine allows a process; light to import, because the command asks before torch is
loaded."""

from groupwise.machine.cores import cgroups, cpu_quota, usable_cores

__all__ = ["cgroups", "cpu_quota", "usable_cores"]

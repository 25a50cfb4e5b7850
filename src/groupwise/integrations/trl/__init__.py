"""TRL's names on groupwise, and groupwise's advantages in TRL's trainer.

A script for TRL runs with `from groupwise.integrations.trl import GRPOConfig, GRPOTrainer` in place
of its import; TRL itself is not needed. docs/trl.md lists the counterpart of every setting.
"""

from groupwise.integrations.trl.advantage import with_advantage
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "with_advantage"]

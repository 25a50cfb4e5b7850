"""TRL's names on groupwise, and groupwise's advantages in TRL's trainer."""

from groupwise.integrations.trl.advantage import with_advantage
from groupwise.integrations.trl.config import GRPOConfig

__all__ = ["GRPOConfig", "with_advantage"]

"""TRL's names on groupwise, and groupwise's advantages in TRL's trainer."""

from groupwise.integrations.trl.advantage import with_advantage

__all__ = ["with_advantage"]

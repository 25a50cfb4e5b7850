"""A reward that differs between completions, for models that never answer correctly."""

from zlib import crc32

from groupwise.rewards import REWARDS


@REWARDS.register
def noise(text: str) -> float:
    """A number between 0 and 1 that follows from the text."""
    return crc32(text.encode()) / 2**32

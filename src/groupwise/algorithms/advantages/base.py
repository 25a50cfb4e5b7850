"""The registry of advantages, and the data that one may ask for."""

from groupwise.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    ("rewards", "valid", "correct", "lengths", "kl", "parts", "mask", "values", "bootstrap"),
)

"""The registry of advantages."""

from groupwise.algorithms.advantages.inputs import INPUTS
from groupwise.registry import Registry

ADVANTAGES = Registry("advantage", tuple(INPUTS))

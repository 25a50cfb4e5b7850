"""The settings of a run.

`sections.py` says what they are, `building.py` checks them, `recipes.py` reads them from files.
"""

from groupwise.config.building import build
from groupwise.config.recipes import Resolved, flat, load, packaged, read, resolve
from groupwise.config.sections import Config

__all__ = ["Config", "Resolved", "build", "flat", "load", "packaged", "read", "resolve"]

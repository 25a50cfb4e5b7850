"""The settings of a run.

`schema.py` combines the sections, `building.py` validates them, `recipes.py` reads them from files.
"""

from groupwise.config.building import build
from groupwise.config.recipes import (
    flat,
    load,
    load_run,
    packaged,
    read,
    resolve,
    trusted_overrides,
)
from groupwise.config.reference import reference
from groupwise.config.schema import Config, free_to_change

__all__ = [
    "Config",
    "build",
    "flat",
    "free_to_change",
    "load",
    "load_run",
    "packaged",
    "read",
    "reference",
    "resolve",
    "trusted_overrides",
]

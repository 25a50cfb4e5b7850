"""groupwise: reinforcement-learning post-training of reasoning language models."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.algorithms import ALGORITHMS
    from groupwise.algorithms.advantages import ADVANTAGES
    from groupwise.algorithms.filters import FILTERS
    from groupwise.algorithms.losses import (
        CORRECTIONS,
        DIVERGENCES,
        RATIOS,
        SURROGATES,
        VALUE_LOSSES,
        WEIGHTINGS,
    )
    from groupwise.algorithms.preferences import PREFERENCES
    from groupwise.algorithms.rankings import RANKINGS
    from groupwise.training.run import train

__version__ = "0.1.0"

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "CORRECTIONS",
    "DIVERGENCES",
    "FILTERS",
    "PREFERENCES",
    "RANKINGS",
    "RATIOS",
    "SURROGATES",
    "VALUE_LOSSES",
    "WEIGHTINGS",
    "train",
]

# Imported on first use, so that `import groupwise` stays quick.
_HOME = {
    "ADVANTAGES": "groupwise.algorithms.advantages",
    "ALGORITHMS": "groupwise.algorithms",
    "CORRECTIONS": "groupwise.algorithms.losses",
    "DIVERGENCES": "groupwise.algorithms.losses",
    "FILTERS": "groupwise.algorithms.filters",
    "PREFERENCES": "groupwise.algorithms.preferences",
    "RANKINGS": "groupwise.algorithms.rankings",
    "RATIOS": "groupwise.algorithms.losses",
    "SURROGATES": "groupwise.algorithms.losses",
    "VALUE_LOSSES": "groupwise.algorithms.losses",
    "WEIGHTINGS": "groupwise.algorithms.losses",
    "train": "groupwise.training.run",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        with warnings.catch_warnings():  # transformers imports it; it asks for ipywidgets
            warnings.filterwarnings("ignore", message="IProgress not found")
            import_module("tqdm.auto")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

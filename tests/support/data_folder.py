"""Real data sets and external cases are no part of the project; tests that use them may skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_file(name: str) -> Path:
    """A file of the data folder: $GROUPWISE_DATA, else ../shared/data beside the repository."""
    here = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("GROUPWISE_DATA", here.parent / "shared" / "data"))
    path = folder / name
    if not path.exists():
        pytest.skip(f"needs the data folder: {name} is not in {folder}; set GROUPWISE_DATA")
    return path

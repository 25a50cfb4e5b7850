"""Processes of runs on a Ray cluster."""

from __future__ import annotations

import contextlib

import psutil


def actors(run: int, kind: str) -> list[psutil.Process]:
    """Processes of an actor class below a run; those that are just ending are left out."""
    found = []
    for each in psutil.Process(run).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ray::{kind}" in " ".join(each.cmdline()):
                found.append(each)
    return found

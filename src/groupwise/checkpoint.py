"""Checkpoints that are either whole or not there.

A checkpoint is a folder `step-000010` holding weights (safetensors), state (tensors and plain
values, loaded without unpickling code) and a manifest with the checksum of every file. It is
written under another name, flushed to disk and renamed, so a kill at any instant leaves the one
before it intact; what a kill leaves half-written is never taken for one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.errors import RunError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a run is resumed from."""

    step: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Any]


def save(folder: Path, checkpoint: Checkpoint, *, keep_last: int) -> Path:
    """Write a checkpoint into `folder` and delete all but the newest `keep_last`.

    Raises:
        RunError: the disk is full or cannot be written; earlier checkpoints are intact.
    """
    final = folder / f"step-{checkpoint.step:06d}"
    draft = folder / f".writing-{checkpoint.step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        weights = {
            name: tensor.detach().contiguous() for name, tensor in checkpoint.weights.items()
        }
        save_file(weights, str(draft / "weights.safetensors"))
        torch.save(dict(checkpoint.state), draft / "state.pt")
        files = {path.name: _digest(path) for path in sorted(draft.iterdir())}
        manifest = {"format": FORMAT, "step": checkpoint.step, "files": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for path in (*draft.iterdir(), draft):
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(
            f"checkpoint at step {checkpoint.step}: {folder} could not be written "
            f"({error.strerror}); "
            "free some space or choose another output. Earlier checkpoints are intact."
        ) from error
    for old in _all(folder)[:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that had to be skipped."""
    skipped = []
    for path in reversed(_all(folder)):
        try:
            return load(path), skipped
        except RunError as error:
            skipped.append(str(error))
    return None, skipped


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises:
        RunError: it is damaged, incomplete, or of a format this version does not know.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise RunError(
                f"{path}: has checkpoint format {manifest['format']}, this version of groupwise "
                f"reads {FORMAT}; "
                "resume with the version that wrote it."
            )
        for name, digest in manifest["files"].items():
            if _digest(path / name) != digest:
                raise RunError(f"{path}: {name} is damaged (its checksum differs).")
        weights = load_file(str(path / "weights.safetensors"))
        state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: is incomplete ({error}).") from error
    return Checkpoint(step=int(manifest["step"]), weights=weights, state=state)


def _all(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(folder.glob("step-*")) if folder.exists() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _flush(path: Path) -> None:
    """Ask the disk to hold what the operating system has only promised."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

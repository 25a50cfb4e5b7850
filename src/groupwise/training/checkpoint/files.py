"""Checkpoints that are either complete or absent.

A checkpoint is a folder `step-000010` holding weights (safetensors), state (tensors and plain
values, loaded without unpickling code) and a manifest with the checksum of every file and of
itself. It is written under another name, flushed to disk and renamed, so a kill at any instant
leaves the previous one intact, and a partial one is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.errors import RunError, first_line
from groupwise.rundir.files import MARK, no_link

FORMAT = 3
MANIFEST, WEIGHTS, STATE = "manifest.json", "weights.safetensors", "state.pt"

WRITER_BYTES = 16 << 20
"""Upper bound, in bytes, of the memory that safetensors takes to write a file."""

State = dict[str, Any]


def _from_format_2(state: State) -> State:
    """One learner becomes several by name; the trainer's state is split by who owns it."""
    trainer, step = state["trainer"], state["step"]
    guard, alerts = trainer.get("guard", {}), trainer.get("alarms", {})
    return {
        "learners": {"policy": _by_position(state["learner"])},
        "source": state["source"],
        "evaluation": {
            "best": trainer["best"],
            "best_step": trainer.get("best_step"),
            "last": trainer.get("evaluated", step),
        },
        "monitor": {
            "moves": 2 if trainer.get("moved") else 0,
            "alerts": {**alerts, "beyond": dict(alerts.get("beyond", {}))},
            "guard": {
                "bad_steps": guard.get("lost", 0),
                "rollbacks": guard.get("rollbacks", 0),
                "norms": guard.get("norms", []),
                "first": guard.get("first", []),
            },
        },
    }


def _settings_of_format_2(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint of format 2 by their present names."""
    alerts, guards = dict(config.get("alarms", {})), dict(config.get("guards", {}))
    for section, old, new in (
        (alerts, "still_parameters", "unmoved_parameters"),
        (guards, "lost_steps", "max_bad_steps"),
    ):
        if old in section:
            section[new] = section.pop(old)
    rest = {key: value for key, value in config.items() if key != "alarms"}
    return {**rest, "alerts": alerts, "guards": guards}


def _by_position(learner: State) -> State:
    """Optimizer state has names of parameters for keys. Here it is listed in their order, which the
    optimizer alone knows, so positions become the keys that it resolves."""
    old = dict(learner["optimizer"])
    moments, masters = old.pop("adam")["state"], dict(enumerate(old["masters"]))
    return {**learner, "optimizer": {**old, "moments": moments, "masters": masters}}


_UPGRADES: Mapping[int, Callable[[State], State]] = {2: _from_format_2}
"""By older format, the function that makes its state that of the next one; the state given has the
checkpoint's step under "step"."""


class UnknownFormat(RunError):
    """A checkpoint of a version of groupwise that this one does not know."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint to resume from.

    Attributes:
        step: batches of rollouts trained on.
        weights: by learner, the parameters that learn, by name.
        state: tensors and plain values: optimizers, order of prompts, monitor.
        about: plain values that a resumed run is compared with: settings, versions, threads.
    """

    step: int
    weights: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which checkpoints are kept: the newest `last`, every multiple of `every` steps, the `best`
    one, and the one before the first step, if there is one."""

    last: int = 2
    every: int = 0
    best: int | None = None

    def __call__(self, steps: Sequence[int]) -> set[int]:
        """The steps to keep.

        Example:
            >>> sorted(RetentionPolicy(last=1, every=10, best=15)([0, 5, 10, 15, 20, 25, 30]))
            [0, 10, 15, 20, 30]
        """
        kept = {step for step in steps if step in (0, self.best)}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        return kept | set(sorted(steps)[-self.last :])


def save(
    folder: Path, checkpoint: Checkpoint, *, keep: RetentionPolicy, logs: Sequence[Path] = ()
) -> Path:
    """Write a checkpoint into `folder` and delete those that need not be kept.

    Args:
        logs: files that belong to the steps up to here; they are flushed to disk first, so that
            no checkpoint is ahead of them after a power cut.

    Raises:
        RunError: the disk is full or cannot be written; earlier checkpoints are intact.
    """
    final = _place(folder, checkpoint.step)
    draft = folder / f".writing-{checkpoint.step:06d}"
    old = folder / f".replaced-{checkpoint.step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        draft.mkdir()
        for path in logs:
            if path.exists():
                _flush(path)
        _check_memory()
        _write(draft, checkpoint)
        if final.exists():
            final.rename(old)
        draft.rename(final)
        _flush(folder)
        shutil.rmtree(old, ignore_errors=True)
        _mark(folder.parent)
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        earlier = [step for step in steps(folder) if step != checkpoint.step]
        last = f"Checkpoint {earlier[-1]} is intact" if earlier else "No other one exists"
        raise RunError(
            f"checkpoint at step {checkpoint.step}: {folder} could not be written "
            f"({_reason(error)}); {_remedy(error)}. {last}."
        ) from error
    prune(folder, keep=keep, step=checkpoint.step)
    return final


def _mark(run: Path) -> None:
    """Note in a run directory that a checkpoint was written, so that a resumed run can tell lost
    checkpoints from a run that was killed before its first one."""
    if not (run / MARK).exists():
        with suppress(OSError), open(run / MARK, "xb", opener=no_link):
            pass


def prune(folder: Path, *, keep: RetentionPolicy, step: int) -> None:
    """Delete the checkpoints up to a step that need not be kept; any later ones are damaged."""
    found = [each for each in steps(folder) if each <= step]
    for each in set(found) - keep(found):
        shutil.rmtree(_place(folder, each), ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove partial checkpoints, and restore one that was being replaced."""
    for draft in folder.glob(".writing-*"):
        shutil.rmtree(draft, ignore_errors=True)
    for old in folder.glob(".replaced-*"):
        final = folder / f"step-{old.name.removeprefix('.replaced-')}"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, intact or damaged, in order."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    return sorted(step for step in numbers if _place(folder, step).is_dir())


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and a line for each newer one that was skipped.

    Raises:
        UnknownFormat: this version cannot read the newest one, which may be intact; resuming from
            an older one, or starting again, would discard what it holds.
    """
    skipped = []
    for step in reversed(steps(folder)):
        try:
            return load(_place(folder, step)), skipped
        except UnknownFormat:
            raise
        except RunError as error:
            skipped.append(str(error))
    return None, skipped


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises:
        RunError: it is damaged, incomplete, or of a format this version does not know.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format"]
        if version not in (FORMAT, *_UPGRADES):
            raise UnknownFormat(
                f"{path}: has checkpoint format {version!r}; this version of groupwise reads "
                f"{', '.join(map(str, (*_UPGRADES, FORMAT)))}; resume with the version that "
                "wrote it."
            )
        if manifest.pop("checksum") != _checksum(manifest):
            raise RunError(f"{path}: {MANIFEST} is damaged (its checksum differs).")
        for name in (WEIGHTS, STATE):
            if _digest(path / name) != manifest["files"][name]:
                raise RunError(f"{path}: {name} is damaged (its checksum differs).")
        flat = load_file(str(path / WEIGHTS))
        state = torch.load(path / STATE, weights_only=True, map_location="cpu")
        step, about = int(manifest["step"]), dict(manifest.get("about", {}))
        for older in range(version, FORMAT):
            state = _UPGRADES[older]({**state, "step": step})
        weights = {"policy": flat} if version < 3 else _by_learner(flat)
        if version < 3 and "config" in about:
            about["config"] = _settings_of_format_2(about["config"])
        if path.name != f"step-{step:06d}" or not isinstance(state, dict):
            raise RunError(f"{path}: contains step {step} or a state that is not one.")
    except RunError:
        raise
    except Exception as error:  # The readers may raise anything on damaged bytes.
        raise RunError(f"{path}: is incomplete ({first_line(error)}).") from error
    return Checkpoint(step=step, weights=weights, state=state, about=about)


class Writer:
    """Writes checkpoints in a background thread, one at a time. Functions in the state are called
    in that thread and replaced by what they return, such as batches that are still being sampled.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._error: RunError | None = None

    def write(
        self, checkpoint: Checkpoint, *, keep: RetentionPolicy, logs: Sequence[Path] = ()
    ) -> None:
        """Take a copy of a checkpoint and start to write it.

        Raises:
            RunError: the previous one could not be written.
        """
        self.wait()
        frozen = Checkpoint(
            step=checkpoint.step,
            weights=_copied(checkpoint.weights),
            state=_copied(checkpoint.state),
            about=checkpoint.about,
        )
        self._thread = threading.Thread(
            target=self._work, args=(frozen, keep, tuple(logs)), name="checkpoint"
        )
        self._thread.start()

    def _work(self, checkpoint: Checkpoint, keep: RetentionPolicy, logs: tuple[Path, ...]) -> None:
        try:
            checkpoint = replace(checkpoint, state=_called(checkpoint.state))
            save(self.folder, checkpoint, keep=keep, logs=logs)
        except RunError as error:
            self._error = error
        except Exception as error:
            self._error = RunError(f"checkpoint at step {checkpoint.step}: {error}")

    def wait(self) -> None:
        """Wait until the current checkpoint is on disk.

        Raises:
            RunError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def replace_folder(final: Path, write: Callable[[str], object]) -> None:
    """Replace a folder: `write` fills a new one, which then takes its place. What it does not write
    stays, weights and the model card excepted.

    Raises:
        RunError: the disk is full or cannot be written; what was there before is intact.
    """
    draft, old = _beside(final)
    try:
        recover_folder(final)
        draft.mkdir(parents=True)
        _check_memory()
        write(str(draft))
        for path in (*draft.iterdir(), draft):
            _flush(path)
        if final.exists():
            final.rename(old)
        draft.rename(final)
        _flush(final.parent)
        _keep_others(old, final)
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunError(
            f"{final}: could not be written ({_reason(error)}); {_remedy(error)}, and continue "
            "with --resume."
        ) from error


def recover_folder(final: Path) -> None:
    """Undo an interrupted `replace_folder`: delete the draft, restore the folder."""
    draft, old = _beside(final)
    shutil.rmtree(draft, ignore_errors=True)
    if final.exists():
        _keep_others(old, final)
    elif old.exists():
        old.rename(final)


def _keep_others(old: Path, final: Path) -> None:
    """Delete the folder that was replaced; files of the user in it move to the new one."""
    for path in old.iterdir() if old.is_dir() else ():
        of_model = path.name in _OF_MODEL or ".safetensors" in path.name
        if not of_model and not os.path.lexists(final / path.name):
            path.rename(final / path.name)
    shutil.rmtree(old, ignore_errors=True)


_OF_MODEL = ("README.md", "config.json", "adapter_config.json")
"""Files that must not stay beside other weights."""


def _beside(final: Path) -> tuple[Path, Path]:
    """The draft of a folder, and where the old one is kept until the draft has replaced it."""
    return final.with_name(f".{final.name}.new"), final.with_name(f".{final.name}.old")


def _check_memory() -> None:
    """Check that there is memory for the buffers of safetensors, which aborts the process where
    there is none.

    Raises:
        MemoryError: there is none.
    """
    bytearray(WRITER_BYTES)


def _reason(error: Exception) -> str:
    """Why something could not be written."""
    if isinstance(error, MemoryError):
        return "out of memory"
    return getattr(error, "strerror", None) or first_line(error)


def _remedy(error: Exception) -> str:
    """What to do about it."""
    if isinstance(error, MemoryError):
        return "end other programs, or keep less in memory (`groupwise doctor --fit GB`)"
    return "free some space or choose another output"


def _write(draft: Path, checkpoint: Checkpoint) -> None:
    flat = {
        f"{learner}/{name}": tensor.detach().contiguous()
        for learner, weights in checkpoint.weights.items()
        for name, tensor in weights.items()
    }
    save_file(flat, str(draft / WEIGHTS))
    torch.save(dict(checkpoint.state), draft / STATE)
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "files": {name: _digest(draft / name) for name in (WEIGHTS, STATE)},
        "about": dict(checkpoint.about),
    }
    manifest["checksum"] = _checksum(manifest)
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for path in (*draft.iterdir(), draft):
        _flush(path)


def _by_learner(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Weights named "learner/parameter" as a mapping of mappings."""
    weights: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        learner, _, name = key.partition("/")
        weights.setdefault(learner, {})[name] = tensor
    return weights


def _copied(value: Any) -> Any:
    """A copy in memory that training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(inner) for inner in value)
    return value


def _called(value: Any) -> Any:
    """A state with its functions replaced by their results."""
    if isinstance(value, Mapping):
        return {key: _called(inner) for key, inner in value.items()}
    return value() if callable(value) else value


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or folder from the page cache to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

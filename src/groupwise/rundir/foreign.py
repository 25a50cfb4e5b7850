"""What a command that writes a folder refuses to find there."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

from groupwise.errors import UsageError
from groupwise.rundir.files import EXPERIMENT, RUN_FILES, SAVED

LINKED_BY_TRACKERS = frozenset({"wandb"})
"""Folders in which a tracker makes links of its own."""

_PLAN_KEYS = {"arms", "seeds", "against", "splits"}
"""Settings that the plan of an experiment always has once it is fixed."""


def refuse_foreign_files(folder: Path, names: Sequence[str] = RUN_FILES) -> None:
    """Refuse a folder whose files a run would replace although no run made them.

    Args:
        folder: where a run or an experiment will write.
        names: of what it would replace.

    Raises:
        UsageError: the folder holds such files and neither the `config.json` or a checkpoint of a
            run nor the plan of an experiment; or it lies in a folder that another run replaces.
    """
    _refuse_inside_a_run(folder)
    found = [name for name in names if _holds_something(folder / name)]
    ours = any(folder.glob(f"{SAVED}/step-*/manifest.json")) or _is_plan(folder / EXPERIMENT)
    if found and not ours and not _is_run_config(folder / "config.json"):
        raise UsageError(
            f"output = {str(folder)!r}: contains {', '.join(found)}, which no run made; "
            "a run would replace or delete it. Choose another folder (train: --set output=FOLDER; "
            "other commands: --output)."
        )


def _refuse_inside_a_run(folder: Path) -> None:
    place = folder.resolve()
    for outer in (place, *place.parents):
        run = outer.parent
        if outer.name in RUN_FILES and _is_run_config(run / "config.json"):
            raise UsageError(
                f"output = {str(folder)!r}: lies in {outer.name}/ of the run {str(run)!r}, which "
                "replaces or deletes what is there; choose another folder."
            )


def refuse_linked_folders(folder: Path) -> None:
    """Refuse a folder with links to folders below it: what a run writes or deletes there would be
    elsewhere. Links to files are safe, because writing replaces them or fails; so are links within
    the folder, such as `latest`, whose names no run uses.

    Args:
        folder: where a command will write; it may be a link itself.

    Raises:
        UsageError: names the first link and where it leads.
    """
    inside = os.path.realpath(folder) + os.sep
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            link = Path(place, name)
            if not link.is_symlink() or link.is_file():
                continue
            used = name in RUN_FILES or name.startswith((".", "step-"))
            if used or not os.path.realpath(link).startswith(inside):
                raise UsageError(
                    f"output = {str(folder)!r}: contains {str(link.relative_to(folder))!r}, a link "
                    f"to {os.readlink(link)!r}, and a run does not write through links; remove "
                    "the link, or choose another folder (train: --set output=FOLDER; other "
                    "commands: --output)."
                )
        folders[:] = [name for name in folders if name not in LINKED_BY_TRACKERS]


def _holds_something(path: Path) -> bool:
    try:
        return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError:  # A folder that cannot be read cannot be written either, which raises later.
        return False


def _is_run_config(path: Path) -> bool:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and {"config", "versions"} <= about.keys()


def _is_plan(path: Path) -> bool:
    """Whether a file is the fixed plan of an experiment; other programs use its name too."""
    try:
        return _PLAN_KEYS <= tomllib.loads(path.read_text(encoding="utf-8")).keys()
    except (OSError, ValueError, RecursionError):
        return False

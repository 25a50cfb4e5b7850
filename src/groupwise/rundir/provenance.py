"""Provenance: the inputs and settings that made a file or a model folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError
from groupwise.rundir.files import replace_text

UNREAD = (".md", ".html", ".lock")
"""Endings of files that hold no result: cards and reports name times and machines."""


def fingerprint(path: str | Path) -> str:
    """A hash of the content of a file, or of all files of a folder by name.

    Cards, reports and hidden files are left out. A name that is not a path here, such as that of a
    model on the hub, stands for itself.

    Example:
        >>> fingerprint("Qwen/Qwen2.5-0.5B")
        'Qwen/Qwen2.5-0.5B'
    """
    place = Path(path).expanduser()
    if place.is_file():
        return _hash_of(place)
    if not place.is_dir():
        return str(path)
    whole = hashlib.sha256()
    for each in sorted(p for p in place.rglob("*") if p.is_file()):
        inside = each.relative_to(place)
        if each.suffix not in UNREAD and not any(part.startswith(".") for part in inside.parts):
            whole.update(f"{inside.as_posix()}\0{_hash_of(each)}\n".encode())
    return whole.hexdigest()[:16]


def digest(values: Mapping[str, Any]) -> str:
    """A short hash of JSON values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def origin_path(path: str | Path) -> Path:
    """Where the provenance of a file is kept.

    Example:
        >>> str(origin_path("a/rows.jsonl"))
        'a/rows.origin.json'
    """
    return Path(path).with_suffix(".origin.json")


def write_origin(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write the provenance of a file next to it.

    Raises:
        RunError: it cannot be written.
    """
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    replace_text(origin_path(path), text + "\n")


def read_origin(path: str | Path) -> dict[str, Any] | None:
    """The provenance of a file; None if there is no record.

    Raises:
        UsageError: the record is damaged.
    """
    place = origin_path(path)
    if not place.exists():
        return None
    try:
        return dict(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{place}: cannot be read ({error}); delete it and {path}.") from None


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]

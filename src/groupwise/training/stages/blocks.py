"""Files written in blocks of rows, so that a killed command continues after the last complete
block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.rundir.files import replace_text
from groupwise.rundir.provenance import fingerprint, read_origin, write_origin


def begun(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the file is finished; records its settings before the first row is written.

    Args:
        path: the file.
        settings: the settings that determine the file, with `digest`, `data_hash`, `settings` and
            perhaps `model_hash`.

    Raises:
        UsageError: the file is there and other settings made it.
    """
    found = read_origin(path)
    if path.exists() and (found is None or found.get("digest") != settings["digest"]):
        reason = (
            "there is no record of what made it" if found is None else _difference(found, settings)
        )
        raise UsageError(
            f"--output = {str(path)!r}: exists, and {reason}; choose another file or delete it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if found is None or found.get("digest") != settings["digest"]:
        write_origin(path, settings)
    return bool(found and found.get("finished"))


def data_hashes(config: Config) -> dict[str, str]:
    """The fingerprints of the data of a configuration, by name."""
    data = config.data
    names = (data.train, data.eval, *(source.data for source in data.sources))
    return {name: fingerprint(name) for name in names if name is not None}


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first setting that differs, as text for the message."""
    if found.get("model_hash") != wanted.get("model_hash"):
        return f"another model made it ({found.get('model')})"
    if found.get("data_hash") != wanted["data_hash"]:
        return "other data made it"
    before, now = found.get("settings", {}), wanted["settings"]
    for key in now:
        if before.get(key) != now[key]:
            return f"was made with {key} = {before.get(key)!r}, not {now[key]!r}"
    return "other settings made it"


def whole_blocks(path: Path, sizes: Sequence[int]) -> int:
    """How many blocks the file holds; rows of a block that was cut off are removed."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")[:-1]  # what follows the last line break was cut off
    blocks, rows = 0, 0
    while blocks < len(sizes) and rows + sizes[blocks] <= len(lines):
        rows += sizes[blocks]
        blocks += 1
    kept = "".join(each + "\n" for each in lines[:rows])
    if kept != text:
        replace_text(path, kept)
    return blocks

"""One run per directory: a lock that names its owner and is released when the owner ends.

`filelock` is not used: it empties the file before it has the lock, so a second run could not name
the owner.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from groupwise.errors import UsageError
from groupwise.rundir.files import RUN_FILES
from groupwise.rundir.foreign import refuse_foreign_files, refuse_linked_folders

ABOUT = {"process", "host", "since", "command"}
"""What a lock file says of its owner."""

LOCK_BYTES = 1 << 16
"""Longest lock file that is read."""


class RunLock:
    """Holds a run directory for this process until it is closed or the process ends.

    Args:
        folder: the run directory; created if it does not exist.
        names: of the files that the run would replace.

    Raises:
        UsageError: another run holds the folder (the message names it), the folder cannot be
            written, or it holds links to folders, or files (such as another `.lock`) that a run
            would replace and that no run made.
    """

    def __init__(self, folder: str | Path, *, names: Sequence[str] = RUN_FILES) -> None:
        self.path = Path(folder) / ".lock"
        refuse_foreign_files(Path(folder), names)
        refuse_linked_folders(Path(folder))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file: IO[str] | None = os.fdopen(os.open(self.path, flags, 0o666), "a+")
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise UsageError(
                f"output = {str(folder)!r}: cannot be written "
                f"({getattr(error, 'strerror', error)}); choose another folder with "
                "--set output=FOLDER."
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._owner()
            self._file.close()
            raise UsageError(
                f"output = {str(folder)!r}: is in use by {owner}; wait for it, or choose another "
                "folder with --set output=FOLDER."
            ) from None
        except OSError:
            pass  # A file system without locks: better no lock than no run.
        if not _is_ours(self._file):
            self._file.close()
            raise UsageError(
                f"output = {str(folder)!r}: contains a file .lock that no run made; a run would "
                "replace it. Choose another folder with --set output=FOLDER."
            )
        self._file.truncate(0)
        about = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": Path(sys.argv[0]).name,
        }
        self._file.write(json.dumps(about) + "\n")
        self._file.flush()

    def _owner(self) -> str:
        try:
            about = json.loads(self.path.read_text(encoding="utf-8"))
            return (
                f"process {about['process']} ({about['command']}) on {about['host']} since "
                f"{about['since']}"
            )
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def close(self) -> None:
        """Release the folder. The file stays: removing it could free a lock that another process
        has just taken."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_ours(file: IO[str]) -> bool:
    """Whether a lock file is new, or was written by a run."""
    file.seek(0)
    try:
        text = file.read(LOCK_BYTES).strip("\0 \n")  # A power cut may leave zeros.
        return not text or ABOUT <= json.loads(text).keys()
    except (ValueError, AttributeError, RecursionError):
        return False

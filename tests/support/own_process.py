"""Scripts of this folder in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def printed(module: ModuleType, *arguments: str) -> Any:
    """The JSON that a module of this folder prints when it is run as a script."""
    script = Path(str(module.__file__))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)

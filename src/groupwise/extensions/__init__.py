"""Code of users: modules that register rewards, algorithms and environments, and single functions.

Three ways lead here. `--import MODULE` (the setting `imports`) imports modules and files before a
recipe is checked. A name of the form `path.py:function` names one function where a registered name
may stand. Installed packages are found through the entry-point group `groupwise`. Imported files
can be imported again by name in every subprocess and worker, which inherit `ENVIRONMENT`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import UsageError, suggest, warn

ENVIRONMENT = "GROUPWISE_IMPORT"
"""Environment variable with what `--import` named, separated like PATH."""
GROUP = "groupwise"
"""Entry points of this group name modules that register something when they are imported."""

_PATH = re.compile(r"(?P<place>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


def names_code(name: str) -> bool:
    """Whether a name is of the form `path.py:function` or `module:function`.

    Example:
        >>> names_code("rewards.py:right"), names_code("my.rewards:right"), names_code("softrank")
        (True, True, False)
    """
    return _PATH.fullmatch(name) is not None


def load(places: Sequence[str]) -> list[ModuleType]:
    """Import modules by their names, or files by their paths.

    Args:
        places: `package.module`, or the path of a `.py` file.

    Raises:
        UsageError: there is no such module or file, or importing it failed.
    """
    return [_load(place) for place in places]


def requested() -> tuple[str, ...]:
    """What `--import` named in this process or the one that started it."""
    return tuple(filter(None, os.environ.get(ENVIRONMENT, "").split(os.pathsep)))


def request(places: Sequence[str]) -> None:
    """Import what `--import` names, here and in every process that this one starts.

    Raises:
        UsageError: see `load`.
    """
    found = [str(Path(p).resolve()) if p.endswith(".py") else p for p in places]
    load(found)
    os.environ[ENVIRONMENT] = os.pathsep.join(dict.fromkeys([*requested(), *found]))


def resolve(name: str, *, kind: str) -> Any:
    """What a name of the form `path.py:function` names.

    Raises:
        UsageError: no such file or module, or nothing of that name in it.
    """
    match = _PATH.fullmatch(name)
    if match is None:
        raise UsageError(
            f"{kind} = {name!r}: must have the form path.py:function or module:function."
        )
    module = _load(match["place"])
    found = getattr(module, match["name"], None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UsageError(
            f"{kind} = {name!r}: {match['place']} has no {match['name']!r}; "
            + suggest(match["name"], known)
        )
    return found


@functools.cache
def discover() -> tuple[str, ...]:
    """Import the entry points of installed packages, once per process; their names.

    A package that cannot be imported is reported and left out.
    """
    found = []
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            warn(
                f"entry point {point.name} = {point.value!r}: cannot be loaded "
                f"({type(error).__name__}: {error})."
            )
        else:
            found.append(point.name)
    return tuple(found)


def _load(place: str) -> ModuleType:
    path = Path(place).expanduser()
    if path.suffix == ".py":
        return _load_file(path)
    if os.getcwd() not in sys.path:  # a console script does not search the current folder
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise _failed(place, error) from error
        raise UsageError(
            f"import = {place!r}: no such module, and the name of a file ends in .py; modules are "
            "searched for in the current folder, on PYTHONPATH and among installed packages."
        ) from None
    except Exception as error:
        raise _failed(place, error) from error


def _load_file(path: Path) -> ModuleType:
    """A file as the module of its name, so that workers can import it by that name."""
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"import = {str(path)!r}: no such file.")
    if not path.stem.isidentifier():
        better = re.sub(r"\W", "_", path.stem)
        raise UsageError(
            f"import = {str(path)!r}: the name of the file must be a name of a Python module, such "
            f"as {better}.py."
        )
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        raise _failed(str(path), error) from error
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UsageError(
            f"import = {str(path)!r}: another module is called {path.stem!r} "
            f"({getattr(module, '__file__', 'built in')}); rename the file."
        )
    return module


def _failed(place: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(f"import = {place!r}: failed: {type(error).__name__}: {reason}.")

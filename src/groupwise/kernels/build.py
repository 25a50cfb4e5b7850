"""Compiles `cpp/` and `allocator.cpp` where they are first needed and keeps the libraries in a
folder private to the user.

`g++` compiles the source for the machine's processor, or for the instructions that
ATEN_CPU_CAPABILITY allows PyTorch, in a few seconds. The libraries are kept in
`groupwise/` below XDG_CACHE_HOME, or else `~/.cache`. No library is loaded from a folder that other
users may write to, and none that is incomplete: each ends with its own checksum. Where the cache
cannot be used, the process compiles into a private temporary folder.

The kernels run on the OpenMP threads that PyTorch has started.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from groupwise.errors import warn
from groupwise.kernels.structures import prepare
from groupwise.machine import usable_cores

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
FLAGS = (
    "-std=gnu++17", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC",
    # Chains of multiply-adds are fused everywhere: sums must not depend on the size of a tile.
    "--param", "avoid-fma-max-bits=0",
    "-Wl,-Bsymbolic",  # bind to these functions even if others of the same names are loaded
)  # fmt: skip
ARCHITECTURES = {"avx2": "x86-64-v3", "default": "x86-64"}
"""What GCC calls the instructions to which ATEN_CPU_CAPABILITY limits PyTorch's own kernels."""
ALLOCATOR = Path(__file__).with_name("allocator.cpp")
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A library.

    Attributes:
        files: what it is made from; those that end in .cpp are compiled.
        flags: arguments of `g++`, whether it compiles or links.
        libraries: what it is linked with.
    """

    name: str
    files: tuple[Path, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]


@cache
def compiled() -> ctypes.CDLL | None:
    """The functions of `cpp/`; None, with a warning that gives the reason, where they cannot be
    compiled or loaded."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return prepare(_loaded(_kernels()))
    except (OSError, subprocess.SubprocessError) as error:
        warn(
            f"CPU kernels cannot be compiled ({_reason(error)}); PyTorch is used instead, which "
            'is slower. Set model.kernels = "torch" to silence this warning.'
        )
        return None


_without_content: list[bool] = []


@contextmanager
def shapes_only() -> Iterator[None]:
    """Context manager in which kernels take fake tensors, allocate results and compute nothing."""
    _without_content.append(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        _without_content.pop()


@contextmanager
def real_tensors() -> Iterator[None]:
    """Context manager in which kernels compute even inside `shapes_only` or beside fake tensors."""
    outside, _without_content[:] = [*_without_content], []
    try:
        with _disable_current_modes():
            yield
    finally:
        _without_content[:] = outside


def takes(x: torch.Tensor) -> bool:
    """Whether kernels accept a tensor: one with memory, or a fake one inside `shapes_only`."""
    return (type(x) in (torch.Tensor, torch.nn.Parameter)) != bool(_without_content)


def takes_fake_tensors() -> bool:
    """Whether this is inside `shapes_only`."""
    return bool(_without_content)


class _Nothing:
    """Replaces the library inside `shapes_only`: every function succeeds and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def library() -> Any:
    """The compiled library, for callers that know there is one."""
    if _without_content:
        return _Nothing()
    found = compiled()
    assert found is not None, "ask `compiled` first"
    return found


@cache
def allocator() -> ctypes.CDLL | None:
    """The function of `allocator.cpp`; None, with a warning that gives the reason, where it cannot
    be compiled or loaded."""
    if compiled() is None:  # `compiled` has warned with the reason.
        return None
    try:
        return _loaded(_allocator())
    except (OSError, subprocess.SubprocessError) as error:
        warn(
            f"the allocator cannot be compiled ({_reason(error)}); PyTorch's own is used, and "
            "the process may need up to 1.5 times the memory."
        )
        return None


def _kernels() -> _Program:
    # PyTorch's own copy of OpenMP where it brings one: two copies would each keep threads spinning.
    allowed = ARCHITECTURES.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), "native")
    return _Program(
        name="kernels",
        files=tuple(SOURCES),
        flags=(*FLAGS, f"-march={allowed}"),
        libraries=("-Wl,--as-needed", *_openmp()),
    )


def _allocator() -> _Program:
    home = Path(torch.__file__).parent
    version = f"-DTORCH={torch.__version__}"  # another version is another program
    return _Program(
        name="allocator",
        files=(ALLOCATOR,),
        flags=("-std=gnu++20", "-O2", "-shared", "-fPIC", f"-I{home / 'include'}", version),
        libraries=(f"-L{home / 'lib'}", "-lc10"),
    )


def _loaded(program: _Program) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise OSError("there is no g++")
    try:
        return ctypes.CDLL(str(_built(compiler, _private(cache_folder()), program)))
    except OSError as error:
        reason = _reason(error)
    with tempfile.TemporaryDirectory(prefix="groupwise-") as own:
        # A mapped file may be deleted.
        found = ctypes.CDLL(str(_built(compiler, Path(own), program)))
    _warn_of_cache(cache_folder(), reason)
    return found


@cache
def _warn_of_cache(folder: Path, reason: str) -> None:
    """Once for a reason, however many programs are compiled."""
    warn(
        f"{folder}: cannot be used as a cache of CPU kernels ({reason}); every process compiles "
        "them again."
    )


def _reason(error: Exception) -> str:
    """The message of the compiler or the system, on one line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[0] if lines else "")
        return f"g++ ended with status {error.returncode}: {said[:200]}".rstrip(": ")
    return " ".join(str(error).split())[:300]


def cache_folder() -> Path:
    """Where compiled libraries are kept. A relative XDG_CACHE_HOME is ignored, as its
    specification asks."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache"), "groupwise")


def _private(folder: Path) -> Path:
    """The folder, created with mode 0700 if need be.

    Raises:
        PermissionError: others may write to it, or put another folder in its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder.lstat()
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is a link or belongs to another user")
    if own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} may be written to by other users")
    if own.st_mode & 0o077:
        folder.chmod(0o700)
    for parent in folder.resolve().parents:
        found = parent.stat()
        open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if open_to_others and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{parent} may be written to by other users")
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{parent} belongs to another user")
    return folder


def _built(compiler: str, folder: Path, program: _Program) -> Path:
    """The shared library in a folder, compiled unless it has been for this source and processor."""
    contents = [path.read_bytes() for path in program.files]
    given = "\0".join((*program.flags, *program.libraries))
    identity = (*contents, given.encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(identity)).hexdigest()[:16]
    target = folder / f"{program.name}-{name}.so"
    if not _whole(target):
        # Several processes may compile at once; each moves a finished file into place.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            _compile(compiler, program, made)
            with made.open("r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)  # the loader ignores what follows the last section
                file.flush()
                os.fsync(file.fileno())
            made.chmod(0o600)
            made.replace(target)
    return target


def _compile(compiler: str, program: _Program, made: Path) -> None:
    """Compile all files of a program at once, one per core, and link them."""
    call = [compiler, *program.flags]
    sources = [path for path in program.files if path.suffix == ".cpp"]
    objects = [str(made.with_name(f"{path.stem}.o")) for path in sources]
    commands = [
        [*call, "-c", str(path), "-o", one] for path, one in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(_run, commands))
    _run([*call, *objects, *program.libraries, "-o", str(made)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def _whole(path: Path) -> bool:
    """Whether a library exists, belongs to this user alone, and ends with its own checksum."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found, contents = os.fstat(file.fileno()), file.read()
    except OSError:
        return False
    mine = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and hashlib.sha256(contents[:-32]).digest() == contents[-32:]


def _openmp() -> list[str]:
    """The OpenMP library that this process has loaded; PyTorch's where another package has one."""
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/libgomp" in line}
    return sorted(paths, key=lambda path: ("torch" not in path, path))[:1]


def _processor() -> str:
    """What identifies a processor; its clock, which changes, is left out."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    telling = ("flags", "model name", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(telling)}))

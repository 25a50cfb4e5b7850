"""Compilation, and the cache of compiled libraries."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from groupwise.kernels import build, structures
from groupwise.kernels.auto import Auto
from groupwise.kernels.build import compiled, library
from groupwise.kernels.cpu import can_use_attention
from groupwise.kernels.packed import PackedLinear as Linear

needs_kernels = pytest.mark.skipif(
    compiled() is None, reason="no g++ whose programs this machine loads"
)


@pytest.fixture
def unknown() -> Iterator[None]:
    """Whether there is a compiler is asked anew in a test, and after it."""
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def compiler(folder: Path, script: str) -> str:
    """A folder with a `g++` that does what a script says."""
    made = folder / "bin" / "g++"
    made.parent.mkdir(exist_ok=True)
    made.write_text(script)
    made.chmod(0o755)
    return str(made.parent)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unknown: None) -> Path:
    """Nothing has been compiled yet, into "a cache" here; the compiler is quick, for it copies what
    another one has made."""
    real = shutil.which("g++")
    if real is not None and compiled() is not None:
        made = build._built(real, build._private(build.cache_folder()), build._kernels())
        script = f'#!/bin/sh\nfor last; do :; done\nexec cp "{made}" "$last"\n'
        monkeypatch.setenv("PATH", compiler(tmp_path, script) + os.pathsep + os.environ["PATH"])
        compiled.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\nexit 1\n",
        "#!/bin/sh\nexit 0\n",
        '#!/bin/sh\nfor last; do :; done\necho no library > "$last"\n',
        "no program",
    ],
    ids=["fails", "writes nothing", "writes something else", "is none"],
)
def test_a_broken_compiler_is_as_good_as_none(
    script: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compiler(fresh, script) + os.pathsep + os.environ["PATH"])
    with pytest.warns(UserWarning, match="CPU kernels cannot be compiled"):
        assert compiled() is None
    assert "cpp" not in Auto().description(torch.device("cpu"))
    heads = torch.ones(1, 2, 16)
    assert not can_use_attention(heads, heads, heads, softcap=None)


@needs_kernels
def test_a_cache_that_cannot_be_written_is_done_without(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not hold for everybody, a file in its place does."""
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.warns(UserWarning, match="cannot be used as a cache") as warned:
        assert compiled() is not None
        assert build._loaded(build._kernels()) is not None
    assert len(warned) == 1, "once for a reason, however many programs are compiled"


@needs_kernels
def test_a_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process finds it, and needs no compiler that works; another processor does."""
    assert compiled() is not None
    (made,) = (fresh / "a cache" / "groupwise").iterdir()
    monkeypatch.setenv("PATH", compiler(fresh, "#!/bin/sh\nexit 1\n") + ":" + os.environ["PATH"])
    compiled.cache_clear()
    assert compiled() is not None
    monkeypatch.setattr(build, "_processor", lambda: "another")
    compiled.cache_clear()
    assert compiled() is None
    assert list(made.parent.iterdir()) == [made]


def compiles(start: threading.Event, results: multiprocessing.SimpleQueue[bool]) -> None:
    """What another process does: compile, and use what it has."""
    start.wait()
    found = compiled() is not None and Linear(torch.eye(3), None)(torch.ones(2, 3)).sum() == 6
    results.put(bool(found))


@needs_kernels
def test_processes_may_compile_at_once(fresh: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.SimpleQueue()
    others = [context.Process(target=compiles, args=(start, results)) for _ in range(2)]
    for other in others:
        other.start()
    start.set()
    assert all(results.get() for _ in others)
    for other in others:
        other.join()
    assert [path.suffix for path in (fresh / "a cache" / "groupwise").iterdir()] == [".so"]


@needs_kernels
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_library_is_compiled_again(damage: str, fresh: Path) -> None:
    """Before it is loaded: a truncated one would end the process."""
    assert compiled() is not None
    (made,) = (fresh / "a cache" / "groupwise").iterdir()
    whole = made.read_bytes()
    middle = len(whole) // 2
    other = bytes([whole[middle] ^ 1])
    damaged = {
        "truncated": whole[:middle],
        "changed": whole[:middle] + other + whole[middle + 1 :],
        "empty": b"",
    }[damage]
    made.unlink()  # a file in use is not written to
    made.write_bytes(damaged)
    compiled.cache_clear()
    assert compiled() is not None
    assert build._whole(made)


@needs_kernels
def test_the_cache_is_private_to_the_user(fresh: Path) -> None:
    assert compiled() is not None
    folder = fresh / "a cache" / "groupwise"
    (made,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert made.stat().st_mode & 0o777 == 0o600


@needs_kernels
def test_nothing_is_loaded_from_where_others_may_write(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh / "a cache" / "groupwise"

    def open_to_all() -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o777)

    def parent_open_to_all() -> None:
        folder.chmod(0o700)
        folder.parent.chmod(0o777)

    def linked() -> None:
        folder.parent.chmod(0o755)
        folder.rmdir()
        folder.symlink_to(fresh)

    def of_another_user() -> None:
        folder.unlink()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    for arrange in (open_to_all, parent_open_to_all, linked, of_another_user):
        arrange()
        with pytest.raises(PermissionError):
            build._private(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_inside_that_of_another_user_is_refused(tmp_path: Path) -> None:
    """Who may rename a folder may put another one in its place after it was checked."""
    folder = tmp_path / "theirs" / "groupwise"
    folder.mkdir(parents=True, mode=0o700)
    assert build._private(folder) == folder
    os.chown(folder.parent, 12345, -1)
    with pytest.raises(PermissionError, match="theirs belongs to another user"):
        build._private(folder)


@needs_kernels
def test_a_cache_that_is_not_private_is_done_without(fresh: Path) -> None:
    folder = fresh / "a cache" / "groupwise"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="written to by other users"):
        assert compiled() is not None
    assert list(folder.iterdir()) == []


def test_a_file_that_others_may_write_to_is_not_loaded(tmp_path: Path) -> None:
    made = tmp_path / "kernels.so"
    contents = b"a library"
    made.write_bytes(contents + hashlib.sha256(contents).digest())
    assert build._whole(made)
    made.chmod(0o666)
    assert not build._whole(made)
    made.chmod(0o600)
    link = tmp_path / "link.so"
    link.symlink_to(made)
    assert not build._whole(link)


@pytest.mark.parametrize("home", ["", "cache", "./cache"])
def test_a_relative_cache_folder_is_ignored(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert build.cache_folder() == Path.home() / ".cache" / "groupwise"


def test_the_reason_of_a_compiler_is_given_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '#!/bin/sh\necho "x.cpp:1: error: no vectors" >&2\nexit 1\n'
    monkeypatch.setenv("PATH", compiler(fresh, script) + os.pathsep + os.environ["PATH"])
    with pytest.warns(UserWarning, match="no vectors") as said:
        assert compiled() is None
        assert compiled() is None
    assert len(said) == 1


@needs_kernels
def test_a_structure_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels would read beyond it."""

    class Places(ctypes.Structure):
        _fields_ = (*structures.Places._fields_, ("more", ctypes.c_int64))

    loaded = library()
    monkeypatch.setattr(structures, "STRUCTURES", (Places,))
    with pytest.raises(OSError, match="Places has 40 bytes in C\\+\\+ and 48 in Python"):
        structures.prepare(loaded)


CAPPED = """
import shutil, sys, torch
from groupwise.kernels import build
from groupwise.kernels.build import library
from groupwise.kernels.packed import PackedLinear
from groupwise.kernels.onednn import ReorderedLinear, dtypes
torch.manual_seed(0)
x, weight = torch.randn(37, 256), torch.randn(320, 256)
error = (PackedLinear(weight, None)(x) - x @ weight.t()).abs().max()
assert error < 1e-4, error
for dtype in dtypes():
    found = ReorderedLinear(weight.to(dtype), None, rows=32)(x[:32].to(dtype)).float()
    assert (found - x[:32] @ weight.t()).abs().max() < (1e-4 if dtype == torch.float32 else 1)
print(torch.backends.cpu.get_cpu_capability(), library().multiplies_pairs())
print(build._built(shutil.which("g++"), build._private(build.cache_folder()), build._kernels()))
"""


@needs_kernels
@pytest.mark.skipif(
    "AVX2" not in torch.backends.cpu.get_cpu_capability()
    and "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="this processor has no AVX2",
)
def test_kernels_follow_the_instructions_that_pytorch_is_limited_to() -> None:
    """As on a processor that has AVX2 and no more."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", CAPPED], capture_output=True, text=True, timeout=300,
        env={**os.environ, **limits},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, said, library = done.stdout.splitlines()
    assert said == "AVX2 0"
    if (objdump := shutil.which("objdump")) is not None:
        code = subprocess.run([objdump, "-d", library], capture_output=True, text=True).stdout
        assert "%ymm" in code and "%zmm" not in code

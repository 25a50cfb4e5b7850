"""The command line of a sandbox: bubblewrap's options, the interpreter, and the code it starts."""

from __future__ import annotations

import functools
import importlib
import inspect
import marshal
import os
import shutil
import sys
import sysconfig
from pathlib import Path

NO_ONE = range(61184, 65520)  # user ids for services without an account
_INSIDE = (
    "handles",
    "codec",
    "arguments",
    "rpc",
    "confine",
    "inputs",
    "judge",
)  # in the order they import each other
_BOOT = """
import marshal, os, sys
def read(size, data=b""):
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("no job")
    return data
for name, code in marshal.loads(read(int.from_bytes(read(8), "big"))):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""


@functools.cache
def judge_code() -> bytes:
    """What runs inside, compiled: the sandbox runs the same interpreter."""
    modules = [importlib.import_module(f"groupwise.rewards.code.inside.{name}") for name in _INSIDE]
    return marshal.dumps(
        [(m.__name__, compile(inspect.getsource(m), f"<{m.__name__}>", "exec")) for m in modules]
    )


def interpreter() -> list[str]:
    """The command that reads what runs inside from standard input, where it then finds the job."""
    return [_python(), "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT]


@functools.cache
def _python() -> str:
    """The interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _files() -> tuple[str, ...]:
    """Options that show the program Python and the libraries it is linked to, and nothing else."""
    library = Path(sysconfig.get_path("stdlib")).parent
    shown = {Path(_python()), Path("/etc/ld.so.cache"), library, Path("/usr/lib")}
    shown |= {Path("/lib"), Path("/lib64"), Path("/usr/lib64")}
    shown = {p for p in shown if p.exists() and not shown & set(p.parents)}
    options: list[str] = []
    for folder in sorted({above for path in shown for above in path.parents} - {Path("/")}):
        options += ["--perms", "0755", "--dir", str(folder)]
    for path in sorted(shown):
        target = os.readlink(path) if path.is_symlink() else str(path)
        options += ["--symlink" if path.is_symlink() else "--ro-bind", target, str(path)]
    return tuple(options)


def command(disk_mb: int, info_fd: int) -> list[str]:
    """The command up to the program to run. Root needs no user namespace, and drops root inside."""
    options = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    options += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", str(NO_ONE[0]), "--gid", str(NO_ONE[0])]
    options += ["--cap-add", "CAP_SYS_ADMIN"]  # to remount /tmp; given up before anything else
    options += [*_files(), "--perms", "0755", "--dir", "/dev"]
    options += ["--dev-bind", "/dev/null", "/dev/null"]
    options += ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]
    options += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", "--die-with-parent"]
    return [*options, "--new-session", "--info-fd", str(info_fd), "--"]

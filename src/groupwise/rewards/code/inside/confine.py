"""How a process inside the sandbox gives up its rights."""

import _signal  # pyright: ignore[reportMissingImports]
import os
import sys

MOST_FILES = 1024
_REMOUNT = 32 | 8 | 4 | 2  # MS_REMOUNT, MS_NOEXEC, MS_NODEV, MS_NOSUID


def system(name, *args) -> None:
    """A function of libc with small integers and bytes; importing ctypes would cost as much as
    Python."""
    import _ctypes

    class Function(_ctypes.CFuncPtr):
        _flags_ = _ctypes.FUNCFLAG_CDECL

    library = _ctypes.dlopen(None, 2)  # pyright: ignore[reportArgumentType]
    if Function(_ctypes.dlsym(library, name))(*args):
        raise OSError(f"{name}{args[:2]} failed")


def drop_rights(uid, code) -> None:
    """Limit the files in /tmp, become an unprivileged user without capabilities, and install a
    filter of system calls. The kernel's memory for files counts towards no other limit."""
    options = b"nr_inodes=%d" % MOST_FILES
    system("mount", b"tmpfs", b"/tmp", b"tmpfs", _REMOUNT, options)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    system("prctl", 47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    version = (0x20080522).to_bytes(4, sys.byteorder)
    system("capset", version + bytes(4), bytes(24))
    install_filter(code)


def install_filter(code) -> None:
    """Apply a filter of system calls to this process and those it starts, for good."""
    address = id(code) + sys.getsizeof(b"") - 1  # where CPython keeps the bytes
    header = (len(code) // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder)
    system("prctl", 22, 2, header)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def confine(job, spare=0) -> None:
    """Set the limits of this process for good; what is refused from here on stays refused.

    The processor time is the program's; the judge has some to spare for the tests themselves."""
    import resource

    cpu = job["cpu"] + spare
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))

    limits = {
        "RLIMIT_AS": job["memory"],
        "RLIMIT_FSIZE": job["disk"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": job["threads"],
        "RLIMIT_CORE": 0,
        "RLIMIT_SIGPENDING": 256,
    }
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if value is not None:
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    if job["filter"]:
        install_filter(job["filter"])


def become_program(job, standard, keep) -> None:
    """In a fresh process: these three standard streams, these descriptors, and the limits."""
    for target, fd in enumerate(standard):
        os.dup2(fd, target)
    for fd in range(3, 64):
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # it is not open
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    confine(job)
    if job["program_filter"]:
        install_filter(job["program_filter"])

"""Three system-call filters for the sandbox, assembled here as classic BPF: no library is needed.

`outer_filter` applies to everything in the sandbox. It refuses what reaches other processes, the
network, the kernel's configuration or kernel memory that no limit counts (extended attributes, file
locks). Calls newer than the table are refused as "not implemented" unless they are known to be
harmless. `inner_filter` applies to the judge and the program as well: threads, but no process.
`program_filter` applies to the program alone: it can send no SIGKILL, so one that ends it came from
outside.
"""

from __future__ import annotations

import errno
import platform
import struct

from groupwise.errors import UsageError

_NUMBERS = {
    # name: (x86_64, aarch64); None where the architecture has no such call
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsetxattr": (190, 7),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "lsetxattr": (189, 6),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "migrate_pages": (256, 238),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "splice": (275, 76),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_PROCESS_NUMBERS = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
}
_SIGNAL_NUMBERS = {
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "timer_create": (222, 107),
}
_KILLING = (
    ("kill", (62, 129), 1, (9,)),
    ("tkill", (200, 130), 1, (9,)),
    ("tgkill", (234, 131), 2, (9,)),
    ("fcntl", (72, 25), 1, (10,)),  # F_SETSIG
    ("prctl", (157, 167), 0, (1,)),  # PR_SET_PDEATHSIG
    ("setrlimit", (160, 164), 0, (0,)),  # RLIMIT_CPU, whose end is a SIGKILL too
    ("prlimit64", (302, 261), 1, (0,)),
)
_LOCKING = ("fcntl", (72, 25), 1, (6, 7, 37, 38))  # F_SETLK, F_SETLKW and F_OFD_SETLK*
_OWN_LIMITS = ("prlimit64", (302, 261), 0, (0,))
_CLONE = (56, 220)
_FIRST_NEW = 424  # from here on every architecture uses the same numbers
_NEW_ALLOWED = (436, 439, 441, 449, 454, 455, 456)  # close_range faccessat2 epoll_pwait2 futex*
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
_X32_BIT = 0x40000000

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FLAGS_AT = 0, 4, 16  # in struct seccomp_data; the low half of argument 0
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def supported() -> bool:
    """Whether there is a table of system calls for this machine."""
    return platform.machine() in _MACHINES


def outer_filter() -> bytes:
    """The filter of the whole sandbox, as an array of `struct sock_filter`."""
    column, _ = _machine()
    code = _opening()
    for numbers in _NUMBERS.values():
        code += _refuse(numbers[column])
    code += _clone_with(_CLONE_NAMESPACES, refuse_if_set=True)
    code += _by_argument(*_LOCKING, refuse_if_equal=True)
    code += _by_argument(*_OWN_LIMITS, refuse_if_equal=False)
    for number in _NEW_ALLOWED:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code += [(_AT_LEAST, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _MISSING)]
    return _assemble(code)


def inner_filter() -> bytes:
    """The filter of the program under test, on top of the outer one: no fork, no exec."""
    column, _ = _machine()
    code = _opening()
    for numbers in _PROCESS_NUMBERS.values():
        code += _refuse(numbers[column])
    return _assemble(code + _clone_with(_CLONE_THREAD, refuse_if_set=False))


def program_filter() -> bytes:
    """The filter of the program alone, on top of the others: it cannot send SIGKILL."""
    column, _ = _machine()
    code = _opening()
    for numbers in _SIGNAL_NUMBERS.values():
        code += _refuse(numbers[column])
    for call in _KILLING:
        code += _by_argument(*call, refuse_if_equal=True)
    return _assemble(code)


def _machine() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in _MACHINES:
        raise UsageError(
            f"sandbox: machine = {machine!r}: this architecture is not supported; "
            f"Known: {', '.join(_MACHINES)}."
        )
    return _MACHINES[machine]


def _opening() -> list[tuple[int, int, int, int]]:
    """Kill what calls the kernel under another architecture's numbers; leave the number loaded."""
    code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _machine()[1]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if platform.machine() == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    return code


def _refuse(number: int | None) -> list[tuple[int, int, int, int]]:
    return [] if number is None else [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]


def _clone_with(bits: int, *, refuse_if_set: bool) -> list[tuple[int, int, int, int]]:
    number = _CLONE[_machine()[0]]
    refused, allowed = (0, 1) if refuse_if_set else (1, 0)
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FLAGS_AT),
        (_ANY_BIT, refused, allowed, bits),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _by_argument(
    _: str,
    numbers: tuple[int, int],
    place: int,
    values: tuple[int, ...],
    *,
    refuse_if_equal: bool,
) -> list[tuple[int, int, int, int]]:
    """Refuse a call if (or unless) an argument has one of some values."""
    count = len(values)
    met, unmet = (_REFUSE, _ALLOW) if refuse_if_equal else (_ALLOW, _REFUSE)
    code = [(_EQUAL, 0, count + 3, numbers[_machine()[0]]), (_LOAD, 0, 0, _FLAGS_AT + 8 * place)]
    code += [(_EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    return [*code, (_RETURN, 0, 0, unmet), (_RETURN, 0, 0, met)]


def _assemble(code: list[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *line) for line in [*code, (_RETURN, 0, 0, _ALLOW)])

"""Programs that attack: every one is contained, gets a verdict that is no pass, and leaves nothing.

Each attack is the body of `solve`, which the tests call, or module code that runs before. What it
managed to do comes back as the value of `solve`, so that "contained" is measured inside, and the
expected outcome is written beside the attack.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from groupwise.rewards.code.clock import PATIENCE, TEST
from groupwise.rewards.code.sandbox import Limits, Outcome, Suite, Verdict, run_inputs, run_tests
from groupwise.rewards.code.sandbox import unavailable as why_unavailable

LIMITS = Limits(seconds=20.0, memory_mb=128, disk_mb=4, output_kb=64, threads=4)
SHORT = Limits(seconds=1.0, memory_mb=128, disk_mb=4, output_kb=64, threads=4)

pytestmark = pytest.mark.skipif(
    why_unavailable() is not None, reason=f"no code sandbox: {why_unavailable()}"
)


def attack(program: str, test: str, *, limits: Limits = LIMITS) -> Outcome:
    [outcome] = run_tests(textwrap.dedent(program), Suite(sources=[test]), limits=limits)
    return outcome


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


# Attacks that a limit or a missing right turns into an exception: (name, program) with `solve`
# returning "contained" exactly if what was tried was refused.
REFUSED = {
    "fork bomb": """
        import os
        def solve():
            made = 0
            for _ in range(20):  # a real bomb would not stop at 20, nor would the kernel let it
                try:
                    if os.fork() == 0:
                        os._exit(0)
                    made += 1
                except OSError:
                    pass
            return "contained" if made == 0 else f"{made} processes"
        """,
    "subprocess and exec": """
        import os, subprocess, sys
        def solve():
            for start in (lambda: subprocess.Popen([sys.executable, "-c", "1"]),
                          lambda: os.posix_spawn(sys.executable, ["python", "-c", "1"], {}),
                          lambda: os.execv(sys.executable, ["python", "-c", "1"])):
                try:
                    start()
                    return "started"
                except OSError:
                    pass
            return "contained"
        """,
    "memory": """
        def solve():
            try:
                hog = bytearray(1 << 30)
                return "allocated"
            except MemoryError:
                return "contained"
        """,
    "memory that no address space counts": """
        import os
        def solve():
            try:
                os.memfd_create("hog")
                return "created"
            except PermissionError:
                return "contained"
        """,
    "disk fill": """
        import errno
        def solve():
            written = 0
            for number in range(16):
                try:
                    with open(f"/tmp/{number}", "wb", buffering=0) as file:
                        written += file.write(bytes(1 << 20))
                except OSError as error:
                    full = error.errno == errno.ENOSPC
                    return "contained" if full and written <= 4 << 20 else error
            return written
        """,
    "files without contents": """
        import os
        def solve():
            for make in (lambda path: open(path, "w").close(), os.mkdir, os.mkfifo,
                         lambda path: os.symlink("x" * 99, path)):
                try:
                    for number in range(2000):
                        make(f"/tmp/{make}-{number}")
                    return "made"
                except OSError:
                    pass
            return "contained"
        """,
    "kernel memory by attributes and locks": """
        import ctypes, fcntl, os
        def solve():
            file = open("/tmp/file", "w")
            for use in (lambda: os.setxattr("/tmp/file", "user.a", b"x"),
                        lambda: os.setxattr(file.fileno(), "user.a", b"x"),
                        lambda: os.setxattr("/tmp/file", "user.a", b"x", follow_symlinks=False),
                        lambda: fcntl.lockf(file, fcntl.LOCK_EX, 1, 0),
                        lambda: fcntl.fcntl(file, 37, bytes(32))):
                try:
                    use()
                    return "used"
                except PermissionError:
                    pass
            return "contained"
        """,
    "capabilities": """
        import ctypes
        def solve():
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            sets = (ctypes.c_uint32 * 6)()
            assert ctypes.CDLL(None).capget(header, sets) == 0
            return "contained" if not any(sets) else list(sets)
        """,
    "limits of the judge": """
        import os, resource
        def solve():
            resource.prlimit(0, resource.RLIMIT_NOFILE)
            try:
                resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1 << 20, 1 << 20))
                return "lowered"
            except PermissionError:
                return "contained"
        """,
    "one big file": """
        import os, signal
        def solve():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            try:
                os.truncate(os.open("/tmp/big", os.O_CREAT | os.O_RDWR), 1 << 40)
                return "grown"
            except OSError:
                return "contained"
        """,
    "writing outside /tmp": """
        import sys
        def solve():
            for path in ("/x", "/usr/lib/x", "/dev/x", "/root/x", sys.prefix + "/lib/x", "/etc/x"):
                try:
                    open(path, "w")
                    return path
                except OSError:
                    pass
            return "contained"
        """,
    "network": """
        import socket
        def solve():
            for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17):
                try:
                    socket.socket(kind, socket.SOCK_STREAM if kind < 16 else socket.SOCK_RAW)
                    return f"socket {kind}"
                except OSError:
                    pass
            try:
                socket.getaddrinfo("example.org", 80)
                return "resolved"
            except OSError:
                return "contained"
        """,
    "reading host files": """
        import os
        def solve():
            seen = [p for p in ("/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/mem",
                                "/sys/kernel", "/home", "/var", "/run", "/bin/sh", "/usr/bin/env",
                                "/dev/mem", "/dev/sda", "/dev/shm", HIDDEN)
                    if os.path.exists(p)]
            return "contained" if not seen else seen
        HIDDEN = "@SECRET@"
        """,
    "environment theft": """
        import os
        def solve():
            stolen = {k: v for k, v in os.environ.items() if k not in ("PWD", "LC_CTYPE")}
            return "contained" if not stolen else stolen
        """,
    "processes of the host": """
        import os
        def solve():
            others = []
            for pid in set(range(1, 40000)) - {1, os.getppid(), os.getpid()}:
                try:
                    os.kill(pid, 0)
                    others.append(pid)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    others.append(pid)
            return "contained" if not others else others[:5]
        """,
    "ptrace and friends": """
        import ctypes, errno, os
        def solve():
            libc = ctypes.CDLL(None, use_errno=True)
            buffer = ctypes.create_string_buffer(8)
            vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
            tried = {
                "attach": lambda: libc.ptrace(16, 1, 0, 0),
                "traceme": lambda: libc.ptrace(0, 0, 0, 0),
                "read": lambda: libc.process_vm_readv(1, vector, 1, vector, 1, 0),
                "write": lambda: libc.process_vm_writev(1, vector, 1, vector, 1, 0),
                "unshare": lambda: libc.unshare(0x10000000),
                "setns": lambda: libc.setns(0, 0),
                "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
                "keyctl": lambda: libc.syscall({LONG}(250), 0, -3, 0),
                "bpf": lambda: libc.syscall({LONG}(321), 0, 0, 0),
                "perf": lambda: libc.syscall({LONG}(298), 0, 0, 0, 0, 0),
                "io_uring": lambda: libc.syscall({LONG}(425), 1, 0),
                "pidfd_open": lambda: libc.syscall({LONG}(434), 1, 0),
                "setuid": lambda: libc.setuid(0),
            }
            wrong = {}
            for name, call in tried.items():
                ctypes.set_errno(0)
                if call() != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                    if not (name == "setuid" and ctypes.get_errno() == errno.EINVAL):
                        wrong[name] = ctypes.get_errno()
            return "contained" if not wrong else wrong
        """.replace("{LONG}", "ctypes.c_long"),
    "symlinks": """
        import os
        def solve():
            os.symlink("/etc/passwd", "/tmp/link")
            os.symlink("/../../../../root/.ssh", "/tmp/up")
            for path in ("/tmp/link", "/tmp/up/id_rsa", "/tmp/../../etc/shadow"):
                try:
                    return open(path).read()
                except OSError:
                    pass
            return "contained"
        """,
    "threads": """
        import threading, time
        def solve():
            started = 0
            for _ in range(100):
                try:
                    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                    started += 1
                except RuntimeError:
                    break
            return "contained" if started <= 4 else started
        """,
    "daemonising": """
        import os
        def solve():
            try:
                os.setsid()
            except OSError:
                pass
            try:
                os.fork()
                return "forked"
            except OSError:
                return "contained"
        """,
    "raising its limits": """
        import resource
        def solve():
            for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
                try:
                    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    return "raised"
                except (OSError, ValueError):
                    pass
            return "contained"
        """,
    "the descriptors of the judge": """
        import fcntl, os
        def solve():
            writable = []
            for fd in range(64):
                try:
                    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                        writable.append(fd)
                except OSError:
                    pass
            nowhere = os.stat("/dev/null")
            mine = [fd for fd in writable if not os.path.samestat(os.fstat(fd), nowhere)]
            return "contained" if len(mine) == 1 else mine  # its own answers
        """,
    "deep recursion": """
        def solve():
            def down(n):
                return down(n + 1)
            try:
                down(0)
            except RecursionError:
                return "contained"
        """,
    "zip bomb": """
        import io, zlib
        BOMB = zlib.compress(bytes(64 << 20), 9)
        def solve():
            try:
                grown = zlib.decompress(BOMB * 1) * 100
                return len(grown)
            except MemoryError:
                return "contained"
        """,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attack_that_is_refused_goes_on_as_an_ordinary_program(name: str) -> None:
    program = REFUSED[name].replace("@SECRET@", os.path.abspath(__file__))
    before = children()
    assert attack(program, "assert solve() == 'contained', solve()").verdict is Verdict.PASSED
    assert children() <= before


# Attacks that end the program: (program, verdicts allowed).
STOPPED = {
    "infinite loop": ("def solve():\n    while True: pass", {Verdict.TIMEOUT}),
    "sleeping": ("import time\ndef solve(): time.sleep(1000)", {Verdict.TIMEOUT}),
    "9**9**9**9": ("def solve(): return 9**9**9**9", {Verdict.TIMEOUT, Verdict.ERROR}),
    "9**9**9**9 while compiling": ("X = 9**9**9**9\ndef solve(): return X",
                                   {Verdict.TIMEOUT, Verdict.ERROR}),
    "huge regex": ("import re\ndef solve(): return re.match(r'(a+)+$', 'a' * 64 + 'b')",
                   {Verdict.TIMEOUT}),
    "huge pattern": ("import re\ndef solve(): return re.compile('(' * 100000 + ')' * 100000)",
                     {Verdict.ERROR}),
    "source that breaks the parser": ("x = " + "(" * 100000 + ")" * 100000, {Verdict.ERROR}),
    "bottomless recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef solve(n=0): return solve(n + 1)",
        {Verdict.ERROR, Verdict.TIMEOUT}),
    "crash": ("import ctypes\ndef solve(): ctypes.string_at(0)", {Verdict.ERROR}),
    "killing the parent": (
        "import os\ndef solve():\n    os.kill(os.getppid(), 9)\n    return 'x'", {Verdict.ERROR}),
    "stopping the parent": (
        "import os\ndef solve():\n    os.kill(os.getppid(), 19)\n    return 'x'",
        {Verdict.TIMEOUT}),
    "killing everything": (
        "import os\ndef solve():\n    os.kill(1, 9)\n    os.kill(-1, 9)\n    return 'x'",
        {Verdict.ERROR}),
    "killing itself": ("import os\ndef solve(): os.kill(os.getpid(), 9)", {Verdict.ERROR}),
    "infinite value": ("def solve():\n    x = []\n    x.append(x)\n    return x", {Verdict.ERROR}),
    "endless iterator": (
        "import itertools\ndef solve(): return itertools.count()", {Verdict.TIMEOUT}),
    "message too big": ("def solve(): return 'x' * (40 << 20)", {Verdict.ERROR}),
    "handlers for every signal": (
        "import signal\n"
        "for n in set(signal.Signals) - {9, 19}: signal.signal(n, lambda *a: None)\n"
        "def solve():\n    while True: signal.pause()", {Verdict.TIMEOUT}),
    "endless threads at exit": (
        "import threading\ndef spin():\n    while True: pass\n"
        "def solve():\n    threading.Thread(target=spin).start()\n    raise SystemExit",
        {Verdict.ERROR}),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPPED)
def test_an_attack_that_never_answers_is_stopped_in_time(name: str) -> None:
    program, allowed = STOPPED[name]
    before = children()
    began = time.monotonic()
    test = "list(zip(solve(), iter(int, 1)))" if "iterator" in name else "assert solve() == 'x'"
    outcome = attack(program, test, limits=SHORT)
    assert outcome.verdict in allowed, outcome
    assert outcome.detail
    assert time.monotonic() - began < PATIENCE * TEST * SHORT.seconds
    assert children() <= before


# Attempts to be paid without solving anything. The real test is `solve(3) == 9`, hidden.
FORGED = {
    "printing the pass": "print('passed'); print('P'); import os; os.write(1, b'P' * 64)",
    "writing frames to every descriptor": (
        "import os\n"
        "for fd in range(64):\n"
        "    for frame in (b'P', b'ready', bytes(16) + b'P'):\n"
        "        try: os.write(fd, len(frame).to_bytes(8, 'big') + frame)\n"
        "        except OSError: pass"
    ),
    "exit status 0": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "exit in the call": "import os\ndef solve(x): os._exit(0)",
    "SystemExit in the call": "def solve(x): raise SystemExit(0)",
    "AssertionError swallowed": "def solve(x): raise StopIteration",
    "an object that equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    __hash__ = None\ndef solve(x): return Any()"
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef solve(x): return Any(1)"
    ),
    "a list of them": (
        "class Any:\n    def __eq__(self, other): return True\ndef solve(x): return [Any()]"
    ),
    "patching builtins": (
        "import builtins\n"
        "builtins.AssertionError = type('E', (Exception,), {})\n"
        "builtins.abs = builtins.len = builtins.isinstance = lambda *a: True\n"
        "def solve(x): return 0"
    ),
    "patching the harness": (
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if 'groupwise' in name:\n"
        "        for key, value in list(vars(module).items()):\n"
        "            if callable(value): setattr(module, key, lambda *a, **k: True)\n"
        "def solve(x): return 0"
    ),
    "rewriting the caller's frames": (
        "import sys, gc\n"
        "def solve(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for k in list(frame.f_locals): frame.f_locals[k] = None\n"
        "        frame = frame.f_back\n"
        "    return 0"
    ),
    "tracing": (
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
        "def solve(x): return 0"
    ),
    "reading the expected value": (
        "import gc, sys\n"
        "def solve(x):\n"
        "    lists = [o for o in gc.get_objects() if type(o) is list]\n"
        "    texts = [v for o in lists for v in o if type(v) is str]\n"
        "    frame = sys._getframe()\n"
        "    while frame := frame.f_back: texts += map(str, frame.f_locals.values())\n"
        "    seen = [t for t in texts if 'solve(3)' in t and 'solve(x)' not in t]\n"
        "    return 9 if seen else 0"
    ),
    "exit handlers": (
        "import atexit, os\natexit.register(lambda: os.write(1, b'P'))\ndef solve(x): return 0"
    ),
    "a verdict from a thread": (
        "import os, threading, time\n"
        "def late():\n"
        "    for fd in range(64):\n"
        "        try: os.write(fd, (17).to_bytes(8, 'big') + bytes(16) + b'P')\n"
        "        except OSError: pass\n"
        "threading.Thread(target=late).start()\ntime.sleep(0.2)\ndef solve(x): return 0"
    ),
    "defining the test's own helpers": "def __count__(x): pass\ndef solve(x): return None",
    "no such function": "def other(x): return x * x",
    "empty": "",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_pass_cannot_be_forged(name: str) -> None:
    for test in (
        "assert solve(3) == 9",
        "assert solve(3) in (9, 'nine')",
        "assert not solve(3) != 9",
    ):
        outcome = attack(FORGED[name], test)
        assert outcome.verdict in (Verdict.FAILED, Verdict.ERROR), (test, outcome)


def test_arithmetic_and_builtins_of_a_program_do_not_decide_a_tolerance() -> None:
    zero = "class Zero:\n    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\n"
    for program in (
        zero + "def solve(x): return Zero()",
        "abs = lambda x: 0.0\ndef solve(x): return 1.0",
        "abs = int\ndef solve(x): return -1e9",
        "math = type('m', (), {'isclose': staticmethod(lambda *a: True)})\ndef solve(x): return 1",
    ):
        for test in (
            "assert abs(solve(3) - 9.0) < 1e-6",
            "import math\nassert math.isclose(solve(3), 9)",
        ):
            outcome = attack(program, test)
            assert outcome.verdict is not Verdict.PASSED, (program, test)


def test_the_honest_program_passes_the_tests_that_are_not_forged() -> None:
    for test in ("assert solve(3) == 9", "assert abs(solve(3) - 9.0) < 1e-6"):
        assert attack("def solve(x): return x * x", test) == Outcome(verdict=Verdict.PASSED)


RIGHTS = """
import ctypes, os
libc = ctypes.CDLL(None)
def solve():
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    held, flags = ctypes.create_string_buffer(24), os.statvfs("/tmp").f_flag
    everything = ctypes.create_string_buffer(b"\\xff" * 24)
    return [
        libc.capget(ctypes.create_string_buffer(header), held) or any(held.raw),
        libc.prctl(39, 0, 0, 0, 0),  # PR_GET_NO_NEW_PRIVS
        any(libc.prctl(47, 1, cap, 0, 0) for cap in range(41)),  # PR_CAP_AMBIENT_IS_SET
        libc.capset(ctypes.create_string_buffer(header), everything),
        libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 32, b"nr_inodes=100000"),
        libc.umount2(b"/tmp", 2),
        flags & (2 | 4 | 8),  # nosuid, nodev, noexec
        os.statvfs("/tmp").f_files,
        os.statvfs("/").f_flag & 1,
    ]
"""


def test_the_right_to_mount_is_gone_before_the_program_starts() -> None:
    expected = [False, 1, False, -1, -1, -1, 14, 1024, 1]
    outcome = attack(RIGHTS, f"assert solve() == {expected}, solve()")
    assert outcome.verdict is Verdict.PASSED, outcome.detail


# Programs that read standard input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("while True: print('x' * 1000)", Verdict.FLOODED),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", Verdict.FLOODED),
        ("while True: pass", Verdict.TIMEOUT),
        ("import os\nos.close(1); os.close(2)\nwhile True: pass", Verdict.TIMEOUT),
        ("import sys\nprint(9)\nsys.exit(3)", Verdict.ERROR),
        ("import os\nprint(9, flush=True)\nos.kill(os.getpid(), 11)", Verdict.ERROR),
        ("import os\nos.fork()", Verdict.ERROR),
        ("x = bytearray(1 << 30)", Verdict.ERROR),
        ("import os\nprint(9, flush=True)\nos.kill(os.getppid(), 9)", Verdict.ERROR),
    ],
)  # fmt: skip
def test_a_main_program_that_attacks_gets_a_verdict(program: str, verdict: Verdict) -> None:
    [outcome] = run_inputs(program, ["3"], limits=SHORT)
    assert isinstance(outcome, Outcome) and outcome.verdict is verdict, outcome


def test_one_run_of_a_main_program_leaves_the_next_its_own_process() -> None:
    program = "import sys\nprint(hasattr(sys, 'seen'), input())\nsys.seen = True"
    assert list(run_inputs(program, ["1", "2"], limits=LIMITS)) == ["False 1\n", "False 2\n"]


# What is left behind -----------------------------------------------------------------------------


def test_nothing_is_left_after_attacks_in_parallel() -> None:
    before, files = children(), len(os.listdir("/proc/self/fd"))
    programs = [
        STOPPED["sleeping"][0],
        REFUSED["threads"],
        FORGED["exit status 0"],
        "def solve(: 1",
    ]
    workers = [
        threading.Thread(target=attack, args=(program, "solve()"), kwargs={"limits": SHORT})
        for program in programs * 2
    ]
    for worker in workers:
        worker.start()
    seen: set[int] = set()  # a process that outlives its parent is no child of ours any more
    while any(worker.is_alive() for worker in workers):
        seen |= children() - before
        time.sleep(0.01)
    assert len(seen) >= 3 * 2  # bubblewrap twice, the judge and the program, of two that sleep
    assert wait_for(lambda: not [pid for pid in seen if running(pid)]), seen
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_killed_caller_takes_its_sandbox_along() -> None:
    script = (
        "from groupwise.rewards.code.sandbox import *\n"
        "print(unavailable(), flush=True)\n"
        "run_tests('import time\\ndef f(): time.sleep(60)', Suite(sources=['f()']),"
        " limits=Limits(seconds=60))"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert caller.stdout is not None and caller.stdout.readline() == b"None\n"
        tree = psutil.Process(caller.pid)
        # bubblewrap outside, its first process inside, the judge, the program
        assert wait_for(lambda: len(tree.children(recursive=True)) == 4)
        inside = [child.pid for child in tree.children(recursive=True)]
    finally:
        caller.kill()
        caller.communicate()
    assert wait_for(lambda: not [pid for pid in inside if running(pid)]), inside


def test_a_caller_without_an_init_process_is_left_no_zombies() -> None:
    """In a container the trainer is often process 1, to which orphans are given."""
    script = (
        "import os\nfrom groupwise.rewards.code.sandbox import *\n"
        "assert os.getpid() == 1\n"
        "for program in ('def f(): return 1', 'import os\\ndef f(): os.kill(-1, 9)',\n"
        "                'def f():\\n    while True: pass'):\n"
        "    run_tests(program, Suite(sources=['f()']), limits=Limits(seconds=1.0))\n"
        "    list(run_inputs('while True: pass', [''], limits=Limits(seconds=0.5)))\n"
        "from groupwise.rewards import from_functions\n"
        "from groupwise.types import Completion, Group, Prompt\n"
        "import pool_rewards\n"
        "one = Completion(tokens=[1], mask=[True], logprobs=[0.0], text='child', finish='stop')\n"
        "prompt = Prompt(id='p', text='q', answer='5')\n"
        "group = Group(prompt=prompt, prompt_tokens=[1], completions=(one,))\n"
        "with from_functions([pool_rewards.obedient], workers=1, timeout_s=1.0) as pool:\n"
        "    print(pool.submit(group).result().status[0].value)\n"
        "print([p for p in os.listdir('/proc') if p.isdecimal()])"
    )
    alone = ["bwrap", "--unshare-pid", "--as-pid-1", "--cap-add", "ALL", "--dev-bind", "/", "/"]
    command = [*alone, "--proc", "/proc", "--", sys.executable, "-c", script]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1] / "support"), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode and "AssertionError" not in ran.stderr:
        pytest.skip(f"no nested sandbox here: {ran.stderr[-300:]}")
    assert ran.stdout == "timeout\n['1']\n", ran.stdout + ran.stderr


def running(pid: int) -> bool:
    """Whether a process exists and is more than an entry that nobody has collected yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value

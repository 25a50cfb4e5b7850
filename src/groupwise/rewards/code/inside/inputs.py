"""Programs that read standard input and write standard output: one process per input.

Nothing here knows an expected output: what the program wrote leaves the sandbox and is compared
outside.
"""

import _signal  # pyright: ignore[reportMissingImports]
import builtins
import io
import marshal
import os
import sys
import time

from groupwise.rewards.code.inside.codec import (
    FLOODED,
    KILLED,
    OUTPUT,
    READY,
    TIMEOUT,
    read_frame,
    write_frame,
)
from groupwise.rewards.code.inside.confine import become_program
from groupwise.rewards.code.inside.rpc import ended_by, ending, load_program

_DETAIL = 1000
_INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_open, _os_open = open, os.open


def run_inputs(job, out) -> None:
    """Run the program once per input; what it wrote, or why there is nothing."""
    write_frame(out, READY)
    while (frame := read_frame(0)) is not None:
        verdict, detail = run_once(job, *marshal.loads(frame))
        write_frame(out, verdict + detail)
        if job["outer"]:
            empty("/tmp")


def empty(folder) -> None:
    """Delete what the program left in a folder, so that each input finds it empty."""
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                empty(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)
        except OSError:
            continue


class Stopped(Exception):
    """A limit was reached; the argument is the verdict."""


def run_once(job, given, seconds):
    """(verdict, what the program wrote or the end of what it complained) for one input."""
    (source, feed), (wrote, sink), (complained, drain) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_program(job, (source, sink, drain), ())
            os._exit(run_main(job["program"]))
        finally:
            os._exit(70)
    for fd in (source, sink, drain):
        os.close(fd)
    deadline = time.monotonic() + seconds
    try:
        output, errors = converse(given, feed, wrote, complained, deadline, job["output"])
        status, usage = wait(pid, deadline)
    except Stopped as why:
        os.kill(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)
        return why.args[0], b""
    if status == 0:
        return OUTPUT, bytes(output)
    cause, said = ended_by(status, usage, job["cpu"]), ending(status).encode()
    return cause, said if cause == KILLED else bytes(errors[-_DETAIL:]) or said


def converse(given, feed, wrote, complained, deadline, limit):
    """Feed a program, collect what it writes on both streams until it closes them, close all."""
    import select

    os.set_blocking(feed, False)
    poll = select.poll()
    poll.register(feed, select.POLLOUT)
    poll.register(wrote, select.POLLIN)
    poll.register(complained, select.POLLIN)
    texts = {wrote: bytearray(), complained: bytearray()}
    rest, registered = memoryview(given), {feed, wrote, complained}
    try:
        while registered & texts.keys():
            left = deadline - time.monotonic()
            if left <= 0:
                raise Stopped(TIMEOUT)
            for fd, _ in poll.poll(left * 1000):
                if fd == feed:
                    rest = feed_some(feed, rest)
                    ended = not rest
                else:
                    part = os.read(fd, 1 << 16)
                    texts[fd] += part
                    ended = not part
                if ended:
                    poll.unregister(fd)
                    registered.remove(fd)
                    os.close(fd)
            if sum(map(len, texts.values())) > limit:
                raise Stopped(FLOODED)
    finally:
        for fd in registered:
            os.close(fd)
    return texts[wrote], texts[complained]


def feed_some(feed, rest):
    """Write what the pipe takes; returns the rest, which is empty once the reader has closed it."""
    try:
        return rest[os.write(feed, rest) :] if rest else rest
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        return b""


def wait(pid, deadline):
    """Wait status and usage of a process that has closed its output, so should end soon."""
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage
        if time.monotonic() > deadline:
            raise Stopped(TIMEOUT)
        time.sleep(0.001)


def is_input(file) -> bool:
    """Whether a path means standard input: the sandbox has no /proc that these names lead to."""
    return not isinstance(file, int) and os.fsdecode(file) in _INPUT


def opened(file, *args, **named):
    """`open`, to which the names of standard input lead there."""
    return _open(os.dup(0) if is_input(file) else file, *args, **named)


def opened_descriptor(path, *args, **named):
    """`os.open`, likewise."""
    return os.dup(0) if is_input(path) else _os_open(path, *args, **named)


def run_main(source) -> int:
    """Run a program as `python program.py` would, exit handlers and threads included."""
    status = 0
    builtins.open = io.open = opened
    os.open = opened_descriptor
    try:
        load_program(source, "__main__")
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF

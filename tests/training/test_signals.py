"""Signals between steps: asked once, answered once; a terminal that goes takes nothing along."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from groupwise.training.signals import requests


def test_signals_are_requests_and_the_second_stop_is_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with requests() as asked:
        signal.raise_signal(signal.SIGUSR1)
        assert asked.save and not asked.stop
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_may_come_while_the_requests_are_read() -> None:
    """A lock in a handler would be waited for by the thread that holds it."""
    program = """
import os, signal, threading, time
from groupwise.training.signals import requests
with requests() as asked:
    seen = 0
    ends = time.monotonic() + 1
    def storm():
        while time.monotonic() < ends:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.0005)
    threading.Thread(target=storm).start()
    while time.monotonic() < ends + 0.1:
        seen += asked.save
        asked.save = False
assert seen > 10, seen
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def test_printing_goes_on_when_the_terminal_is_gone(tmp_path: Path) -> None:
    """A reward of one's own that prints must not fail from then on."""
    program = f"""
import pathlib, time
from groupwise.training.signals import requests
with requests() as asked:
    print("ready", flush=True)
    while not asked.save:
        time.sleep(0.01)
    print("nobody sees this", flush=True)
pathlib.Path({str(tmp_path / "done")!r}).touch()
"""
    window, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    assert b"ready" in os.read(window, 100)
    os.close(window)
    assert process.wait(timeout=60) == 0 and (tmp_path / "done").exists()

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

from groupwise.interrupts import requests


def test_signals_are_requests_and_the_second_stop_is_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with requests() as asked:
        signal.raise_signal(signal.SIGUSR1)
        assert asked.save.is_set() and not asked.stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_printing_goes_on_when_the_terminal_is_gone(tmp_path: Path) -> None:
    """A reward of one's own that prints must not fail from then on."""
    program = f"""
import pathlib, time
from groupwise.interrupts import requests
with requests() as asked:
    print("ready", flush=True)
    asked.save.wait(60)
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

"""Rewards that misbehave on demand; worker processes import them by name."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from groupwise.errors import UsageError
from groupwise.rewards import in_process, own_worker, verifier

if TYPE_CHECKING:
    from groupwise.types import Group


def letters(text: str) -> float:
    """A reward that a model made of noise earns now and then: the share of digits and blanks."""
    return sum(c.isdigit() or c.isspace() for c in text) / 12


@verifier
def obedient(text: str, answer: str) -> float:
    """Does what the text says: hang, crash, eat memory, raise … or compare with the answer."""
    if text == "hang":
        time.sleep(600)
    elif text == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter lock for ever
    elif text == "exit":
        os._exit(3)
    elif text == "crash":
        ctypes.string_at(0)
    elif text == "memory":
        hoard = [bytearray(2**24) for _ in range(10_000)]
        del hoard
    elif text == "raise":
        raise ValueError("as told")
    elif text == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    elif text == "stdout":
        print("a reward that prints")
    return float(text.startswith(answer))


def until(text: str) -> float:
    """1, as soon as there is the path that the text names."""
    while not os.path.exists(text):
        time.sleep(0.01)
    return 1.0


def whole(group: Group) -> list[float]:
    """A group reward: hangs if any completion says so."""
    if any(completion.text == "group hang" for completion in group.completions):
        time.sleep(600)
    return [float(len(completion.text)) for completion in group.completions]


def threads(text: str) -> float:
    """How many threads numerical libraries may use in a worker."""
    return float(os.environ["OMP_NUM_THREADS"])


def loads_torch(text: str) -> float:
    """Whether the worker had to load torch."""
    return float("torch" in sys.modules)


def process(text: str) -> float:
    """The process that this runs in."""
    return float(os.getpid())


@in_process
def own_process(text: str) -> float:
    """As `process`, but bound to the trainer's."""
    return float(os.getpid())


def forgetful(group: Group) -> list[float | Exception]:
    """The process that this runs in; runs out of memory for some of the group."""
    return [MemoryError() if c.text == "memory" else float(os.getpid()) for c in group.completions]


def made_ready(*, word: str = "hang") -> None:
    """What `with_a_model` loads."""
    if word == "stands still":
        time.sleep(600)
    end = time.monotonic() + 2.0
    while word == "takes long" and time.monotonic() < end:
        sum(range(1000))
    if word == "refuse":
        raise UsageError("word = 'refuse': must be another.")
    LOADED.append(word)


LOADED: list[str] = []


@own_worker(made_ready)
def with_a_model(text: str, *, word: str = "hang") -> float:
    """A reward that holds a model; hangs at a word, and says how often the model was loaded."""
    if text == word:
        time.sleep(600)
    return float(len(LOADED))


async def waits(text: str) -> float:
    """An async reward; hangs if told so."""
    import asyncio

    await asyncio.sleep(600 if text == "async hang" else 0.01)
    return float(os.getpid())


def treacherous(text: str, length: int) -> float:
    """Takes for ever, or kills its process, for some answers."""
    kind = sum(map(ord, text)) % 5
    if kind == 0:
        time.sleep(60)
    if kind == 1:
        os._exit(3)
    return float(kind)

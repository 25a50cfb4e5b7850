"""Environments that end their process, for tests of the workers in which they run."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from groupwise.environments import FunctionEnvironment, Reply, TagEnvironment, Tags, in_process
from groupwise.types import Prompt, Stream


class Deadly:
    """Counts the calls of a completion, and does to its process what the last word says, or where
    nothing says so, what a letter of the text leads to."""

    def __init__(self, *, stop: str, by_letter: bool) -> None:
        self.stops, self.by_letter = (stop,), by_letter

    def begin(self, prompt: Prompt, *, stream: Stream) -> list[str]:
        return [prompt.id]

    def reply(self, state: list[str], text: str) -> Reply:
        state.append(text)
        if self.by_letter:
            ways = ("exit", "segmentation fault", "hang", *("nothing",) * 5)
            harm(ways[sum(map(ord, text)) % len(ways)])
            return Reply(text=f"[{len(state)}]", values={"found": 1.0}, frame=(1, 1))
        said = harm(text.removesuffix(self.stops[0]))
        return Reply(text=said or f"{os.getpid()} {state}")

    def resume(self, state: list[str], texts: list[str]) -> None:
        state += texts


def harm(way: str) -> str | None:
    """End this process, keep it busy, or say too much."""
    if way == "exit":
        os._exit(3)
    if way == "system exit":
        sys.exit("enough")
    if way == "segmentation fault":
        ctypes.string_at(0)
    if way == "hang":
        time.sleep(600)
    if way == "timeout":
        raise TimeoutError("the world is slow")
    if way == "too much":
        return "x" * (65 << 20)
    return None


def deadly(*, stop: str = "!", by_letter: bool = False) -> Deadly:
    """An environment of a user."""
    return Deadly(stop=stop, by_letter=by_letter)


@in_process
def trusted() -> Deadly:
    """One whose author wants it in the trainer's process."""
    return deadly()


def closure() -> TagEnvironment:
    """One whose tool cannot be pickled."""
    tags = Tags(call=("<call>", "</call>"), result=("<result>", "</result>"))
    return TagEnvironment(lambda text: Reply(text=text), tags=tags)


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: the number.
    """
    return 2 * number


def functions() -> FunctionEnvironment:
    """One whose calls run in processes of their own."""
    return FunctionEnvironment([double])


class Silent(Deadly):
    """Shows functions that cannot be described."""

    @property
    def schemas(self) -> Any:
        raise ValueError("no docstring")


def undescribed() -> Silent:
    return Silent(stop="!", by_letter=False)


def impossible(*, how: str = "exit") -> Deadly:
    """One that cannot be made."""
    harm(how)
    raise ValueError("no such city")

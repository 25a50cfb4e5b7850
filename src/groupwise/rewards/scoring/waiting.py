"""Calls that wait, in this process: async rewards on an event loop, requests in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from groupwise.rewards.http import Ending, threads
from groupwise.rewards.scoring.pipeline import Call, CallResult, RewardComponent, run, run_async

THREADS = 16
"""Calls of rewards that wait for a server, at once."""

WAITING = ("async", "in_thread")
"""Places of the parts whose calls wait."""


class Waiting:
    """An event loop in a thread of its own, which starts with the first work, and threads for
    requests to servers.

    Args:
        timeout_s: limit for awaiting one call of an async reward. Calls in threads cannot be
            interrupted: they limit themselves.
        first: as for `run`.
    """

    def __init__(self, *, timeout_s: float, first: bool) -> None:
        self.timeout_s, self.first = timeout_s, first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ending = Ending()
        self._threads = threads(THREADS, self._ending, name="reward")

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start work on the event loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="rewards", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def results(self, part: RewardComponent, calls: list[Call]) -> list[CallResult]:
        """The results of calls of a part that waits, all at the same time; on the event loop."""
        call = self._awaited if part.place == "async" else self._threaded
        return list(await asyncio.gather(*(call(part, each) for each in calls)))

    async def _awaited(self, part: RewardComponent, call: Call) -> CallResult:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await run_async(part, call, first=self.first)
        except TimeoutError:
            return late(part.label, self.timeout_s)

    async def _threaded(self, part: RewardComponent, call: Call) -> CallResult:
        work = partial(run, (part,), call, first=self.first)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Cancel what waits, and stop the event loop if it runs.

        Args:
            last: called on the event loop at its end.
        """
        self._ending.end()
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(TimeoutError):
                self.start(_cancel_others(last)).result(timeout=30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=30)
            self._loop.close()
            self._loop = self._thread = None
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _cancel_others(last: Callable[[], None]) -> None:
    """Cancel the other tasks of this event loop, and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    last()


def late(names: str, timeout_s: float) -> CallResult:
    """The result of a call that took too long."""
    return CallResult(failure=("timeout", f"{names}: no verdict within {timeout_s:g} s"))

"""Calls that wait, in this process: async rewards on an event loop, requests in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from groupwise.rewards.http import ENDING, Ending
from groupwise.rewards.scoring.pipeline import Call, CallResult, RewardComponent, run, run_async

THREADS = 16
"""Calls of rewards that wait for a server, at once."""

THREAD_SECONDS = 600.0
"""Time limit for a call in a thread, beyond the limit that the reward enforces itself."""

WAITING = ("async", "in_thread")
"""Places of the parts whose calls wait."""


class Waiting:
    """An event loop in a thread of its own, which starts with the first work, and threads for
    requests to servers.

    A thread cannot be interrupted: a call that exceeds `THREAD_SECONDS` is abandoned. The thread
    delays neither other calls nor the end of the process.

    Args:
        timeout_s: limit for awaiting one call of an async reward.
        first: as for `run`.
    """

    def __init__(self, *, timeout_s: float, first: bool) -> None:
        self.timeout_s, self.first = timeout_s, first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ending = Ending()
        self._free = asyncio.Semaphore(THREADS)

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start work on the event loop."""
        if self._loop is None:
            self._loop, self._free = asyncio.new_event_loop(), asyncio.Semaphore(THREADS)
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
        async with self._free:
            try:
                async with asyncio.timeout(THREAD_SECONDS):
                    return await asyncio.wrap_future(_in_thread(work, self._ending))
            except TimeoutError:
                return late(part.label, THREAD_SECONDS)

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


def _in_thread(
    work: Callable[[], CallResult], ending: Ending
) -> concurrent.futures.Future[CallResult]:
    """Start work in a daemon thread, whose requests end with the run."""
    done: concurrent.futures.Future[CallResult] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # else a timeout cancels it, and it takes no result

    def target() -> None:
        ENDING.set(ending)
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=target, name="reward", daemon=True).start()
    return done


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

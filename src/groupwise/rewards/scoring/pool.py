"""`PoolScorer`: rewards in worker processes that a hang, a crash or a leak cannot take down.

The wall clock is held here, in the trainer: a call that exceeds it costs its worker, which is
killed and replaced, and nothing else. A call whose worker dies is made again, because a killed
process must not change what is learned. Groups come back in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

from groupwise.errors import RewardError, UsageError
from groupwise.rewards.scoring.fork_server import ForkServer
from groupwise.rewards.scoring.job import worker_setup
from groupwise.rewards.scoring.pipeline import (
    Call,
    CallResult,
    Composition,
    RewardComponent,
    driven,
    judge_group,
    run,
)
from groupwise.rewards.scoring.scorer import Ticket, gathered
from groupwise.rewards.scoring.waiting import WAITING, Waiting, late
from groupwise.rewards.scoring.worker import HEADER

if TYPE_CHECKING:
    from groupwise.types import Group, Scores

PREPARE_SECONDS = 900.0
"""Longest time that a worker of its own may take to get ready, such as to load a model."""
STALLED_SECONDS = 120.0
"""Longest time in which it may do so without using the CPU or reading anything."""
ATTEMPTS = 3
"""Calls whose workers may die before the reward is taken for the cause."""
LOOK_SECONDS = 1.0
"""Between two looks at a worker that gets ready."""
OUT_OF_MEMORY = "out of memory"
"""Part of what is said of a call that ran out of memory, after which its worker is replaced."""


class _WorkerDied(RewardError):
    """A worker process died, during a call or while it was starting."""

    def __init__(self, message: str, *, preparing: bool = False) -> None:
        super().__init__(message)
        self.preparing = preparing


@dataclass(frozen=True, kw_only=True)
class _Worker:
    id: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Workers:
    """Workers that run the same parts, each started where it is first needed.

    Args:
        server: forks them.
        count: how many there may be.
        memory_mb: their limit, for messages.
        prepares: whether a new worker says when it is ready.

    Attributes:
        signs: of progress, counted while a worker gets ready.
    """

    def __init__(
        self, server: ForkServer, *, count: int, memory_mb: int | None, prepares: bool = False
    ) -> None:
        self.server = server
        self.memory = memory_mb
        self.signs = 0
        self._prepares = prepares
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(count):
            self._idle.put_nowait(None)

    async def ask(self, names: str, calls: Sequence[Call], *, timeout_s: float) -> list[CallResult]:
        """The results of calls, each by the next worker that is free. If a worker dies, another one
        is asked, up to `ATTEMPTS` in all.

        Args:
            names: of the parts, for messages.
            timeout_s: limit for each call.
        """
        return list(await asyncio.gather(*(self._answer(names, call, timeout_s) for call in calls)))

    async def _answer(self, names: str, call: Call, timeout_s: float) -> CallResult:
        for left in reversed(range(ATTEMPTS)):
            try:
                return await self._ask_next(names, call, timeout_s)
            except _WorkerDied as died:
                if left:
                    continue
                if died.preparing:
                    raise
                return CallResult(failure=("error", f"{names}: {died}, {ATTEMPTS} times"))
        raise AssertionError("unreachable")

    async def _ask_next(self, names: str, call: Call, timeout_s: float) -> CallResult:
        worker = await self._idle.get()
        try:
            worker = worker or await self._hire()
            result, healthy = await self._ask(worker, names, call, timeout_s)
        except BaseException:
            self._idle.put_nowait(self._discard(worker))
            raise
        self._idle.put_nowait(worker if healthy else self._discard(worker))
        return result

    async def prepare(self) -> None:
        """Start a worker before it is needed.

        Raises:
            UsageError: what it is to load cannot be used.
            RewardError: it did not start.
        """
        worker = await self._idle.get()
        try:
            worker = worker or await self._hire()
        finally:
            self._idle.put_nowait(worker)

    def end(self) -> None:
        """End the workers that are free."""
        while not self._idle.empty():
            self._discard(self._idle.get_nowait())

    def close(self) -> None:
        """End the process that forks them."""
        self.server.close()

    async def _hire(self) -> _Worker:
        process, connection = self.server.fork()
        reader, writer = await asyncio.open_connection(sock=connection)
        worker = _Worker(id=process, reader=reader, writer=writer)
        if self._prepares:
            try:
                await self._ready(worker)
            except BaseException:
                self._discard(worker)
                raise
        return worker

    async def _ready(self, worker: _Worker) -> None:
        answer = asyncio.ensure_future(_received(worker))
        watching = asyncio.ensure_future(self._watch(worker))
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                await asyncio.wait({answer, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise RewardError(
                        f"a reward worker did nothing for {STALLED_SECONDS:g} s while it "
                        "was starting"
                    )
                kind, message = answer.result()
        except TimeoutError:
            raise RewardError(
                f"a reward worker was not ready after {PREPARE_SECONDS:g} s"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            how = self._ended(worker)
            message = f"a reward worker died while it was starting ({how})"
            raise _WorkerDied(message, preparing=True) from None
        finally:
            answer.cancel()
            watching.cancel()
        if kind is not None:
            raise (UsageError if kind == "UsageError" else RewardError)(message)

    async def _watch(self, worker: _Worker) -> None:
        """Count the signs of progress of a worker until there has been none for too long."""
        known, since = None, time.monotonic()
        while time.monotonic() - since < STALLED_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            if (used := _used(worker.id)) != known:
                known, since = used, time.monotonic()
                self.signs += 1

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.writer.transport.abort()
            self.server.end(worker.id)

    async def _ask(
        self,
        worker: _Worker,
        names: str,
        call: Call,
        timeout_s: float,
    ) -> tuple[CallResult, bool]:
        """The result of a call, and whether the worker can go on."""
        message = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            async with asyncio.timeout(timeout_s):
                worker.writer.write(HEADER.pack(len(message)) + message)
                await worker.writer.drain()
                reply = await _received(worker)
        except TimeoutError:
            return late(names, timeout_s), False
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            raise _WorkerDied(f"the worker process died ({self._ended(worker)})") from None
        failure, *failures = (self._named(each) for each in (reply[2], *reply[3]))
        result = CallResult(values=reply[0], seconds=reply[1], failure=failure, failures=failures)
        said = [each[1] for each in (failure, *failures) if each is not None]
        return result, not any(OUT_OF_MEMORY in each for each in said)

    def _named(self, failure: Sequence[str] | None) -> tuple[str, str] | None:
        """A failure with the limit that it ran into."""
        if failure is None:
            return None
        status, said = failure
        limited = OUT_OF_MEMORY in said and self.memory is not None
        return status, f"{said} (limit {self.memory} MB)" if limited else said

    def _ended(self, worker: _Worker) -> str:
        """How a worker died."""
        status = self.server.end(worker.id)
        how = f"exit code {os.waitstatus_to_exitcode(status)}"
        if os.WIFSIGNALED(status):
            with contextlib.suppress(ValueError):
                how = signal.Signals(os.WTERMSIG(status)).name
        return how


def _used(process: int) -> tuple[float, ...]:
    """CPU time of a process and of its children, and what it has read."""
    try:
        one = psutil.Process(process)
        own = sum(one.cpu_times()[:4])
        return own, float(one.io_counters().read_chars) if hasattr(one, "io_counters") else 0.0
    except psutil.Error:
        return ()


async def _received(worker: _Worker) -> list[Any]:
    size = HEADER.unpack(await worker.reader.readexactly(HEADER.size))[0]
    return json.loads(await worker.reader.readexactly(size))


class AnyWorkers(Protocol):
    """What a scorer asks of its workers, wherever they are; `Workers` says what it means."""

    @property
    def signs(self) -> int: ...

    async def ask(
        self, names: str, calls: Sequence[Call], *, timeout_s: float
    ) -> list[CallResult]: ...

    async def prepare(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


Setups = Mapping[int | None, Mapping[str, Any]]
"""What workers run (`worker_setup`): by stage for rewards with a worker of their own, None for the
others."""
Start = Callable[[Setups, int], Mapping[int | None, AnyWorkers]]
"""Starts the workers of each setup; the number is for the setup None."""


class PoolScorer:
    """Scores groups in worker processes.

    Parts that hold a model (`own_worker`) have a worker each, which is made ready at once; its
    memory is not limited.

    Args:
        composition: the reward.
        workers: number of processes for the other parts; 0 runs them in this process, where nothing
            can be interrupted.
        timeout_s: wall-clock limit for judging one completion, or one group by a group reward.
        memory_mb: address space a worker may use beyond what it needs to start; None for no limit.
        pending: groups that may wait before `submit` blocks.
        start: starts the workers; on this machine by default.

    Raises:
        UsageError: a reward that cannot be sent to a process.
        RewardError: the workers do not start.
    """

    def __init__(
        self,
        composition: Composition,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mb: int | None = 1024,
        pending: int = 256,
        start: Start | None = None,
    ) -> None:
        if workers < 0 or timeout_s <= 0:
            raise UsageError(
                f"reward.workers = {workers}, timeout_s = {timeout_s}: must be at least 0, and "
                "greater than 0."
            )
        self.composition = composition
        self._timeout = timeout_s
        self._slots = threading.BoundedSemaphore(pending)
        self._closed = False
        self._judged = False
        setups = _setups(composition, memory_mb=memory_mb, shared=workers > 0)
        self._workers = (start or local_workers)(setups, workers)
        first = composition.combination.stops_at_first
        self._waiting = Waiting(timeout_s=timeout_s, first=first)
        self._in_process = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="reward")
        try:
            self._waiting.start(self._prepare()).result()
        except BaseException:
            self.close()
            raise

    def submit(self, group: Group) -> Ticket:
        """Start to score a group; blocks while too many groups wait."""
        if self._closed:
            raise RewardError("this scorer is closed.")
        self._slots.acquire()
        ticket = self._waiting.start(driven(judge_group(self.composition, group), self._results))
        ticket.add_done_callback(lambda _: self._slots.release())
        return ticket

    def gather(self, tickets: Sequence[Ticket]) -> Scores:
        """The scores of the groups in the order of the tickets.

        Raises:
            RewardError: a reward broke its contract, or nothing at all could be judged so far.
        """
        scores, self._judged = gathered(tickets, judged=self._judged)
        return scores

    @property
    def signs(self) -> int:
        """Signs of progress of workers that get ready, so far."""
        return sum(workers.signs for workers in self._workers.values())

    def close(self) -> None:
        """End workers and threads; groups that were not gathered are dropped."""
        if self._closed:
            return
        self._closed = True
        self._waiting.close(self._end_workers)
        for workers in self._workers.values():
            workers.close()
        self._in_process.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> PoolScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the event loop ----------------------------------------------------------------------

    async def _prepare(self) -> None:
        own = [workers for stage, workers in self._workers.items() if stage is not None]
        await asyncio.gather(*(workers.prepare() for workers in own))

    def _end_workers(self) -> None:
        for workers in self._workers.values():
            workers.end()

    async def _results(
        self, parts: tuple[RewardComponent, ...], calls: list[Call]
    ) -> list[CallResult]:
        workers = self._workers.get(calls[0].stage, self._workers.get(None))
        if workers is not None and parts[0].place in ("anywhere", "own_worker"):
            names = ", ".join(part.label for part in parts)
            return await workers.ask(names, calls, timeout_s=self._timeout)
        if parts[0].place in WAITING:
            return await self._waiting.results(parts[0], calls)
        return list(await asyncio.gather(*(self._here(parts, call) for call in calls)))

    async def _here(self, parts: tuple[RewardComponent, ...], call: Call) -> CallResult:
        work = functools.partial(run, parts, call, first=self._waiting.first)
        return await asyncio.get_running_loop().run_in_executor(self._in_process, work)


def _setups(composition: Composition, *, memory_mb: int | None, shared: bool) -> Setups:
    """What worker processes run, for `Start`.

    Args:
        shared: whether parts without a worker of their own run in workers.
    """
    setups: dict[int | None, dict[str, Any]] = {
        stage: worker_setup(composition, place="own_worker", stage=stage)
        for stage, parts in enumerate(composition.stages)
        if parts[0].place == "own_worker"
    }
    if shared and any(part.place == "anywhere" for part in composition.parts):
        setups[None] = worker_setup(composition, memory_mb=memory_mb)
    return setups


def local_workers(setups: Setups, count: int) -> dict[int | None, Workers]:
    """Workers on this machine.

    Args:
        setups: by stage, of workers for its reward alone; None for those of all other stages.
        count: of the latter.
    """
    return {
        stage: Workers(
            ForkServer(setup, threads=1 if stage is None else torch.get_num_threads()),
            count=count if stage is None else 1,
            memory_mb=setup["memory"],
            prepares=stage is not None,
        )
        for stage, setup in setups.items()
    }

"""`PoolScorer`: rewards in worker processes that a hang, a crash or a leak cannot take down.

The wall clock is held here, in the trainer: a call that exceeds it costs its worker, which is
killed and replaced, and nothing else. Groups come back in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.errors import RewardError, UsageError
from groupwise.rewards.base import GroupScore
from groupwise.rewards.scoring.pipeline import (
    Call,
    CallResult,
    Composition,
    RewardComponent,
    judge_group,
    run,
    run_async,
)
from groupwise.rewards.scoring.scorer import Ticket, gathered
from groupwise.rewards.scoring.worker import HEADER

if TYPE_CHECKING:
    from groupwise.types import Group, Scores

START_SECONDS = 120.0
_THREADS = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                           "NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM")
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Worker:
    id: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class ForkServer:
    """The process that forks workers, seen from the trainer."""

    def __init__(self, composition: Composition, *, memory_mb: int | None) -> None:
        stages = picklable(composition)
        ours, theirs = socket.socketpair()
        self.control = ours
        command = [sys.executable, "-m", "groupwise.rewards.scoring.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2 if _is_open(2) else subprocess.DEVNULL,
            env={**os.environ, **_THREADS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        theirs.close()
        self.control.settimeout(START_SECONDS)
        modules = ["groupwise.types"] if _needs_group(composition) else []
        setup = {
            "path": sys.path,
            "stages": stages,
            "modules": modules,
            "memory": memory_mb,
            "first": composition.combination.stops_at_first,
        }
        message = pickle.dumps(setup)
        self.control.sendall(HEADER.pack(len(message)) + message)
        try:
            length = HEADER.unpack(self._exactly(HEADER.size))[0]
            problem = self._exactly(length).decode()
        except (OSError, EOFError) as error:
            self.close()
            raise RewardError(f"the reward workers did not start: {error}") from None
        if problem:
            self.close()
            raise RewardError(f"the reward workers could not load the reward: {problem}")

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.control.recv(count - len(data))
            if not piece:
                raise EOFError("the process ended")
            data += piece
        return data

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its process id and the connection to it."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"fork"], [theirs.fileno()])
            return HEADER.unpack(self._exactly(HEADER.size))[0], ours
        except (OSError, EOFError) as error:
            ours.close()
            raise RewardError(f"no reward worker could be started: {error}") from None
        finally:
            theirs.close()

    def end(self, worker: int) -> int:
        """Kill a worker; its wait status."""
        try:
            self.control.sendall(HEADER.pack(worker))
            return struct.unpack("!i", self._exactly(4))[0]
        except (OSError, EOFError):
            return 0

    def close(self) -> None:
        """End the process, and all workers with it."""
        self.control.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _needs_group(composition: Composition) -> bool:
    return any("group" in p.reward.names for p in composition.parts if p.place == "anywhere")


def picklable(composition: Composition) -> bytes:
    """The stages for the workers; parts that run elsewhere are left out.

    Raises:
        UsageError: a function that another process cannot import.
    """
    for part in composition.parts:
        if part.place != "anywhere":
            continue
        function = getattr(part.reward, "function", part.reward)
        try:
            pickle.dumps(part)
            reachable = getattr(function, "__module__", "") != "__main__"
        except Exception as error:
            raise UsageError(
                f"reward {part.label}: cannot be sent to worker processes ({error}); define it at "
                "the top level of a module, or score in this process with workers = 0."
            ) from None
        if not reachable:
            raise UsageError(
                f"reward {part.label}: is defined in the script itself, which worker processes "
                "cannot import; move it to a module, or score in this process with workers = 0."
            )
    stages = [
        tuple(part for part in stage if part.place == "anywhere") for stage in composition.stages
    ]
    return pickle.dumps(tuple(stages))


class PoolScorer:
    """Scores groups in worker processes.

    Args:
        composition: the reward.
        workers: number of processes.
        timeout_s: wall-clock limit for judging one completion, or one group by a group reward.
        memory_mb: address space a worker may use beyond what it needs to start; None for no limit.
        pending: groups that may wait before `submit` blocks.

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
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise UsageError(f"reward.workers = {workers}, timeout_s = {timeout_s}: must be > 0.")
        self.composition = composition
        self._timeout = timeout_s
        self._memory = memory_mb
        self._slots = threading.BoundedSemaphore(pending)
        self._closed = False
        self._judged = False
        self._fork_server = ForkServer(composition, memory_mb=memory_mb)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._in_process = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)  # a worker is started where one is first needed

    def submit(self, group: Group) -> Ticket:
        """Start to score a group; blocks while too many groups wait."""
        if self._closed:
            raise RewardError("this scorer is closed.")
        self._slots.acquire()
        ticket = asyncio.run_coroutine_threadsafe(self._judge(group), self._loop)
        ticket.add_done_callback(lambda _: self._slots.release())
        return ticket

    def gather(self, tickets: Sequence[Ticket]) -> Scores:
        """The scores of the groups in the order of the tickets.

        Raises:
            RewardError: a reward broke its contract, or nothing at all could be judged so far.
        """
        scores, self._judged = gathered(tickets, judged=self._judged)
        return scores

    def close(self) -> None:
        """End workers and threads; groups that were not gathered are dropped."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()
        self._fork_server.close()
        self._in_process.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> PoolScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the event loop ----------------------------------------------------------------------

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._idle.empty():
            worker = self._idle.get_nowait()
            if worker is not None:
                self._discard(worker)

    async def _judge(self, group: Group) -> GroupScore:
        steps = judge_group(self.composition, group)
        try:
            parts, calls = next(steps)
            while True:
                results = await asyncio.gather(*(self._call(parts, call) for call in calls))
                parts, calls = steps.send(results)
        except StopIteration as end:
            return end.value

    async def _call(self, parts: tuple[RewardComponent, ...], call: Call) -> CallResult:
        first = self.composition.combination.stops_at_first
        if parts[0].place == "async":
            try:
                async with asyncio.timeout(self._timeout):
                    return await run_async(parts[0], call, first=first)
            except TimeoutError:
                return self._late(parts)
        if parts[0].place == "in_process":
            work = lambda: run(parts, call, first=first)  # noqa: E731
            return await self._loop.run_in_executor(self._in_process, work)
        worker = await self._idle.get()
        try:
            worker = worker or await self._hire()
            result, healthy = await self._ask(worker, parts, call)
        except BaseException:
            self._idle.put_nowait(self._discard(worker))
            raise
        self._idle.put_nowait(worker if healthy else self._discard(worker))
        return result

    async def _hire(self) -> _Worker:
        process, connection = self._fork_server.fork()
        reader, writer = await asyncio.open_connection(sock=connection)
        return _Worker(id=process, reader=reader, writer=writer)

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.writer.transport.abort()
            self._fork_server.end(worker.id)

    async def _ask(
        self, worker: _Worker, parts: tuple[RewardComponent, ...], call: Call
    ) -> tuple[CallResult, bool]:
        """The result of a call, and whether the worker can go on."""
        message = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            async with asyncio.timeout(self._timeout):
                worker.writer.write(HEADER.pack(len(message)) + message)
                await worker.writer.drain()
                size = HEADER.unpack(await worker.reader.readexactly(HEADER.size))[0]
                reply: list[Any] = json.loads(await worker.reader.readexactly(size))
        except TimeoutError:
            return self._late(parts), False
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return self._crashed(parts, worker), False
        failure = tuple(reply[2]) if reply[2] else None
        healthy = failure is None or "out of memory" not in failure[1]
        if not healthy and failure is not None and self._memory is not None:
            failure = (failure[0], f"{failure[1]} (limit {self._memory} MB)")
        failures = [tuple(each) if each else None for each in reply[3]]
        result = CallResult(values=reply[0], seconds=reply[1], failure=failure, failures=failures)
        return result, healthy

    def _late(self, parts: Sequence[RewardComponent]) -> CallResult:
        names = ", ".join(part.label for part in parts)
        return CallResult(failure=("timeout", f"{names}: no verdict within {self._timeout:g} s"))

    def _crashed(self, parts: Sequence[RewardComponent], worker: _Worker) -> CallResult:
        status = self._fork_server.end(worker.id)
        how = f"exit code {os.waitstatus_to_exitcode(status)}"
        if os.WIFSIGNALED(status):
            with contextlib.suppress(ValueError):
                how = signal.Signals(os.WTERMSIG(status)).name
        names = ", ".join(part.label for part in parts)
        return CallResult(failure=("error", f"{names}: the worker process died ({how})"))

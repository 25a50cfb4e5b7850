"""The group of processes that `torchrun` starts, and the errors when one of them is lost."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from groupwise.distributed.addresses import use_route
from groupwise.errors import RunError, first_line

IDLE = timedelta(hours=24)
"""How long a rank waits for the next command of rank 0; an ended rank 0 is noticed at once."""
PATIENCE_S = 3.0
"""Time that a rank gives the others to say why they ended."""
LOOK_S = 0.05
"""Longest pause, in seconds, between checks whether the other ranks are done."""
SILENT = ("timed out", "timeout", "monitoredbarrier")
"""What the messages of `torch.distributed` contain when another rank does not answer in time."""
LOST = (*SILENT, "closed by peer", "connection re", "broken pipe", "gloo", "nccl")
"""What they contain when another rank is gone."""


class World:
    """A group of processes that train one model.

    Args:
        store: where ranks note who they are and why they failed.
        rank, size: number of this process, and how many there are.
        timeout_s: how long a rank waits for the others inside an operation.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.collected = 0
        # Each of the two groups takes keys of the store for itself.
        self.store = PrefixStore("groupwise", store)
        limit = timedelta(seconds=timeout_s)
        cards = torch.cuda.is_available()
        if cards:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.store.set(f"process/{rank}", f"{socket.gethostname()}:{os.getpid()}")
        with self.waiting("all ranks to start"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cards else "gloo",
                store=PrefixStore("torch", store),
                rank=rank,
                world_size=size,
                timeout=limit,
            )
        self.control: Any = dist.new_group(backend="gloo", timeout=limit)
        self.commands: Any = dist.new_group(backend="gloo", timeout=IDLE)

    @classmethod
    def call(cls, text: str, *, timeout_s: float) -> World:
        """On rank 0: send a command to the other ranks, and wait for them.

        Raises:
            RunError: they did not come.
        """
        store, rank, size = _met(timeout_s)
        store.set("call", text)
        return cls(store, rank, size, timeout_s=timeout_s)

    @classmethod
    def called(cls, limit: Callable[[str], float]) -> tuple[World, str]:
        """On the other ranks: wait for a command of rank 0, and join it.

        Args:
            limit: from what rank 0 says to how long ranks wait for each other, in seconds.
        """
        store, rank, size = _met(IDLE.total_seconds())
        try:
            store.wait(["call"], IDLE)
            text = store.get("call").decode()
        except RuntimeError as error:
            raise RunError(f"rank {rank}: rank 0 ended before the run began.") from error
        return cls(store, rank, size, timeout_s=limit(text)), text

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- operations that all ranks call ----------------------------------------------------------

    def command(self, value: Any = None) -> Any:
        """Broadcast a value of rank 0. The other ranks wait for it without a time limit; rank 0
        waits for them no longer than in any other operation.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self._hand_out(size)
        if not self.leads:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._hand_out(data)
        return value if self.leads else pickle.loads(data.numpy().tobytes())

    def _hand_out(self, tensor: Tensor) -> None:
        name = "the others to take a command" if self.leads else "the next command of rank 0"
        with self.waiting(name):
            work = dist.broadcast(tensor, src=0, group=self.commands, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout_s) if self.leads else IDLE)

    def meet(self, name: str) -> None:
        """Wait until every rank has called this.

        Raises:
            RunError: names the ranks that did not come in time.
        """
        if self.size > 1:
            with self.waiting(name):
                dist.monitored_barrier(
                    self.control, timedelta(seconds=self.timeout_s), wait_all_ranks=True
                )

    def gather(self, value: Any, name: str) -> list[Any]:
        """The value of every rank, on every rank."""
        found: list[Any] = [None] * self.size
        with self.waiting(name):
            dist.all_gather_object(found, value, group=self.control)
        return found

    def collect(self, value: Any, name: str) -> list[Any]:
        """The value of every rank, on every rank, after work that may take any time: rank 0 waits
        for the others as long as they show signs of life (`alive`), and they for rank 0.

        Raises:
            RunError: names the rank that was lost.
        """
        self.collected += 1
        if self.leads:
            self._await_others(f"done/{self.collected}", name)
        else:
            self.store.set(f"done/{self.collected}/{self.rank}", "")
        found: list[Any] = [None] * self.size
        with self.waiting(name):
            dist.all_gather_object(found, value, group=self.commands)
        return found

    def _await_others(self, key: str, name: str) -> None:
        missing, pause = list(range(1, self.size)), 0.001
        sign = dict.fromkeys(missing, "")
        seen = dict.fromkeys(missing, time.monotonic())
        while missing := [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]:
            for rank in missing:
                if (last := self._noted(f"alive/{rank}")) != sign[rank]:
                    sign[rank], seen[rank] = last, time.monotonic()
                lost = self._fate(rank)
                if not lost and time.monotonic() - seen[rank] > self.timeout_s:
                    lost = (
                        f"no sign of life within {self.timeout_s:.0f} s "
                        f"(distributed.timeout_minutes) from rank {rank}"
                    )
                if lost:
                    raise RunError(
                        f"rank 0 of {self.size} waited for {name}: {lost}. Continue with --resume."
                    )
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """A context in which this process shows rank 0 signs of life."""
        over = threading.Event()

        def show() -> None:
            count = 0
            while not over.wait(min(1.0, self.timeout_s / 5)):
                count += 1
                try:
                    self.store.set(f"alive/{self.rank}", f"{self.collected}.{count}")
                except RuntimeError:
                    return  # The store ended with rank 0.

        thread = threading.Thread(target=show, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _noted(self, key: str) -> str:
        """The value of a key in the store; empty where there is none."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def scatter(self, values: list[Any] | None, name: str) -> Any:
        """Send each rank its value of a list on rank 0."""
        box: list[Any] = [None]
        with self.waiting(name):
            dist.scatter_object_list(box, values, src=0, group=self.control)
        return box[0]

    def add(self, values: Tensor, name: str) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            with self.waiting(name):
                dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def unite(self, values: Tensor, name: str) -> Tensor:
        """Put together a tensor of which every element is 0 but on one rank: exact, NaN included,
        because bits are added and not numbers."""
        whole = {4: torch.int32, 8: torch.int64}[values.element_size()]
        self.add(values.view(whole), name)
        return values

    def send(self, named: Mapping[str, Tensor] | None, name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of rank 0, one after the other, on every rank."""
        device = None if named is None else {n: (t.shape, t.dtype) for n, t in named.items()}
        box = [device]
        with self.waiting(name):
            dist.broadcast_object_list(box, src=0, group=self.control)
        for key, (shape, dtype) in (box[0] or {}).items():
            if named is None:
                tensor = torch.empty(shape, dtype=dtype)
            else:
                tensor = named[key].detach().cpu().contiguous()
            with self.waiting(name):
                dist.broadcast(tensor, src=0, group=self.control)
            yield key, tensor

    # -- failures --------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        text = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        self._note(f"failed/{self.rank}", text)

    def _note(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # The store has ended with the rank that kept it.
            self.store.set(key, text)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A context in which a communication error becomes one that names the lost ranks.

        Raises:
            RunError: what was waited for, and who was lost, as far as can be seen from here.
        """
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or not _contains(error, LOST):
                raise
            # A connection that cannot be made times out sooner.
            late = time.monotonic() - begun > 0.9 * self.timeout_s and _contains(error, SILENT)
            raise RunError(
                f"rank {self.rank} of {self.size} waited for {name}: "
                f"{self._who(error, silent=late)}. Continue with --resume."
            ) from error

    def _who(self, error: BaseException, *, silent: bool) -> str:
        """Which ranks were lost: those that gave a reason or have ended; after a time-out those
        that do not time out as well within some seconds; otherwise the message of the library.
        """
        if silent:
            self._note(f"waited/{self.rank}", "too long")
        others = late = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            late = [rank for rank in others if not self._gave_up(rank)]
            if lines := [line for rank in late if (line := self._fate(rank))]:
                return "; ".join(lines)
            time.sleep(0.1)
        if not silent:
            return f"the connection broke ({_plain(error)})"
        limit = f"no answer within {self.timeout_s:.0f} s (distributed.timeout_minutes)"
        return f"{limit} from rank {', '.join(map(str, late))}" if late else limit

    def _gave_up(self, rank: int) -> bool:
        """Whether a rank has waited too long, as this one has."""
        try:
            return self.store.check([f"waited/{rank}"])
        except RuntimeError:
            return False  # The store has ended with the rank that kept it.

    def _fate(self, rank: int) -> str | None:
        """Why a rank ended, if that is known."""
        if rank == self.rank:
            return None
        try:
            if self.store.check([f"failed/{rank}"]):
                return f"rank {rank} failed: {self.store.get(f'failed/{rank}').decode()}"
            if not (process := self._noted(f"process/{rank}")):
                return None  # It has not started yet.
            host, _, number = process.rpartition(":")
        except RuntimeError:
            return "rank 0, which keeps the addresses of the others, has ended" if rank == 0 else ""
        if host == socket.gethostname() and not _runs(int(number)):
            return f"rank {rank} (process {number}) ended without an error message"
        return None


def _met(timeout_s: float) -> tuple[Store, int, int]:
    """The store that `torchrun` describes in the environment, this rank, and how many there are."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):  # Several machines.
        use_route(os.environ.get("MASTER_ADDR", ""))
    try:
        return next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"torchrun: rank {os.environ.get('RANK')} could not reach the other ranks at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({first_line(error)})."
        ) from error


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _contains(error: BaseException, parts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(part in said for part in parts)


def _plain(error: BaseException) -> str:
    """The first line of a message, without the path of the file that raised it."""
    return first_line(error).rpartition("] ")[2][:200]

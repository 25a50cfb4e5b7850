"""Decoding steps as CUDA graphs: the launches of a step, which take longer than their work where
rows are few, are recorded once and replayed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.errors import warn
from groupwise.kernels.flex import reason
from groupwise.kernels.interface import DecodeRows

Hidden = Callable[[Tensor, Tensor, Any], Tensor]
"""Hidden states from tokens, positions and attention."""
FEWEST = 8
"""Rows of the smallest graph."""


@dataclass(frozen=True)
class Step:
    """A recorded step.

    Attributes:
        inputs: tokens, positions, slots, samples and times, which a replay reads.
        hidden: what it writes.
    """

    graph: Any
    inputs: Int[Tensor, "5 rows"]
    hidden: Tensor


class DecodingGraphs:
    """`hidden` of a model in one rollout; its decoding steps are recorded and replayed.

    A step is recorded for a few numbers of rows, at its first use; the rows that are missing attend
    to nothing. Graphs hold the addresses of weights and cache, so every rollout records its own.
    They share memory with those of the rollout before.

    Args:
        hidden: must compute decoding steps with kernels that read all lengths on the GPU.
        before: the graphs of the rollout before.
    """

    def __init__(self, hidden: Hidden, *, before: DecodingGraphs | None = None) -> None:
        self._hidden, self._before = hidden, before  # a pool lives as long as a graph that uses it
        self._pool = torch.cuda.graph_pool_handle() if before is None else before._pool
        self._loaded: set[int] = set() if before is None else before._loaded
        self._steps: dict[int, Step] = {}
        self.works = True

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        if not (self.works and isinstance(attend, DecodeRows) and attend.order is None):
            return self._hidden(tokens, positions, attend)
        count, size = len(tokens), rounded(len(tokens))
        step = self._steps.get(size)
        inputs = torch.zeros(5, size, dtype=torch.long, device=tokens.device)
        inputs = inputs if step is None else step.inputs
        columns = (tokens, positions, attend.slot, attend.sample, attend.time)
        inputs[:, :count] = torch.stack(columns)
        inputs[4, count:] = -1
        if step is None:
            step = self._recorded(inputs, attend)
            if step is None:
                return self._hidden(tokens, positions, attend)
        step.graph.replay()
        return step.hidden[:count]

    def _recorded(self, inputs: Tensor, attend: DecodeRows) -> Step | None:
        """A step as a graph, or None with a warning where it cannot be recorded."""
        tokens, positions, slot, sample, time = inputs
        fixed = replace(
            attend, slot=slot, sample=sample, time=time, rows=slot, masks={}, places={}, parts=[]
        )
        try:
            if len(tokens) not in self._loaded:
                self._load(lambda: self._hidden(tokens, positions, fixed))
                self._loaded.add(len(tokens))
            graph, hidden = self._record(lambda: self._hidden(tokens, positions, fixed))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warn(f"CUDA graphs are not used ({reason(error)}); rollouts take more time.")
            self.works = False
            return None
        self._steps[len(tokens)] = step = Step(graph, inputs, hidden)
        self._before = None
        return step

    def _load(self, step: Callable[[], Tensor]) -> None:
        """Take a step once, as kernels and libraries cannot be loaded while one is recorded."""
        with _beside():
            step()

    def _record(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of a step and its result. `torch.cuda.graph` would give all memory that PyTorch
        keeps back to the driver first."""
        graph = torch.cuda.CUDAGraph()
        with _beside():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = step()
            finally:
                graph.capture_end()
        return graph, hidden


@contextmanager
def _beside() -> Iterator[None]:
    """A context on another stream, ordered before and after as if it were the current one."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def rounded(rows: int) -> int:
    """The rows of the graph for so many: at most a third more, and few different numbers.

    Example:
        >>> [rounded(rows) for rows in (1, 9, 17, 33, 49, 65, 97, 200)]
        [8, 16, 24, 48, 64, 96, 128, 256]
    """
    step = max(FEWEST, (1 << (rows - 1).bit_length()) // 4)
    return -(-rows // step) * step

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
from groupwise.kernels.gpu import reason
from groupwise.kernels.interface import DecodeRows

Hidden = Callable[[Tensor, Tensor, Any], Tensor]
"""Hidden states from tokens, positions and attention."""
FEWEST = 8
"""Rows of the smallest graph."""
PADDING = (0, 0, 0, 0, -1)
"""Token, position, slot, sample and time of a row that only fills up the graph."""


class GraphMemory:
    """What the graphs of all rollouts on a GPU share: memory, and the stream on which they are
    recorded, because memory is used again on one stream only.

    Attributes:
        kept: the last graph; the memory is shared as long as a graph uses it.
        works: False after a step could not be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.kept: torch.cuda.CUDAGraph | None = None
        self.works = True

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A context on the stream, ordered before and after as if it were the current one."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def record(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of a step, and what it writes. `torch.cuda.graph` would give all memory that
        PyTorch keeps back to the driver first."""
        graph = torch.cuda.CUDAGraph()
        with self.beside():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                hidden = step()
            finally:
                self._end(graph)
        self.kept = graph
        return graph, hidden

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording. Where that fails, PyTorch leaves the allocator recording."""
        try:
            graph.capture_end()
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            raise


@dataclass(frozen=True, kw_only=True)
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

    There are graphs for a few numbers of rows; the rows that are missing attend to nothing. The
    first step of each number is launched as usual, so that kernels and libraries are loaded; the
    second is recorded. Graphs hold the addresses of weights and cache, so every rollout records its
    own.

    Args:
        hidden: must compute recorded steps with kernels that read all lengths on the GPU.
        memory: shared with other rollouts.
    """

    def __init__(self, hidden: Hidden, memory: GraphMemory) -> None:
        self._hidden, self._memory = hidden, memory
        self._steps: dict[int, Step | None] = {}
        self._works = True

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        single = isinstance(attend, DecodeRows) and attend.order is None
        if not (single and self._works and self._memory.works):
            return self._hidden(tokens, positions, attend)
        count, size = len(tokens), rounded(len(tokens))
        step = self._steps.get(size)
        if step is None:
            padding = torch.tensor(PADDING, device=tokens.device)[:, None]
            inputs = padding.expand(-1, size).contiguous()
        else:
            inputs = step.inputs
            inputs[4, count:] = -1
            inputs[1, count:] = 0  # some models look at the highest position
        columns = (tokens, positions, attend.slot, attend.sample, attend.time)
        inputs[:, :count] = torch.stack(columns)
        if step is not None:
            step.graph.replay()
            return step.hidden[:count]
        hidden = self._first(inputs, attend)
        return self._hidden(tokens, positions, attend) if hidden is None else hidden[:count]

    def _first(self, inputs: Tensor, attend: DecodeRows) -> Tensor | None:
        """Take a step for whose number of rows there is no graph; None where it cannot be taken
        with lengths on the GPU."""
        tokens, positions, slot, sample, time = inputs
        fixed = replace(
            attend,
            slot=slot,
            sample=sample,
            time=time,
            rows=slot,
            recorded=True,
            masks={},
            places={},
            parts=[],
        )

        def step() -> Tensor:
            return self._hidden(tokens, positions, fixed)

        try:
            if len(tokens) not in self._steps:
                with self._memory.beside():
                    hidden = step()
                self._steps[len(tokens)] = None
                return hidden
            graph, hidden = self._memory.record(step)
        except torch.OutOfMemoryError:  # recording cannot use memory that PyTorch keeps
            torch.cuda.empty_cache()
            self._works = False
            return None
        except Exception as error:  # a kernel that does not compile is no RuntimeError
            warn(f"CUDA graphs are not used ({reason(error)}); rollouts take more time.")
            self._memory.works = False
            return None
        self._steps[len(tokens)] = Step(graph=graph, inputs=inputs, hidden=hidden)
        graph.replay()
        return hidden


def rounded(rows: int) -> int:
    """The rows of the graph that computes these: at most a third more, and few different numbers.

    Example:
        >>> [rounded(rows) for rows in (1, 9, 17, 33, 49, 65, 97, 200)]
        [8, 16, 24, 48, 64, 96, 128, 256]
    """
    step = max(FEWEST, (1 << (rows - 1).bit_length()) // 4)
    return -(-rows // step) * step

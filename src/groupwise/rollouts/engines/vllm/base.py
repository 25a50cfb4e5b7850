"""The interface to vLLM, wherever it runs, and the error raised when it is unavailable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from groupwise.errors import RunError

WeightSync = Literal["adapter", "reload", "restart", "shared_memory"]
"""How new weights reach the sampler: an adapter under a new name, a folder loaded into the running
model, a restart from a folder, or memory of this machine loaded into the running model."""


UNTRUNCATED: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameters that change no probability. They are always sent, because a server takes
missing ones from the generation config in the model folder."""


class EngineUnavailable(RunError):
    """The sampler does not answer; it may become available again."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A version of the policy on disk.

    Attributes:
        folder: the files: a whole model, or an adapter.
        base: the model that an adapter belongs to; None where the folder holds a whole model.
        rank: of the adapter.
        dtype: of the computation, in vLLM's words.
        version: counts the optimizer steps.
    """

    folder: Path
    base: str | None
    rank: int
    dtype: str
    version: int

    @property
    def model(self) -> str:
        """What vLLM is started with."""
        return self.base or str(self.folder)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A row of prompt tokens, and vLLM's own sampling parameters for what follows it."""

    tokens: Sequence[int]
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion as vLLM reports it; `finish` is "stop", "length", or what went wrong."""

    tokens: list[int]
    logprobs: list[float]
    finish: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The completions of a `CompletionRequest` and, if asked for, the log-probability of every
    prompt token but the first."""

    written: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[float, ...] = ()


@runtime_checkable
class Sampler(Protocol):
    """A running vLLM."""

    @property
    def ways(self) -> tuple[WeightSync, ...]:
        """The ways in which it can take new weights, cheapest first."""
        ...

    @property
    def context(self) -> int:
        """Maximum sequence length, in tokens."""
        ...

    def start(self, weights: Weights) -> None:
        """Be ready to answer with these weights, or wait until a server is.

        Raises:
            RunError: it cannot be started, or does not come back in time.
        """
        ...

    def answer(self, asks: Iterable[CompletionRequest | None]) -> Iterator[tuple[int, Answer]]:
        """Yield answers as they finish, each with the index of its request. Requests are taken
        while there is room. None in their place means that there is none at the moment, and is not
        counted.

        Raises:
            EngineUnavailable: the sampler does not answer.
        """
        ...

    def renew(self, weights: Weights, way: WeightSync) -> None:
        """Load new weights and discard everything that was computed with the old ones."""
        ...

    def sleep(self) -> None:
        """Free memory until `wake` is called."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

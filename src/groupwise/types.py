"""The nouns of groupwise. Axes in words: `prompt group batch time vocab`; batch = prompt · group.

Everything is frozen and keyword-only; nothing here imports more than torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from groupwise.errors import UsageError
from groupwise.settings import Sampling

Heartbeat = Callable[[], None]
"""Reports progress of a watched wait; its time limit counts from the last call."""

Watch = Callable[[str], AbstractContextManager[Heartbeat]]
"""Maps the name of a wait to a context manager that watches it."""

Finish = Literal["stop", "length", "error"]
"""Why a completion ended."""
Metrics = dict[str, float]
"""Figures of a step by name, as a line of `metrics.jsonl`."""


class Stream(NamedTuple):
    """Names a request's random numbers: place, round of drawing, step (negative in evaluations)."""

    seed: int = 0
    step: int = 0
    draw: int = 0
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question.

    Attributes:
        id: stable across runs; it keys the random streams of its completions.
        messages: chat turns as {"role": …, "content": …}; empty for a plain prompt.
        text: a plain prompt, given to the model as it is; None when `messages` are given.
        answer: the reference answer, or None where the data has none.
        value: the answer as the data has it if that is not text, such as a list or a number.
        columns: every other column of the data row, handed on to rewards.
        tools: schemas of the functions that the chat template shows to the model.
    """

    id: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None
    answer: str | None = None
    value: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        return "\n".join(m["content"] for m in self.messages) if self.text is None else self.text


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of the policy.

    Attributes:
        tokens: ids as sampled, end-of-sequence token included.
        mask: True where the policy wrote the token, False for injected tokens such as tool output.
        logprobs: log-probability of each token under the distribution that was really sampled from.
        text: the tokens decoded with special tokens kept and the end-of-sequence token dropped.
        finish: "stop" (end token or stop string), "length" (budget used up) or "error".
        versions: (first token, policy version) spans; a rollout may straddle an update.
        support: token ids that truncated sampling could draw at each position, else None.
        own: the text of the policy's tokens where others were injected, else None.
        injected: where the others stand in `text`, from one character to another, if it is known.
        values: what an environment counted, such as "calls"; empty without one.
        failure: status and message where a tool failed; such a completion is not judged.
    """

    tokens: Sequence[int]
    mask: Sequence[bool]
    logprobs: Sequence[float]
    text: str
    finish: Finish
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    support: tuple[Sequence[int], ...] | None = None
    own: str | None = None
    injected: tuple[tuple[int, int], ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    failure: tuple[Status, str] | None = None

    @property
    def own_tokens(self) -> int:
        """How many tokens the policy wrote: the length that rewards and metrics mean."""
        return sum(self.mask)

    @property
    def own_text(self) -> str:
        """The text that the policy wrote."""
        return self.text if self.own is None else self.own


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt with its tokens, and its G completions (a failed one is masked, never missing).

    `stream` and `samples` of the request, together with the prompt, name the completions.
    """

    prompt: Prompt
    prompt_tokens: Sequence[int]
    completions: tuple[Completion, ...]
    stream: Stream = Stream()
    samples: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.completions)


class Status(str, Enum):
    """Outcome of judging a completion. Only `ok` enters the statistics of its group."""

    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNJUDGEABLE = "unjudgeable"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of P groups of G completions.

    Attributes:
        total: the reward that trains; NaN where not judged.
        correct: raw correctness, 1 or 0 (or a share); NaN where no part of the reward defines it.
        parts: every part by name, before weighting; NaN where that part did not apply.
        status: one of `Status` for every completion, as rows of values.
        valid: judged, so part of the group's statistics.
        errors: messages of failed calls, for the log.
        reasons: why each completion was not judged, None where it was; empty where not known.
    """

    total: Float[Tensor, "prompt group"]
    correct: Float[Tensor, "prompt group"]
    parts: Mapping[str, Float[Tensor, "prompt group"]]
    status: tuple[tuple[Status, ...], ...]
    valid: Bool[Tensor, "prompt group"]
    errors: tuple[str, ...] = ()
    reasons: tuple[tuple[str | None, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """Groups with their scores, from a `Source`: row p of every score belongs to `groups[p]`.

    Attributes:
        keep: False for completions that a filter excludes from the loss (not from the statistics).
        drawn: how many prompts were drawn to fill the batch (more than P under dynamic sampling).
        unfinished: groups that go on in the next step; None where completions are never cut.
        seconds: time per stage ("rollout", "reward" …) spent in making them.
    """

    groups: tuple[Group, ...]
    scores: Scores
    keep: Bool[Tensor, "prompt group"]
    drawn: int
    unfinished: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """All sequences of an optimizer step: completions padded on the right, each prompt once.

    Attributes:
        prompts: tokens of each distinct prompt.
        group: index into `prompts` of every row.
        tokens: completion tokens; padding is 0 and outside `length`.
        length: tokens of each row, injected ones included.
        mask: True where the policy wrote the token and the row is not excluded.
        old_logp: log-probability when the update began; None means `logp.detach()`, i.e. exactly
            on-policy.
        sampler_logp: as reported by the engine.
        ref_logp: under the reference model; None when nothing needs it.
        advantage, weight: per token; `weight` sums the token losses to the loss of the step.
        row_weight: per row, in place of `weight` for objectives that judge rows or groups.
        support: per row and position the token ids that truncated sampling could draw, else None.
        columns: further per-row values that an objective may need (returns, chosen flags …).
    """

    prompts: tuple[Int[Tensor, "_"], ...]
    group: Int[Tensor, "batch"]
    tokens: Int[Tensor, "batch time"]
    length: Int[Tensor, "batch"]
    mask: Bool[Tensor, "batch time"]
    advantage: Float[Tensor, "batch time"]
    weight: Float[Tensor, "batch time"]
    old_logp: Float[Tensor, "batch time"] | None = None
    sampler_logp: Float[Tensor, "batch time"] | None = None
    ref_logp: Float[Tensor, "batch time"] | None = None
    row_weight: Float[Tensor, "batch"] | None = None
    support: tuple[tuple[Sequence[int], ...] | None, ...] | None = None
    columns: Mapping[str, Num[Tensor, "batch *rest"]] = field(default_factory=dict)

    def rows(self, index: Int[Tensor, "rows"]) -> Batch:
        """The same batch restricted to some rows, time trimmed to the longest of them."""
        time = int(self.length[index].max()) if len(index) else 0

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index, :time]

        return Batch(
            prompts=self.prompts,
            group=self.group[index],
            tokens=self.tokens[index, :time],
            length=self.length[index],
            mask=self.mask[index, :time],
            advantage=self.advantage[index, :time],
            weight=self.weight[index, :time],
            old_logp=cut(self.old_logp),
            sampler_logp=cut(self.sampler_logp),
            ref_logp=cut(self.ref_logp),
            row_weight=None if self.row_weight is None else self.row_weight[index],
            support=None if self.support is None else tuple(self.support[int(i)] for i in index),
            columns={
                k: v[index, :time] if v.ndim > 1 else v[index] for k, v in self.columns.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of an optimizer step; all tensors are detached and aligned with the given batch.

    Attributes:
        version: counts the optimizer steps of the run; stamps the weights.
        logp, entropy: of each token before the step, NaN where not computed.
        values: of a critic before the step, NaN where not computed; None of other models.
        computed: rows that went through the model (rows without a gradient may be skipped).
        loss: Σ weight · token loss over the batch.
        aux_loss: the load-balancing loss of a mixture of experts, where it is trained.
        grad_norm: before clipping.
        seconds: per stage.
    """

    version: int
    logp: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    computed: Bool[Tensor, "batch"]
    loss: float
    grad_norm: float
    learning_rate: float
    values: Float[Tensor, "batch *time"] | None = None
    aux_loss: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a training step: rollouts, advantages, batches and updates.

    Attributes:
        scored: the groups, with their scores.
        advantages: one per completion, or one per token.
        batches: of the policy's optimizer steps, in order.
        updates: of every updated learner by name; the policy's are aligned with `batches`.
        metrics: the metrics of the step.
    """

    scored: ScoredGroups
    advantages: Float[Tensor, "prompt group *time"]
    batches: tuple[Batch, ...]
    updates: Mapping[str, tuple[Update, ...]]
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for completions of a prompt.

    `stream` keys the random numbers together with the sample's index and the position, so what is
    sampled depends neither on the other requests nor on the engine, and a completion that is
    continued equals the unbroken one.

    Attributes:
        samples: indices of the completions wanted; all `group` ones by default.
        begun: for each of them the completion so far; empty where none is begun.
        budget: tokens that the policy may write in each; None is `Sampling.max_tokens`.
        version: of the weights that write it, for an engine that keeps several; None: the newest.
    """

    prompt: Prompt
    tokens: Sequence[int]
    group: int
    stream: Stream = Stream()
    samples: tuple[int, ...] = ()
    begun: tuple[Completion, ...] = ()
    budget: int | None = None
    version: int | None = None

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.samples or tuple(range(self.group))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest shapes of a rollout, stated before its requests are known: tokens of a prompt,
    completions of a request, tokens of a completion (injected ones included), prompts at a time."""

    prompt: int
    group: int
    suffix: int
    slots: int


class TensorInfo(NamedTuple):
    """Shape and type of a published tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class WeightsRef(Protocol):
    """A published version (count of optimizer steps) of weights; its tensors are read on demand."""

    @property
    def version(self) -> int: ...

    @property
    def manifest(self) -> Mapping[str, TensorInfo]: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def digest(self, name: str) -> int:
        """A checksum of one tensor's bytes that depends on their order; computed on demand."""
        ...


Requests = Iterable[Request | None]
"""None: no request at the moment; an idle engine asks again after a pause."""


@runtime_checkable
class Engine(Protocol):
    """Makes rollouts."""

    @property
    def exact_continuation(self) -> bool:
        """Whether the log-probabilities of a continued completion equal those of the unbroken one
        to the bit; its tokens always do."""
        ...

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """One group per request, as they finish, in any order.

        Args:
            requests: taken while there is room, at most one ahead.
            sampling: how all of them are drawn.
            limits: of the requests to come; None reads all requests first.
        """
        ...

    def publish(self, weights: WeightsRef) -> Metrics:
        """Sample from new weights from now on; returns metrics, such as how far both differ."""
        ...

    def close(self) -> None: ...


Granularity = Literal["token", "row", "group"]
"""What an objective judges: tokens, whole completions, or a prompt's completions together."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Outputs of a model for every token, with gradients; None where not requested.

    Attributes:
        logp: log-probability of the token.
        entropy: of the distribution that the token was drawn from.
        values: expected return before the token.
        of_logits: a function of the token's logits that the objective has.
    """

    logp: Float[Tensor, "*tokens"] | None = None
    entropy: Float[Tensor, "*tokens"] | None = None
    values: Float[Tensor, "*tokens"] | None = None
    of_logits: Float[Tensor, "..."] | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise UsageError(f"{name}: the objective needs it, and the model did not compute it.")
        return value


@runtime_checkable
class Objective(Protocol):
    """The loss of each token, or of each row where rows or groups are judged.

    Attributes:
        needs: names of what it reads: outputs of the model, and "ref_logp" and "sampler_logp".
        granularity: a loss for each token is weighted by `Batch.weight`, one for each row by
            `Batch.row_weight`. Rows judged together stay in one microbatch.
        skips_zero_advantage: whether a row whose advantages are all 0 has exactly no gradient.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def granularity(self) -> Granularity: ...

    @property
    def skips_zero_advantage(self) -> bool: ...

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "batch *time"]: ...


@runtime_checkable
class Learner(Protocol):
    """Makes updates. Its parameters are read and set through these methods alone."""

    @property
    def version(self) -> int:
        """Optimizer steps taken since the start of the run."""
        ...

    def evaluate(self, batch: Batch, names: Collection[str]) -> Mapping[str, Tensor]:
        """Outputs for every token the policy wrote, without gradient; 0 elsewhere.

        Args:
            names: "logp", "entropy" or "values" of the model, "ref_logp" of its reference.
        """
        ...

    def update(self, batch: Batch, objective: Objective) -> Update:
        """One optimizer step on Σ weight · loss."""
        ...

    def publish(self) -> WeightsRef:
        """The present version of the weights, by their names in a Hugging Face checkpoint."""
        ...

    def trained(self) -> Mapping[str, Tensor]:
        """The weights that are trained, by name: all of them, or an adapter's."""
        ...

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights that are trained."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the trained weights."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the state back to what `state` returned."""
        ...

    def movement(self) -> Callable[[], float]:
        """Watch the trained weights; the result gives the share of parameters unchanged since."""
        ...

    def save(self, path: str) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Judges a whole group; None means: this completion cannot be judged."""

    def __call__(self, group: Group) -> Sequence[float | None]: ...


@runtime_checkable
class Source(Protocol):
    """Turns prompts into scored groups, and repeats what has to be repeated, such as redraws."""

    def take(self, count: int, *, step: int) -> ScoredGroups: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def unwatched(name: str) -> AbstractContextManager[Heartbeat]:
    """A `Watch` without a time limit."""
    return nullcontext(lambda: None)

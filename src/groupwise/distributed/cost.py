"""Estimates how long a step takes on many cards, from a model of each stage, not from measurements.

With N parameters, K bytes of keys and values per token, P prompts of G completions, prompts of p
tokens, completions of ℓ tokens on average and ℓ_max at most, memory bandwidth M and peak C of a
card, and s cards that sample beside t that learn:

    rows      r       = min(P·G / s, (0.9 · memory − 2N) / (K · (p/G + 0.6 ℓ)))
    step      τ(r)    = max((2N + r · K · (p/G + 0.6 ℓ)) / (0.6 M), 2N · r / (0.4 C)) + launch
    sampling  T_bulk  = P·G·ℓ · τ(r) / (r·s)
    tail      T_tail  = ℓ_max · τ(0.1 r)
    update    T_train = 8N · (P·G·ℓ + P·p) / (t · 0.4 C)
    weights   T_w     = 2N / network
    step, one after the other    max(T_bulk, T_tail) + T_train + T_w
    step, at the same time       max(T_bulk, T_train)
    age of a batch in steps      (T_tail + T_w) / step at the same time

The longest completion is written alone, and no number of cards shortens it. A checkpoint of T_c
seconds is best written every √(2 · T_c · MTBF) seconds, where a card fails once in 51,000 hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupwise.errors import UsageError, suggest

MEMORY_SHARE, BANDWIDTH_SHARE, COMPUTE_SHARE = 0.9, 0.6, 0.4
"""The fractions of a card's memory, bandwidth and peak that are reached."""
TAIL = 0.1
"""Share of the rows that are left while the longest completions are written."""
LAUNCH_S = 0.002
"""Overhead of a decoding step."""
FLOPS = 8
"""Operations per parameter and token of an update whose activations are computed twice."""
HOURS_PER_FAILURE = 51_000
"""Mean time between failures of one card: 419 in 54 days of 16,384 cards (Llama 3, 2407.21783)."""
CHECKPOINT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Card:
    """A kind of card.

    Attributes:
        memory: bytes.
        bandwidth: of the memory, in bytes per second.
        peak: bfloat16 operations per second, without sparsity.
        network: bytes per second between machines.
    """

    memory: float
    bandwidth: float
    peak: float
    network: float


CARDS = {
    "a100": Card(memory=80e9, bandwidth=2.0e12, peak=312e12, network=25e9),
    "h100": Card(memory=80e9, bandwidth=3.35e12, peak=989e12, network=50e9),
    "h200": Card(memory=141e9, bandwidth=4.8e12, peak=989e12, network=50e9),
    "b200": Card(memory=180e9, bandwidth=8.0e12, peak=2250e12, network=50e9),
}
"""Kinds of cards, with the figures of their data sheets."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The workload of a step.

    Attributes:
        parameters: of the model.
        cache: bytes of keys and values of one token.
        prompts, group: P and G.
        prompt, mean, longest: tokens of a prompt, of a completion on average, and at most.
    """

    parameters: float
    cache: float
    prompts: int
    group: int
    prompt: float
    mean: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The model's answer, times in seconds.

    Attributes:
        sampling, learning: cards.
        rows: completions that a card writes at the same time.
        bulk, tail, train, weights: the stages of a step.
        checkpoint: seconds between checkpoints.
    """

    sampling: int
    learning: int
    rows: float
    bulk: float
    tail: float
    train: float
    weights: float
    checkpoint: float

    @property
    def synchronous(self) -> float:
        """A step whose stages follow each other."""
        return max(self.bulk, self.tail) + self.train + self.weights

    @property
    def asynchronous(self) -> float:
        """A step whose stages run at the same time."""
        return max(self.bulk, self.train)

    @property
    def age(self) -> float:
        """The age of a batch in steps, if stages run at the same time."""
        return (self.tail + self.weights) / self.asynchronous


def step_cost(work: Work, card: Card, *, cards: int, sampling: int) -> StepCost:
    """The stages of a step.

    Args:
        cards: all of them.
        sampling: those that sample; the others learn.

    Raises:
        UsageError: weights and one completion do not fit into a card.
    """
    learning = cards - sampling
    row = work.cache * (work.prompt / work.group + 0.6 * work.mean)
    size = 2 * work.parameters
    room = MEMORY_SHARE * card.memory - size
    if room < row:
        raise UsageError(
            f"plan: a GPU of {card.memory / 1e9:.0f} GB cannot hold {size / 1e9:.0f} GB of weights "
            "and one completion; use larger GPUs (--kind)."
        )
    rows = min(work.prompts * work.group / sampling, room / row)

    def decoding(count: float) -> float:
        read = (size + count * row) / (BANDWIDTH_SHARE * card.bandwidth)
        return max(read, size * count / (COMPUTE_SHARE * card.peak)) + LAUNCH_S

    completions = work.prompts * work.group
    bulk = completions * work.mean * decoding(rows) / (rows * sampling)
    tail = work.longest * decoding(max(1.0, TAIL * rows))
    tokens = completions * work.mean + work.prompts * work.prompt
    train = FLOPS * work.parameters * tokens / (learning * COMPUTE_SHARE * card.peak)
    weights = size / card.network
    failure = 3600 * HOURS_PER_FAILURE / learning
    return StepCost(
        sampling=sampling,
        learning=learning,
        rows=rows,
        bulk=bulk,
        tail=tail,
        train=train,
        weights=weights,
        checkpoint=math.sqrt(2 * CHECKPOINT_S * failure),
    )


def best_split(work: Work, kind: str, *, cards: int) -> StepCost:
    """The split of cards with the shortest step if stages run at the same time.

    Raises:
        UsageError: no such card, fewer than two, or a model that does not fit.
    """
    if kind not in CARDS:
        raise UsageError(f"--kind = {kind!r}: no such GPU; {suggest(kind, CARDS)}")
    if cards < 2:
        raise UsageError(
            f"--gpus = {cards}: must be at least 2, one that samples and one that learns."
        )
    splits = {round(cards * share / 64) for share in range(1, 64)} & set(range(1, cards))
    costs = [step_cost(work, CARDS[kind], cards=cards, sampling=each) for each in sorted(splits)]
    return min(costs, key=lambda cost: (cost.asynchronous, cost.sampling))

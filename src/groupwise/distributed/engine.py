"""Prompts spread over ranks, each of which samples with its own engine.

Samples depend on the names of random streams alone, so completions equal those of a single process
however prompts are distributed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from groupwise.distributed.team import Leader
from groupwise.types import Engine, Group, Limits, Metrics, Request, Requests, Sampling, WeightsRef

PAUSE_S = 0.01
"""Seconds between checks on a source that has no request at the moment."""


class SpreadEngine:
    """Rank 0's engine: gives every rank its share of the requests.

    Requests are taken until there is none at the moment; the next ones follow when all of these are
    answered.

    Args:
        leader: asks the other ranks.
        engine: rank 0's own.
        spreads: False where rank 0 samples alone, because its engine is a server.
    """

    def __init__(self, leader: Leader, engine: Engine, *, spreads: bool = True) -> None:
        self.leader, self.engine, self.spreads = leader, engine, spreads

    @property
    def exact_continuation(self) -> bool:
        """As the engines of the ranks."""
        return self.engine.exact_continuation

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield rank 0's groups as they finish, then those of the others."""
        if not self.spreads:
            yield from self.engine.generate(requests, sampling, limits)
            return
        waiting: list[Request] = []
        for request in requests:
            if request is not None:
                waiting.append(request)
            elif waiting:
                yield from self._answered(waiting, sampling, limits)
                waiting = []
            else:
                time.sleep(PAUSE_S)
        if waiting:
            yield from self._answered(waiting, sampling, limits)

    def _answered(
        self, requests: list[Request], sampling: Sampling, limits: Limits | None
    ) -> Iterator[Group]:
        size = self.leader.world.size
        self.leader.member.requests = [requests[rank::size] for rank in range(size)]
        with self.leader.together():
            yield from self.leader.ask("generate", {"sampling": sampling, "limits": limits})

    def publish(self, weights: WeightsRef) -> Metrics:
        """Have every rank sample from the weights that the learner published last."""
        return self.leader.ask("renew")

    def close(self) -> None:
        """Close the engines and release the other ranks."""
        self.leader.member.close()
        self.leader.close()

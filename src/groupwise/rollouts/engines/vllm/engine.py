"""Rollouts by vLLM under the same contract as the other engines.

vLLM has its own copy of the weights. They are published to it after every update, and a canary then
compares both sides (`canary.py`), so that a run does not learn from completions of other weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from transformers.core_model_loading import revert_weight_conversion

from groupwise.errors import RunError, UsageError, warn
from groupwise.models import Policy
from groupwise.models.weights import PublishedWeights
from groupwise.rollouts.engines.vllm.base import (
    CompletionRequest,
    EngineUnavailable,
    Sampler,
    WeightSync,
)
from groupwise.rollouts.engines.vllm.canary import NEWEST, Canary
from groupwise.rollouts.engines.vllm.files import WeightFiles, disturbed, model_state
from groupwise.rollouts.engines.vllm.in_process import InProcess
from groupwise.rollouts.engines.vllm.process import OwnServer
from groupwise.rollouts.engines.vllm.requests import OpenRequests
from groupwise.rollouts.engines.vllm.server import VllmServer
from groupwise.rollouts.engines.vllm.shared_memory import SharedWeights
from groupwise.rollouts.limits import RequestQueue
from groupwise.settings import EngineSettings
from groupwise.types import Group, Limits, Metrics, Requests, Sampling, WeightsRef

RETURNS = 3
"""Consecutive failures without an answer after which the engine gives up on a sampler."""


class VllmEngine:
    """Rollouts by vLLM: in this process, by a server that is started here, or by a running server.

    Args:
        policy: model and tokenizer of the learner.
        max_rows: completions written at the same time.
        settings: where vLLM runs, and how it receives new weights.
        length: tokens of the longest prompt with its completion; None is the model's context.

    Raises:
        UsageError: vLLM is missing or too old, or the server has another model or tokenizer.
        RunError: the server does not answer.
    """

    exact_continuation = False

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 128,
        settings: EngineSettings | None = None,
        length: int | None = None,
    ) -> None:
        self.policy, self.settings = policy, settings or EngineSettings()
        self.max_rows = max_rows
        self.weights: WeightsRef = PublishedWeights(
            version=0, named=dict(policy.model.named_parameters())
        )
        self.sampler = _sampler(policy, self.settings, max_rows=max_rows, length=length)
        self.canary = Canary(policy)
        self.files = WeightFiles(policy, untied=not torch.accelerator.is_available())
        self.way: WeightSync | None = None
        self.ready = self.asleep = False
        self._check_way()
        shares = self.settings.weights == "shared_memory"
        self.memory = SharedWeights() if shares else None
        if isinstance(self.sampler, VllmServer):
            self._meet(self.sampler)

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield groups as they finish. A sampler that becomes unavailable is restarted or waited
        for, and answers the rest.
        """
        queue = RequestQueue(requests, self.policy, sampling, limits, max_rows=self.max_rows)
        if queue.limits is None:
            return
        self._wake()
        batch, returns = OpenRequests(self.policy, sampling), 0
        while batch.open or not queue.over:
            try:
                if not self.ready:
                    self._begin()
                asks = batch.asks(queue, version=lambda: self.weights.version)
                for index, answer in self.sampler.answer(self._fitting(asks)):
                    batch.take(index, answer)
                    returns = 0
                    yield from self._finished(batch, queue)
                yield from self._finished(batch, queue)
            except EngineUnavailable as gone:
                returns += 1
                if returns > RETURNS:
                    raise
                self._bring_back(gone)
        if self.settings.sleep:
            self.sampler.sleep()
            self.asleep = True

    def _finished(self, batch: OpenRequests, queue: RequestQueue) -> Iterator[Group]:
        for group in batch.finished():
            if queue.over and batch.open < NEWEST:  # the last ones to finish
                self.canary.remember(group)
            yield group

    def _fitting(
        self, asks: Iterator[CompletionRequest | None]
    ) -> Iterator[CompletionRequest | None]:
        """The requests, checked against the maximum length of vLLM.

        Raises:
            UsageError: a prompt and its completion are longer than that.
        """
        for ask in asks:
            longest = self.sampler.context
            if ask is not None and len(ask.tokens) + ask.params["max_tokens"] > longest:
                raise UsageError(
                    f"engine.name = 'vllm': a prompt of {len(ask.tokens)} tokens and a completion "
                    f"of {ask.params['max_tokens']} are more than the {longest} that vLLM holds; "
                    "start it with a larger --max-model-len, or lower sampling.max_tokens or "
                    "data.max_prompt_tokens."
                )
            yield ask

    def publish(self, weights: WeightsRef) -> Metrics:
        """Send new weights to the sampler and compare the log-probabilities of both sides.

        Args:
            weights: the policy's parameters by name; their version is stamped on every completion
                from now on.

        Returns:
            "canary_gap": mean difference of log-probabilities of known tokens, in nats;
            "seconds.weights": the time it took.

        Raises:
            RunError: the weights are NaN, or did not arrive: both sides differ by more than the
                limit or than before, or the sampler did not follow the learner.
        """
        start = time.perf_counter()
        self.canary.check_learner()
        self.weights = weights
        self._wake()
        returns = 0
        while True:
            try:
                self.way = self.way or self._settle()
                self._bring(self.way)
                gap = self._compared()
                return {"canary_gap": gap, "seconds.weights": time.perf_counter() - start}
            except EngineUnavailable:
                self.ready, returns = False, returns + 1
                if returns > RETURNS:
                    raise

    def close(self) -> None:
        """Stop what this engine started, and delete its files."""
        self.sampler.close()
        self.files.close()
        if self.memory is not None:
            self.memory.close()

    def _begin(self) -> None:
        """The first completions are wanted: a sampler with the weights as they are now. A server
        that runs may have those of an earlier run, which are replaced however near they are."""
        self.sampler.start(self.files.write(self.weights))
        self.ready = True
        runs_already = isinstance(self.sampler, VllmServer)
        if runs_already or self.canary.gap(self.sampler) > self.settings.canary_limit:
            self.publish(self.weights)

    def _bring(self, way: WeightSync) -> None:
        """The weights as they are now; a sampler that does not run is started with them."""
        started = None
        if not self.ready:
            started = self.files.write(self.weights)
            self.sampler.start(started)
            self.ready = True
        if way == "shared_memory":
            self._transfer()
        elif started is None or way != "restart":
            self.sampler.renew(started or self.files.write(self.weights), way)

    def _transfer(self) -> None:
        """The same through shared memory, under the names of a checkpoint."""
        assert isinstance(self.sampler, OwnServer) and self.memory is not None
        model = self.policy.model
        with torch.no_grad():
            tensors = revert_weight_conversion(model, model_state(model, self.weights))
            update = self.memory.write(tensors, version=self.weights.version)
        self.sampler.transfer(update)

    def _settle(self) -> WeightSync:
        """How new weights will be transferred. A way that keeps the sampler running is tested
        first: it must transfer weights far from the policy's, and then the policy's again.

        Raises:
            RunError: no way works.
        """
        wanted = self.settings.weights
        ways = self.sampler.ways if wanted == "auto" else (wanted,)
        gaps: list[str] = []
        for way in ways:
            if way == "restart":
                return way
            last = way == ways[-1]
            gap = self._tried(way, last=last)
            if gap <= self.settings.canary_limit:
                return way
            gaps.append(f"'{way}' ({gap:.3g} nats)")
            if not last:
                warn(
                    f"engine.weights: this vLLM does not load new weights by '{way}' (its "
                    f"log-probabilities differ by {gap:.3g} nats); trying "
                    f"'{ways[ways.index(way) + 1]}'."
                )
            # A failed trial may leave wrong weights behind.
            self.ready = False
        raise RunError(
            f"engine.weights = {wanted!r}: this vLLM does not load new weights by "
            f"{', '.join(gaps)}. Let the run start its own server (engine.python) with "
            "engine.weights = 'restart', or start this one with the learner's --dtype and with "
            "--logprobs-mode processed_logprobs."
        )

    def _tried(self, way: WeightSync, *, last: bool) -> float:
        """The larger gap after weights that are not the policy's, and after the policy's again;
        infinite if vLLM fails and there is another way."""
        try:
            if not self.ready:
                self._bring(way)
            with disturbed(self.policy.model):
                self._bring(way)
                away = self.canary.compare(self.sampler)
            if away.gap > self.settings.canary_limit:
                return away.gap
            self._bring(way)
            back = self.canary.compare(self.sampler)
            if back.gap <= self.settings.canary_limit:
                self.canary.settle(away)
                self.canary.settle(back)
            return max(away.gap, back.gap)
        except EngineUnavailable:
            if last:
                raise
            return math.inf

    def _compared(self) -> float:
        """The gap, checked against the limit and the earlier gaps."""
        found = self.canary.compare(self.sampler)
        limit = self.settings.canary_limit
        problem = f"differ from the learner's by {found.gap:.3g} nats on average"
        if found.gap <= limit:
            problem = self.canary.problem(found)
        if problem is not None:
            raise RunError(
                f"engine.canary_limit = {limit:g}: after new weights, vLLM's log-probabilities of "
                f"known tokens {problem}, so it samples with other weights or number types. Try "
                "engine.weights = 'restart'; see that it computes in the learner's type (--dtype) "
                "and reports processed log-probabilities (--logprobs-mode processed_logprobs)."
            )
        return found.gap

    def _meet(self, server: VllmServer) -> None:
        """Check that a server fits this policy: its tokenizer, then its probabilities. A server
        started with the same model may have the weights of an earlier run.
        """
        server.start()
        gap = self.canary.gap(server)
        name = str(getattr(self.policy.model.config, "_name_or_path", ""))
        if gap > self.settings.canary_limit and server.root != name:
            raise UsageError(
                f"engine.server = {self.settings.server!r}: serves {server.root!r}, and this run "
                f"trains {name!r}: their log-probabilities differ by {gap:.3g} nats; serve the "
                "model that is trained, with --logprobs-mode processed_logprobs."
            )

    def _bring_back(self, gone: EngineUnavailable) -> None:
        """Wait for an unavailable sampler, or start it, with the newest weights."""
        warn(f"{gone} Restoring it with the newest weights.")
        self.ready = False
        self.publish(self.weights)

    def _wake(self) -> None:
        """Wake the sampler, or note that it is unavailable."""
        if self.asleep:
            self.asleep = False
            try:
                self.sampler.wake()
            except EngineUnavailable:
                self.ready = False

    def _check_way(self) -> None:
        way, ways = self.settings.weights, self.sampler.ways
        if way != "auto" and way not in ways:
            raise UsageError(
                f"engine.weights = {way!r}: not possible here; use 'auto' or one of "
                f"{', '.join(map(repr, ways))}. Only a server that the run starts can be "
                "restarted, or read shared memory (engine.python); with an adapter, only the "
                "adapter is transferred."
            )


def _sampler(
    policy: Policy, settings: EngineSettings, *, max_rows: int, length: int | None
) -> Sampler:
    """The vLLM that the settings describe."""
    if settings.server is not None:
        return VllmServer(
            settings.server, policy, max_rows=max_rows, patience_s=settings.patience_s
        )
    if settings.python is not None:
        return OwnServer(policy, settings, max_rows=max_rows, length=length)
    return InProcess(policy, settings, max_rows=max_rows, length=length)

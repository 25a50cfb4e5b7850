"""The in-process engine: a prompt is computed once for all its completions, and no row waits for
another.

Finished completions leave the batch at once; when the last one of a prompt has finished, its group
is yielded and the next waiting prompt takes its place. Prompts of different lengths stand side by
side without padding in the decoding step. The engine runs the very model that learns, so there is
no second copy of the weights and nothing to synchronise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.kernels import GroupCache, active
from groupwise.models import (
    Backbone,
    FusedBackbone,
    Policy,
    can_use_fused,
    only_known_parts,
    unsupported,
)
from groupwise.rollouts.engines.attention import Decode, Prefill
from groupwise.rollouts.limits import budget, check
from groupwise.rollouts.sampling import draw
from groupwise.rollouts.streams import uniforms
from groupwise.rollouts.text import Ending, completions_of
from groupwise.types import Group, Metrics, Request, Sampling, WeightsRef

PREFILL_TOKENS = 8192


class GroupEngine:
    """Rollouts on a `transformers` causal language model.

    Args:
        policy: model and tokenizer.
        max_rows: completions decoded at once; a prompt enters when all of its group fit.

    Raises:
        ModelError: the model cannot be attended group by group; the message says why.
    """

    def __init__(self, policy: Policy, *, max_rows: int = 128) -> None:
        reason = unsupported(policy.model)
        if reason is not None:
            raise ModelError(
                f"engine.name = 'group': not possible for this model: {reason}; use "
                "engine.name = 'generate'."
            )
        self.policy = policy
        self.max_rows = max_rows
        self.version = 0
        self.calls = can_use_fused(Backbone.of(policy.model))

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield each request's group as soon as its last completion has finished."""
        wanted = list(requests)
        if not wanted:
            return
        training = self.policy.model.training
        self.policy.model.eval()
        try:
            rollout = _Rollout(
                self.policy, wanted, sampling, max_rows=self.max_rows, version=self.version
            )
            version, weights = None, nullcontext()
            while rollout.waiting or rollout.slots:
                if version != self.version:  # the first time, or new weights since
                    weights = self._laid_out(rollout)
                    version = self.version
                # While its caller has the turn, the model is as the caller gave it.
                with weights:
                    groups = rollout.next_groups()
                yield from groups
        finally:
            self.policy.model.train(training)

    def _laid_out(self, rollout: _Rollout) -> AbstractContextManager[None]:
        """Let a rollout compute with copies of the weights of now; inside what is returned."""
        rollout.backbone = backbone = Backbone.of(self.policy.model)
        if self.calls is None or not only_known_parts(backbone):  # an adapter was added since
            return active().inference_layers(self.policy.model, rows=self.max_rows)
        rollout.backbone = FusedBackbone(backbone, self.calls, positions=rollout.longest)
        return nullcontext()

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version; the tensors are shared with the learner."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """Nothing is held between calls."""


@dataclass(kw_only=True)
class _Slot:
    """A prompt in the cache and the tick of the clock at which its completions began."""

    request: Request
    start: int


@dataclass(frozen=True, kw_only=True)
class _Live:
    """The completions that are still being written, one entry each.

    Attributes:
        rows: slot · G + sample.
        slot, sample: the two parts of it.
        time: where the key of `token` goes in the suffix.
        token: drawn last.
        budget: tokens the completion may have.
    """

    rows: Int[Tensor, "rows"]
    slot: Int[Tensor, "rows"]
    sample: Int[Tensor, "rows"]
    time: Int[Tensor, "rows"]
    token: Int[Tensor, "rows"]
    budget: Int[Tensor, "rows"]

    def keep(self, index: Tensor) -> _Live:
        """Some of the entries, by mask or by index."""
        return _Live(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def join(self, other: _Live) -> _Live:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return _Live(**{name: torch.cat(pair) for name, pair in pairs.items()})


class _Rollout:
    """The state of one `generate` call."""

    def __init__(
        self,
        policy: Policy,
        requests: list[Request],
        sampling: Sampling,
        *,
        max_rows: int,
        version: int,
    ) -> None:
        self.policy, self.sampling, self.version = policy, sampling, version
        self.backbone: Backbone | FusedBackbone = Backbone.of(policy.model)
        self.device = self.backbone.device
        self.longest = max(len(request.tokens) for request in requests) + sampling.max_tokens
        self.group = max(request.group for request in requests)
        self.max_rows = max(max_rows, self.group)
        for request in requests:
            check(request, policy)
        self.waiting = list(reversed(requests))
        # Twice the slots that full groups need: prompts whose last answers are long keep few rows,
        # and others may enter.
        slots = min(len(requests), 2 * (self.max_rows // self.group))
        self.cache = GroupCache(
            slots=slots,
            group=self.group,
            prompt_capacity=max(len(request.tokens) for request in requests),
            suffix_capacity=sampling.max_tokens,
            device=self.device,
        )
        shape = (slots * self.group, sampling.max_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.logp = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.length = torch.zeros(shape[0], dtype=torch.long, device=self.device)
        self.stopped = torch.zeros(shape[0], dtype=torch.bool, device=self.device)
        self.kept: dict[int, list[Tensor]] = {}
        self.ending = Ending(policy, sampling, device=self.device)
        self.slots: list[_Slot] = []
        self.clock = 0
        self.left = False
        nothing = torch.empty(0, dtype=torch.long, device=self.device)
        self.live = _Live(**dict.fromkeys((f.name for f in fields(_Live)), nothing))
        self._measure()

    def next_groups(self) -> list[Group]:
        """Write until some prompt's last completion has ended; the groups that have."""
        groups: list[Group] = []
        while not groups and (self.waiting or self.slots):
            self.admit()
            if len(self.live.rows):
                self.step()
            groups = self.collect()
        return groups

    def admit(self) -> None:
        """Let waiting prompts in while their groups fit; draw their completions' first tokens."""
        first, rows, tokens = len(self.slots), len(self.live.rows), 0
        while self.waiting and len(self.slots) < self.cache.slots:
            request = self.waiting[-1]
            rows, tokens = rows + request.group, tokens + len(request.tokens)
            too_long = len(self.slots) > first and tokens > PREFILL_TOKENS
            if rows > self.max_rows or too_long:
                break
            span = len(self.slots) * self.group + torch.arange(request.group)
            self.uniform[span] = uniforms(request, self.sampling.max_tokens).to(self.device)
            self.slots.append(_Slot(request=self.waiting.pop(), start=self.clock))
        if len(self.slots) > first:
            self._prefill(first)
            self._measure()

    @torch.inference_mode()
    def _prefill(self, first: int) -> None:
        """Compute the prompts of the slots from `first` on, and draw from their last states."""
        requests = [slot.request for slot in self.slots[first:]]
        lengths = torch.tensor([len(request.tokens) for request in requests], device=self.device)
        time, slots = int(lengths.max()), torch.arange(first, len(self.slots), device=self.device)
        ids = torch.zeros(len(requests), time, dtype=torch.long)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.tokens)] = torch.as_tensor(request.tokens)
        self.cache.prompt_length[slots], self.cache.start[slots] = lengths, self.clock
        places = torch.arange(time, device=self.device).repeat(len(requests))
        attend = Prefill(cache=self.cache, slots=slots, time=time)
        hidden = self.backbone.hidden(ids.flatten().to(self.device), places, attend)
        last = torch.arange(len(requests), device=self.device) * time + lengths - 1
        groups = torch.tensor([request.group for request in requests], device=self.device)
        logits = self.backbone.logits(hidden[last]).repeat_interleave(groups, 0)
        room = [budget(request, self.policy, self.sampling) for request in requests]
        slot = slots.repeat_interleave(groups)
        sample = torch.cat([torch.arange(request.group) for request in requests]).to(self.device)
        new = _Live(
            rows=slot * self.group + sample,
            slot=slot,
            sample=sample,
            # The first token is drawn from the prompt alone, before anything is in the suffix.
            time=torch.full_like(slot, -1),
            token=torch.zeros_like(slot),
            budget=torch.tensor(room, device=self.device).repeat_interleave(groups),
        )
        self.live = self.live.join(self._draw(new, logits))

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every live completion."""
        live = self.live
        attend = Decode(
            cache=self.cache,
            used=len(self.slots),
            rows=live.rows,
            slot=live.slot,
            sample=live.sample,
            time=live.time,
            clock=self.clock,
            prompt=self.longest_prompt,
            suffix=self.clock - self.earliest + 1,
            aligned=self.aligned,
        )
        position = self.cache.prompt_length[live.slot] + live.time
        hidden = self.backbone.hidden(live.token, position, attend)
        self.clock += 1
        self.live = self._draw(live, self.backbone.logits(hidden))

    def _draw(self, live: _Live, logits: Float[Tensor, "rows vocab"]) -> _Live:
        """Draw each row's next token from its own stream, note it, and drop the rows that end."""
        place = live.time + 1
        drawn = draw(logits, self.uniform[live.rows, place], self.sampling)
        self.tokens[live.rows, place] = drawn.tokens
        self.logp[live.rows, place] = drawn.logp.double()
        if drawn.kept is not None:
            for row, kept in zip(live.rows.tolist(), drawn.kept, strict=True):
                self.kept.setdefault(row, []).append(kept.nonzero().squeeze(-1))
        stopped = self.ending(drawn.tokens, self.tokens, live.rows, place)
        ended = stopped | (place + 1 >= live.budget)
        live = replace(live, time=place, token=drawn.tokens)
        if not bool(ended.any()):
            return live
        self.left = True
        self.length[live.rows[ended]] = place[ended] + 1
        self.stopped[live.rows[ended]] = stopped[ended]
        return live.keep(~ended)

    def _measure(self) -> None:
        """What every step needs to know of the slots in use; changes only when slots do."""
        lengths = {len(slot.request.tokens) for slot in self.slots}
        starts = {slot.start for slot in self.slots}
        self.longest_prompt, self.earliest = max(lengths, default=0), min(starts, default=0)
        self.aligned = len(lengths) == 1 and len(starts) == 1

    @torch.inference_mode()
    def collect(self) -> list[Group]:
        """Groups whose last completion has just ended; their slots are free again."""
        if not self.left:
            return []
        self.left = False
        busy = set(self.live.slot.tolist())
        finished = [slot for slot in range(len(self.slots)) if slot not in busy]
        groups = [self._group(slot) for slot in finished]
        self._free(finished)
        self._measure()
        return groups

    def _group(self, slot: int) -> Group:
        request = self.slots[slot].request
        span = slice(slot * self.group, slot * self.group + request.group)
        lengths, stopped = self.length[span].tolist(), self.stopped[span].tolist()
        tokens = [row[:n] for row, n in zip(self.tokens[span].tolist(), lengths, strict=True)]
        logp = [row[:n] for row, n in zip(self.logp[span].tolist(), lengths, strict=True)]
        kept = [self.kept.pop(row, None) for row in range(span.start, span.stop)]
        completions = completions_of(
            self.policy, tokens, logp, stopped=stopped, version=self.version, kept=kept
        )
        return Group(
            prompt=request.prompt,
            prompt_tokens=request.tokens,
            completions=completions,
            stream=request.stream,
        )

    def _free(self, finished: list[int]) -> None:
        """Give slots back: those of the last ones that stay move into their places."""
        left = len(self.slots) - len(finished)
        to = [slot for slot in finished if slot < left]
        of = [slot for slot in range(left, len(self.slots)) if slot not in finished]
        moved = [self.slots[slot] for slot in of]
        for slot, staying in zip(to, moved, strict=True):
            self.slots[slot] = staying
        del self.slots[left:]
        if not moved:
            return
        prompt = max(len(slot.request.tokens) for slot in moved)
        written = self.clock - min(slot.start for slot in moved)
        self.cache.move(of, to, prompt=prompt, suffix=written)
        for values in (self.tokens, self.logp, self.uniform, self.length, self.stopped):
            of_slots = values.unflatten(0, (-1, self.group))
            of_slots[to] = of_slots[of]
        for source, target in zip(of, to, strict=True):
            for sample in range(self.group):
                if source * self.group + sample in self.kept:
                    kept = self.kept.pop(source * self.group + sample)
                    self.kept[target * self.group + sample] = kept
        place = torch.arange(self.cache.slots, device=self.device)
        place[of] = torch.tensor(to, device=self.device)
        slots = place[self.live.slot]
        live = replace(self.live, slot=slots, rows=slots * self.group + self.live.sample)
        self.live = live.keep(live.rows.argsort())

"""The in-process engine: each prompt is computed once for all its completions, and no row waits for
another.

Finished completions leave the batch at once; when the last one of a prompt has finished, its group
is yielded and the next request takes its place. Prompts of different lengths stand side by side
without padding in the decoding step. Begun completions are continued by passing their tokens
through decoding steps, up to `CHUNK` at a time, so that the cache is the same as if this engine had
sampled them. The engine runs the model that learns, so there is no second copy of the weights and
nothing to synchronise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
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
from groupwise.rollouts.engines.live import Answer, Entry, Live, Parked, Parking, Slot, Turns
from groupwise.rollouts.limits import RequestQueue, places, within_turn
from groupwise.rollouts.rows import Row, completions_of, rows_of
from groupwise.rollouts.sampling import draw, kept_ids
from groupwise.rollouts.streams import uniforms
from groupwise.rollouts.text import Ending
from groupwise.types import Group, Limits, Metrics, Request, Requests, Sampling, WeightsRef

PREFILL_TOKENS = 8192
"""Prompt tokens computed at once."""
CHUNK = 64
"""Begun tokens of one completion that pass through the model in one step."""


class GroupEngine:
    """Rollouts on a `transformers` causal language model.

    Args:
        policy: model and tokenizer.
        max_rows: completions decoded at once; a prompt enters when all of its group fit.

    Raises:
        ModelError: the model does not support grouped attention; the message says why.
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
        self.errands: deque[Callable[[], None]] = deque()  # of others, between two steps
        self.calls = can_use_fused(Backbone.of(policy.model))

    @property
    def exact_continuation(self) -> bool:
        """True where compiled kernels compute every layer and the head: their results do not depend
        on what else is in the batch."""
        fused = self._fused(positions=1)
        return fused is not None and fused.batch_invariant

    def generate(
        self, requests: Requests, sampling: Sampling, limits: Limits | None = None
    ) -> Iterator[Group]:
        """Yield each request's group as soon as its last completion has finished."""
        return self.converse(requests, sampling, limits)

    def converse(
        self,
        requests: Requests,
        sampling: Sampling,
        limits: Limits | None = None,
        turns: Turns | None = None,
    ) -> Iterator[Group]:
        """`generate` whose completions wait in the cache for replies and continue after them."""
        queue = RequestQueue(requests, self.policy, sampling, limits, max_rows=self.max_rows)
        if queue.limits is None:
            return
        training = self.policy.model.training
        try:
            rollout = _Rollout(
                self.policy, queue, queue.limits, sampling, max_rows=self.max_rows,
                version=lambda: -1 if self.errands else self.version, turns=turns,
            )  # fmt: skip
            weights: AbstractContextManager[None] = nullcontext()
            while rollout.unfinished:
                while self.errands:
                    self.errands.popleft()()
                if rollout.outdated:
                    weights = self._laid_out(rollout)
                    rollout.follow(self.version)
                if any(m.training for m in self.policy.model.modules()):  # after an update
                    self.policy.model.eval()
                # Between yields, the model is in the mode in which the caller passed it.
                with weights:
                    groups = rollout.next_groups()
                yield from groups
        finally:
            self.policy.model.train(training)

    def _laid_out(self, rollout: _Rollout) -> AbstractContextManager[None]:
        """A context in which a rollout computes with copies of the current weights."""
        fused = self._fused(positions=rollout.positions)
        rollout.backbone, dtype = fused or Backbone.of(self.policy.model), self.policy.model.dtype
        rollout.hidden = active().replayed(rollout.backbone.hidden, rollout.device, dtype)
        if fused is not None:
            return nullcontext()
        return active().inference_layers(self.policy.model, rows=self.max_rows)

    def _fused(self, *, positions: int) -> FusedBackbone | None:
        """The model as kernels compute it, with its current weights; None without kernel support,
        or after an adapter was added or another backend selected."""
        backbone = Backbone.of(self.policy.model)
        if self.calls is None or not only_known_parts(backbone):
            return None
        try:
            return FusedBackbone(backbone, self.calls, positions=positions)
        except ValueError:
            return None

    def publish(self, weights: WeightsRef) -> Metrics:
        """Stamp what follows with the new version; the tensors are shared with the learner."""
        self.version = weights.version
        return {}

    def close(self) -> None:
        """No resources are kept between calls."""


class _Rollout:
    """The state of one `generate` call.

    Args:
        version: the engine's present version of the weights; −1 if it is wanted for something else.
        turns: answers completions that hand over.
    """

    def __init__(
        self,
        policy: Policy,
        requests: RequestQueue,
        limits: Limits,
        sampling: Sampling,
        *,
        max_rows: int,
        version: Callable[[], int],
        turns: Turns | None = None,
    ) -> None:
        self.parking = None if turns is None else Parking(turns)
        self.policy, self.requests, self.sampling = policy, requests, sampling
        self.newest, self.version = version, -2  # followed before the first step
        self.backbone: Backbone | FusedBackbone = Backbone.of(policy.model)
        self.hidden: Callable[..., Tensor] = self.backbone.hidden
        self.device = self.backbone.device
        self.positions = limits.prompt + limits.suffix
        self.group = limits.group
        self.max_rows = max(max_rows, self.group)
        self.cache = GroupCache(
            slots=limits.slots,
            group=self.group,
            prompt_capacity=limits.prompt,
            suffix_capacity=limits.suffix,
            device=self.device,
        )
        shape = (limits.slots * self.group, limits.suffix)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.logp = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.length = torch.zeros(shape[0], dtype=torch.long, device=self.device)
        self.stopped = torch.zeros(shape[0], dtype=torch.bool, device=self.device)
        self.ending = Ending(policy, sampling, device=self.device)
        self.slots: list[Slot] = []
        self.filled = 0
        self.clock = 0
        self.left = False
        self.live = Live.of([], self.device)
        self._measure()

    @property
    def unfinished(self) -> bool:
        """Whether anything is being written or further requests may come."""
        return bool(self.slots) or not self.requests.over

    @property
    def outdated(self) -> bool:
        """Whether the engine has received other weights since this call began."""
        return self.newest() != self.version

    def follow(self, version: int) -> None:
        """Stamp tokens with another version from here on."""
        for place, time in zip(self.live.rows.tolist(), self.live.time.tolist(), strict=True):
            self._row(place).stamp(time + 1, version)
        for row in (row for slot in self.slots[self.filled :] for row in slot.rows):
            if row.ended is None:
                row.stamp(0, version)
        self.version = version

    def next_groups(self) -> list[Group]:
        """Write until a request's last completion has ended, or the weights have changed; the
        groups that have finished."""
        groups: list[Group] = []
        while not groups and self.unfinished:
            if self.parking:
                self.rejoin(self.parking)
            self.admit()
            if self.outdated:
                break
            if len(self.live.rows):
                self.step()
            elif self.parking and not self.left:
                self.parking.wait()
            groups = self.collect()
        return groups

    def admit(self) -> None:
        """Let requests in while their completions fit; draw the first tokens of those that are not
        begun, unless the weights have changed meanwhile."""
        first, rows, tokens = self.filled, len(self.live.rows), 0
        rows += sum(len(slot.rows) for slot in self.slots[first:])
        while len(self.slots) < self.cache.slots:
            request = self.requests.peek(idle=not self.slots)
            if request is None or self.outdated:
                break
            rows, tokens = rows + len(request.wanted), tokens + len(request.tokens)
            too_long = len(self.slots) > first and tokens > PREFILL_TOKENS
            if rows > self.max_rows or too_long:
                break
            self._enter(self.requests.pop())
        if len(self.slots) > first and not self.outdated:
            self._prefill(first)
            self.filled = len(self.slots)
            self._measure()

    def _enter(self, request: Request) -> None:
        """Give a request the next slot, with the tokens that are there already."""
        first = len(self.slots) * self.group
        rows = rows_of(request, self.policy, self.sampling, version=self.version)
        random = uniforms(request, self.uniform.shape[1])
        self.uniform[first : first + len(rows)] = random.to(self.device)
        for place, row in enumerate(rows, first):
            row.start, count = self.clock, len(row.given)
            if count:
                self.tokens[place, :count] = torch.as_tensor(row.given, device=self.device)
                logp = torch.as_tensor(row.begun.logprobs, dtype=torch.float64)
                self.logp[place, :count] = logp.to(self.device)
            if row.ended is not None:
                self.length[place], self.stopped[place] = count, row.ended == "stop"
                row.given, self.left = [], True
        self.slots.append(Slot(request=request, rows=rows, start=self.clock))

    @torch.inference_mode()
    def _prefill(self, first: int) -> None:
        """Compute the prompts of the slots from `first` on, and draw from their last states."""
        new = self.slots[first:]
        requests = [slot.request for slot in new]
        lengths = torch.tensor([len(request.tokens) for request in requests], device=self.device)
        time, slots = int(lengths.max()), torch.arange(first, len(self.slots), device=self.device)
        ids = torch.zeros(len(requests), time, dtype=torch.long)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.tokens)] = torch.as_tensor(request.tokens)
        self.cache.prompt_length[slots], self.cache.start[slots] = lengths, self.clock
        places = torch.arange(time, device=self.device).repeat(len(requests))
        attend = Prefill(cache=self.cache, slots=slots, time=time)
        hidden = self.hidden(ids.flatten().to(self.device), places, attend)
        last = torch.arange(len(requests), device=self.device) * time + lengths - 1
        fresh = self._rows_to_write(first, begun=False)
        if len(fresh.rows):
            counts = torch.bincount(fresh.slot - first, minlength=len(new))
            logits = self.backbone.logits(hidden[last]).repeat_interleave(counts, 0)
            fresh = self._draw(fresh, logits)
        self.live = self.live.join(fresh)
        begun = self._rows_to_write(first, begun=True)
        if len(begun.rows):
            self.live = self.live.join(begun).ordered()

    def _rows_to_write(self, first: int, *, begun: bool) -> Live:
        """The rows of new slots that begin with their prompt, or with given tokens."""
        # A first token is drawn from the prompt alone, before anything is in the suffix.
        time = 0 if begun else -1
        chosen = [
            (number * self.group + sample, number, sample, time, 0, row.places)
            for number, slot in enumerate(self.slots[first:], first)
            for sample, row in enumerate(slot.rows)
            if row.ended is None and bool(row.given) == begun
        ]
        return Live.of(chosen, self.device)

    @torch.inference_mode()
    def step(self) -> None:
        """Draw one more token for every live completion, except those with given tokens left."""
        live, order, last, waiting = self.live, None, None, []
        if self.queued:
            live, order, last, waiting = self._feed(live)
        attend = Decode(
            cache=self.cache,
            used=len(self.slots),
            rows=live.rows,
            slot=live.slot,
            sample=live.sample,
            time=live.time,
            clock=self.clock,
            prompt=self.longest_prompt,
            suffix=min(self.clock - self.earliest + 1, self.cache.suffix_capacity),
            # Of several tokens of a row, the earlier ones must not attend to the later ones.
            aligned=self.aligned and order is None,
            in_step=self.in_step,
            order=order,
        )
        position = self.cache.prompt_length[live.slot] + live.time
        hidden = self.hidden(live.token, position, attend)
        self.clock += 1
        if last is not None:
            live, hidden = live.keep(last), hidden[last]
        if not any(waiting):
            self.live = self._draw(live, self.backbone.logits(hidden))
            return
        wait = torch.tensor(waiting, device=self.device)
        held = live.keep(wait)
        self.live = replace(held, time=held.time + 1)
        if not all(waiting):
            drawn = self._draw(live.keep(~wait), self.backbone.logits(hidden[~wait]))
            self.live = self.live.join(drawn).ordered()

    def _feed(self, live: Live) -> tuple[Live, Tensor, Tensor, list[bool]]:
        """The tokens of a step in which some rows have several given ones.

        Returns:
            an entry per token; its index in its row; each row's last entry; rows with tokens left.
        """
        tokens: list[int] = []
        counts, waiting = [], []
        for place, latest in zip(live.rows.tolist(), live.token.tolist(), strict=True):
            row = self._row(place)
            part, row.given = row.given[:CHUNK] or [latest], row.given[CHUNK:]
            row.start -= len(part) - 1
            tokens += part
            counts.append(len(part))
            waiting.append(bool(row.given))
        self._measure()
        several = torch.tensor(counts, device=self.device)
        last = several.cumsum(0) - 1
        of = torch.arange(len(counts), device=self.device).repeat_interleave(several)
        entries = live.keep(of)
        order = torch.arange(len(tokens), device=self.device) - (last + 1 - several)[of]
        entries = replace(
            entries,
            token=torch.tensor(tokens, device=self.device),
            time=entries.time + order,
        )
        return entries, order, last, waiting

    def _draw(self, live: Live, logits: Float[Tensor, "rows vocab"]) -> Live:
        """Draw each row's next token from its own stream, note it, and drop the rows that end."""
        place = live.time + 1
        drawn = draw(logits, self.uniform[live.rows, place], self.sampling)
        self.tokens[live.rows, place] = drawn.tokens
        self.logp[live.rows, place] = drawn.logp.double()
        if drawn.support is not None:
            for row, kept in zip(live.rows.tolist(), kept_ids(drawn.support), strict=True):
                self._row(row).support.append(kept)
        stopped = self.ending(drawn.tokens, self.tokens, live.rows, place, self.since)
        ended = stopped | (place + 1 >= live.budget)
        live = replace(live, time=place, token=drawn.tokens)
        if not bool(ended.any()):
            return live
        self.left = True
        self.length[live.rows[ended]] = place[ended] + 1
        self.stopped[live.rows[ended]] = stopped[ended]
        if self.parking is not None:
            self._park(live.keep(ended), stopped[ended].tolist(), self.parking)
        return live.keep(~ended)

    def _park(self, ended: Live, stopped: list[bool], parking: Parking) -> None:
        """Park the rows that have stopped to ask the environment."""
        columns = (ended.rows.tolist(), ended.time.tolist(), ended.token.tolist())
        for place, time, token, stop in zip(*columns, stopped, strict=True):
            row = self._row(place)
            row.idle = True
            if stop:
                slot = self.slots[place // self.group]
                parked = Parked(slot, place % self.group, time, token)
                parking.offer(parked, self.tokens[place, row.since : time + 1].tolist())

    def rejoin(self, parking: Parking) -> None:
        """Resume rows after their answers, as long as they fit."""
        answered = parking.answered(room=self.max_rows - len(self.live.rows))
        entries = [entry for parked, one in answered for entry in self._answered(parked, one)]
        if answered:
            self.live = self.live.join(Live.of(entries, self.device)).ordered()
            self._measure()

    def _answered(self, parked: Parked, answer: Answer) -> list[Entry]:
        """Append an answer to its row; returns the row's entry, unless the row has ended."""
        slot, sample, last, token = parked
        number = next(n for n, other in enumerate(self.slots) if other is slot)
        place, row = number * self.group + sample, slot.rows[sample]
        first, length = last + 1, last + 1 + len(answer.tokens)
        self.tokens[place, first:length] = torch.tensor(answer.tokens, device=self.device)
        self.logp[place, first:length] = 0
        row.inject(first, length)
        most = places(slot.request, self.policy, self.sampling, injected=row.injected)
        row.places = within_turn(most, self.sampling, since=length)
        if answer.over or length >= row.places:
            self.length[place], self.stopped[place], self.left = length, False, True
            return []
        # Its last token has yet to pass through the model, before those of the answer.
        row.given, row.start, row.idle = [token, *answer.tokens], self.clock - last, False
        row.stamp(length, self.version)
        return [(place, number, sample, last, token, row.places)]

    def _row(self, place: int) -> Row:
        return self.slots[place // self.group].rows[place % self.group]

    def _measure(self) -> None:
        """What every step needs to know of the rows; changes when slots do or tokens are given."""
        lengths = {len(slot.request.tokens) for slot in self.slots}
        starts: set[int] = set()
        self.since: dict[int, int] = {}
        self.in_step, self.queued = True, False
        for number, slot in enumerate(self.slots):
            for place, row in enumerate(slot.rows, number * self.group):
                if row.since:
                    self.since[place] = row.since
                if row.idle:  # a waiting row must not widen the attention
                    continue
                starts.add(row.start)
                self.in_step = self.in_step and row.start == slot.start
                self.queued = self.queued or bool(row.given)
        self.longest_prompt, self.earliest = max(lengths, default=0), min(starts, default=0)
        self.aligned = len(lengths) == 1 and len(starts) == 1

    @torch.inference_mode()
    def collect(self) -> list[Group]:
        """Groups whose last completion has just ended; their slots are free again."""
        if not self.left:
            return []
        self.left = False
        busy = set(self.live.slot.tolist())
        if self.parking:
            busy |= {number for number, slot in enumerate(self.slots) if slot in self.parking}
        finished = [slot for slot in range(len(self.slots)) if slot not in busy]
        groups = [self._group(slot) for slot in finished]
        self._free(finished)
        self._measure()
        return groups

    def _group(self, number: int) -> Group:
        slot, first = self.slots[number], number * self.group
        span = slice(first, first + len(slot.rows))
        lengths, stopped = self.length[span].tolist(), self.stopped[span].tolist()
        tokens = [row[:n] for row, n in zip(self.tokens[span].tolist(), lengths, strict=True)]
        logp = [row[:n] for row, n in zip(self.logp[span].tolist(), lengths, strict=True)]
        return Group(
            prompt=slot.request.prompt,
            prompt_tokens=slot.request.tokens,
            completions=completions_of(self.policy, slot.rows, tokens, logp, stopped=stopped),
            stream=slot.request.stream,
            samples=slot.request.wanted,
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
        self.filled = left
        if not moved:
            return
        prompt = max(len(slot.request.tokens) for slot in moved)
        written = self.clock - min(row.start for slot in moved for row in slot.rows)
        self.cache.move(of, to, prompt=prompt, suffix=min(written, self.cache.suffix_capacity))
        sources, targets = torch.tensor([of, to], device=self.device)
        for values in (self.tokens, self.logp, self.uniform, self.length, self.stopped):
            of_slots = values.unflatten(0, (-1, self.group))
            of_slots[targets] = of_slots[sources]
        place = torch.arange(self.cache.slots, device=self.device)
        place[sources] = targets
        slot, sample = place[self.live.slot], self.live.sample
        self.live = replace(self.live, slot=slot, rows=slot * self.group + sample).ordered()

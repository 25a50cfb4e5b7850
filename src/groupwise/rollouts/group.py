"""The in-process engine: a prompt is computed once for all its completions, and no row waits for
another.

Finished completions leave the batch at once; when the last one of a prompt has finished, its group
is yielded and the next waiting prompt takes its place. Prompts of different lengths stand side by
side without padding in the decoding step. The engine runs the very model that learns, so there is
no second copy of the weights and nothing to synchronise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.errors import ModelError, UsageError
from groupwise.models import Backbone, Policy, unsupported
from groupwise.rollouts.cache import Decode, GroupCache, Prefill
from groupwise.rollouts.sampling import draw
from groupwise.rollouts.streams import uniforms
from groupwise.rollouts.text import Ending, completion_of
from groupwise.types import Group, Request, Sampling

PREFILL_TOKENS = 8192


class GroupEngine:
    """Rollouts on a `transformers` causal language model.

    Args:
        policy: model and tokenizer.
        max_rows: completions decoded at once; a prompt enters when all of its group fit.

    Raises:
        ModelError: the model cannot be attended group by group; the message says why.
    """

    capabilities = frozenset(
        {"common_random_numbers", "kept_sets", "shares_weights", "stop_strings"}
    )

    def __init__(self, policy: Policy, *, max_rows: int = 128) -> None:
        reason = unsupported(policy.model)
        if reason is not None:
            raise ModelError(
                f"engine.name = 'group': not possible for this model: {reason}; use engine.name = "
                f"'generate'."
            )
        self.policy = policy
        self.max_rows = max_rows
        self.version = 0

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
            while not rollout.done:
                rollout.admit()
                yield from rollout.collect()
                if rollout.used:
                    rollout.step()
                    yield from rollout.collect()
        finally:
            self.policy.model.train(training)

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Nothing to copy: the learner changes the weights in place. Only the version moves on."""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""


@dataclass(kw_only=True)
class _Slot:
    request: Request
    budget: int
    live: int


class _Rollout:
    """The state of one `generate` call. Rows are named slot · G + sample."""

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
        self.backbone = Backbone.of(policy.model)
        self.device = self.backbone.model.get_input_embeddings().weight.device
        self.group = max(request.group for request in requests)
        self.max_rows = max(max_rows, self.group)
        for request in requests:
            _check(request, policy)
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
        rows = slots * self.group
        self.slots: list[_Slot] = []
        self.live = torch.empty(0, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros(rows, sampling.max_tokens, dtype=torch.long, device=self.device)
        self.logp = torch.zeros(rows, sampling.max_tokens, dtype=torch.float64, device=self.device)
        self.uniform = torch.zeros(
            rows, sampling.max_tokens, dtype=torch.float64, device=self.device
        )
        self.budget = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.length = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.kept: dict[int, list[Tensor]] = {}
        self.ending = Ending(policy, sampling, device=self.device)

    @property
    def used(self) -> int:
        return len(self.slots)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.slots

    def admit(self) -> None:
        """Let waiting prompts in while their groups fit, and draw the first token of each
        completion."""
        first, rows, tokens = self.used, len(self.live), 0
        while (
            self.waiting
            and self.used < self.cache.slots
            and rows + self.waiting[-1].group <= self.max_rows
        ):
            tokens += len(self.waiting[-1].tokens)
            if self.used > first and tokens > PREFILL_TOKENS:
                break
            request = self.waiting.pop()
            slot, rows = self.used, rows + request.group
            budget = min(self.sampling.max_tokens, self.policy.context - len(request.tokens))
            self.slots.append(_Slot(request=request, budget=budget, live=request.group))
            span = slice(slot * self.group, slot * self.group + request.group)
            self.uniform[span] = uniforms(request, self.sampling.max_tokens).to(self.device)
            self.budget[span], self.length[span], self.stopped[span] = budget, 0, False
        if self.used > first:
            self._prefill(first)

    @torch.inference_mode()
    def _prefill(self, first: int) -> None:
        """Compute the prompts of the slots from `first` on; their last hidden state gives every
        first token."""
        new = self.slots[first:]
        lengths = torch.tensor([len(slot.request.tokens) for slot in new], device=self.device)
        time, slots = int(lengths.max()), torch.arange(first, self.used, device=self.device)
        ids = torch.zeros(len(new), time, dtype=torch.long, device=self.device)
        for row, slot in zip(ids, new, strict=True):
            row[: len(slot.request.tokens)] = torch.as_tensor(
                slot.request.tokens, device=self.device
            )
        self.cache.prompt_length[slots], self.cache.written[slots] = lengths, 0
        places = torch.arange(time, device=self.device).expand(len(new), -1)
        attend = Prefill(cache=self.cache, slots=slots, time=time)
        hidden = self.backbone.hidden(ids.flatten(), places.flatten(), attend).view(
            len(new), time, -1
        )
        logits = self.backbone.logits(
            hidden[torch.arange(len(new), device=self.device), lengths - 1]
        )
        groups = torch.tensor([slot.request.group for slot in new], device=self.device)
        rows = torch.cat(
            [
                slot * self.group + torch.arange(int(g), device=self.device)
                for slot, g in zip(slots, groups, strict=True)
            ]
        )
        self._record(rows, logits.repeat_interleave(groups, 0))
        self.live = torch.cat([self.live, rows[self.budget[rows] > self.length[rows]]])
        self.live = self.live[~self.stopped[self.live]]

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every live completion."""
        cache, live = self.cache, self.live
        used = self.used
        uniform = bool((cache.written[:used] == cache.written[0]).all()) and bool(
            (cache.prompt_length[:used] == cache.prompt_length[0]).all()
        )
        attend = Decode(cache, used=used, live=live, uniform=uniform)
        position = cache.prompt_length[attend.slot] + attend.time
        hidden = self.backbone.hidden(self.tokens[live, attend.time], position, attend)
        cache.written[:used] += 1
        self._record(live, self.backbone.logits(hidden))
        self.live = live[~(self.stopped[live] | (self.length[live] >= self.budget[live]))]

    def _record(self, rows: Int[Tensor, "rows"], logits: Float[Tensor, "rows vocab"]) -> None:
        """Draw a token for each row from its own stream and note it."""
        place = self.length[rows]
        drawn = draw(logits, self.uniform[rows, place], self.sampling)
        self.tokens[rows, place] = drawn.tokens
        self.logp[rows, place] = drawn.logp.double()
        self.length[rows] = place + 1
        self.stopped[rows] = self.ending(drawn.tokens, self.tokens[rows], place + 1)
        if drawn.kept is not None:
            for row, kept in zip(rows.tolist(), drawn.kept, strict=True):
                self.kept.setdefault(row, []).append(kept.nonzero().squeeze(-1))

    @torch.inference_mode()
    def collect(self) -> list[Group]:
        """Groups whose last completion has just finished; their slots are free again."""
        busy = torch.bincount(
            torch.div(self.live, self.group, rounding_mode="floor"), minlength=self.used
        )
        finished = [slot for slot, live in enumerate(busy.tolist()) if live == 0]
        groups = [self._group(slot) for slot in finished]
        for slot in reversed(finished):
            self._free(slot)
        return groups

    def _group(self, slot: int) -> Group:
        request = self.slots[slot].request
        completions = []
        for row in range(slot * self.group, slot * self.group + request.group):
            length = int(self.length[row])
            completions.append(
                completion_of(
                    self.policy,
                    self.tokens[row, :length].tolist(),
                    self.logp[row, :length].tolist(),
                    stopped=bool(self.stopped[row]),
                    version=self.version,
                    kept=tuple(ids.tolist() for ids in self.kept.pop(row))
                    if row in self.kept
                    else None,
                )
            )
        return Group(
            prompt=request.prompt,
            prompt_tokens=request.tokens,
            completions=tuple(completions),
            stream=request.stream,
        )

    def _free(self, slot: int) -> None:
        """Give a slot back: the last one in use moves into its place."""
        last = self.used - 1
        if slot != last:
            self.cache.move(last, slot)
            self.slots[slot] = self.slots[last]
            to, of = (slice(s * self.group, (s + 1) * self.group) for s in (slot, last))
            for values in (
                self.tokens,
                self.logp,
                self.uniform,
                self.budget,
                self.length,
                self.stopped,
            ):
                values[to] = values[of]
            for sample in range(self.group):
                if last * self.group + sample in self.kept:
                    self.kept[slot * self.group + sample] = self.kept.pop(
                        last * self.group + sample
                    )
            moved = torch.div(self.live, self.group, rounding_mode="floor") == last
            self.live = (
                torch.where(moved, self.live + (slot - last) * self.group, self.live).sort().values
            )
        self.slots.pop()


def _check(request: Request, policy: Policy) -> None:
    if request.group < 1:
        raise UsageError(f"group_size = {request.group}: must be at least 1.")
    if not len(request.tokens):
        raise UsageError(f"prompt {request.prompt.id}: has no tokens; a prompt must not be empty.")
    if len(request.tokens) >= policy.context:
        raise UsageError(
            f"prompt {request.prompt.id}: has {len(request.tokens)} tokens, and the model's "
            f"context is {policy.context}; "
            "set data.max_prompt_tokens so that longer prompts are left out."
        )

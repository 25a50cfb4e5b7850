"""The learner on one device: packs, log-probabilities, backward passes, one optimiser step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.errors import RunError, UsageError
from groupwise.kernels import active
from groupwise.models import (
    Backbone,
    Policy,
    groupwise_attention,
    is_adapted,
    save_policy,
    unsupported,
)
from groupwise.settings import OptimizerSettings
from groupwise.types import Batch, Objective, Outputs, Update, nan_like
from groupwise.updates.logprobs import Head, Kept, token_logprobs
from groupwise.updates.optimizer import MasterOptimizer
from groupwise.updates.packing import Pack, kept_mask, pack, plan
from groupwise.updates.unpacked import Padded, pad, padded_logprobs

Reference = Literal["none", "frozen", "adapter"]


class TorchLearner:
    """Updates of one model.

    Args:
        policy: model and tokenizer; the model is trained in place.
        optimizer: settings of AdamW.
        total_steps: optimiser steps of the run, where a decaying schedule ends.
        tokens_per_microbatch: packed tokens of one forward and backward pass, or up to half again
            as many that answer one prompt; bounds memory, changes no number.
        temperature: of the sampler; log-probabilities are of the tempered distribution that was
            sampled from.
        reference: where π_ref comes from: nowhere, a frozen copy made now, or the model with its
            adapter as it is now.
        gradient_checkpointing: recompute activations in the backward pass.
        skip_inert_rows: leave out completions whose gradient is exactly zero.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        optimizer: OptimizerSettings,
        total_steps: int = 0,
        tokens_per_microbatch: int = 8192,
        temperature: float = 1.0,
        reference: Reference = "none",
        gradient_checkpointing: bool = False,
        skip_inert_rows: bool = True,
    ) -> None:
        self.policy = policy
        self.model = policy.model
        self.backbone = Backbone.of(self.model)
        self.device = self.backbone.device
        # An adapter on the head is no part of the head's own matrix.
        self.packs = unsupported(self.model) is None and self.backbone.plain_head
        self.tokens_per_microbatch = tokens_per_microbatch
        self.temperature = temperature or 1.0
        self.skip_inert_rows = skip_inert_rows
        if gradient_checkpointing:
            recompute_activations(self.model)
        if reference == "adapter" and not is_adapted(self.model):
            raise UsageError(
                "model.reference = 'adapter': the model has no adapter to go back to; use 'frozen'."
            )
        self.reference = reference
        self.first = (
            {n: p.clone() for n, p in self.trained().items()} if reference == "adapter" else {}
        )
        self.frozen = (
            copy.deepcopy(self.model).requires_grad_(False).eval()
            if reference == "frozen"
            else None
        )
        self.own = active().training_layers(self.model)
        self.own_frozen = None if self.frozen is None else active().training_layers(self.frozen)
        self.optimizer = MasterOptimizer(
            self.model.parameters(), optimizer, total_steps=total_steps
        )
        self.version = 0

    def evaluate(self, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
        """Outputs for every token the policy wrote, without gradient; 0 elsewhere.

        Args:
            names: of "logp" and "entropy", and "ref_logp" for the log-probabilities of the
                reference model.

        Raises:
            UsageError: an unknown name, or there is no reference model.
        """
        unknown = set(names) - {"logp", "entropy", "ref_logp"}
        if unknown:
            raise UsageError(
                f"names = {sorted(unknown)}: not computed by this learner. Known: logp, entropy, "
                "ref_logp."
            )
        found: dict[str, Tensor] = {}
        if own := set(names) - {"ref_logp"}:
            found |= self._evaluated(batch, own, self.backbone, self.own)
        if "ref_logp" in names:
            found["ref_logp"] = self._of_reference(batch)
        return found

    def _of_reference(self, batch: Batch) -> Tensor:
        """Log-probabilities of the reference model."""
        if self.reference == "none":
            raise UsageError(
                "model.reference = 'none': this algorithm compares with a reference; use 'auto' or "
                "'frozen'."
            )
        if self.frozen is not None and self.own_frozen is not None:
            backbone, own = Backbone.of(self.frozen), self.own_frozen
            return self._evaluated(batch, {"logp"}, backbone, own)["logp"]
        with self._with(self.first):
            return self._evaluated(batch, {"logp"}, self.backbone, self.own)["logp"]

    @torch.no_grad()
    def _evaluated(
        self,
        batch: Batch,
        names: Collection[str],
        backbone: Backbone,
        own: AbstractContextManager[None],
    ) -> dict[str, Tensor]:
        dtype = torch.float64 if _is_double(backbone) else torch.float32
        found = {name: torch.zeros(batch.tokens.shape, dtype=dtype) for name in names}
        rows = batch.mask.any(1).nonzero().squeeze(-1)
        training = self.model.training
        self.model.eval()
        with own:
            for part in plan(batch, rows, tokens=self.tokens_per_microbatch):
                laid = self._laid_out(batch, part)
                outputs = self._forward(laid, backbone, batch, entropy="entropy" in names)
                at = laid.rows[laid.row.cpu()], laid.time.cpu()
                for name, grid in found.items():
                    grid[at] = outputs[name].cpu()
        self.model.train(training)
        return found

    def update(self, batch: Batch, objective: Objective) -> Update:
        """One optimiser step on Σ weight · token loss.

        The weights were normalised over the whole batch, so the split into microbatches only
        reorders a sum.
        """
        start = time.perf_counter()
        update = self._backward(batch, objective)
        backward = time.perf_counter()
        self.version += 1  # first: a step that is interrupted must not pass for one not begun
        norm, rate = self.optimizer.step()
        return replace(
            update,
            version=self.version,
            grad_norm=norm,
            learning_rate=rate,
            seconds={"backward": backward - start, "optimizer": time.perf_counter() - backward},
        )

    def gradient(self, batch: Batch, objective: Objective) -> Float[Tensor, "parameters"]:
        """The gradient of Σ weight · token loss, flat and float32 (float64 for a float64 model), of
        the parameters that learn. Nothing moves."""
        self._backward(batch, objective)
        return self.optimizer.take()

    def _backward(self, batch: Batch, objective: Objective) -> Update:
        """Add the gradient of a batch to the masters'; an update of which no step is taken yet."""
        rows = self._contributing(batch, objective)
        entropy = "entropy" in objective.needs
        logp_all, entropy_all = nan_like(batch.tokens), nan_like(batch.tokens)
        computed = torch.zeros(len(batch.tokens), dtype=torch.bool)
        computed[rows] = True
        total = 0.0
        self.optimizer.clear()  # Of a batch that was not finished.
        learning_mode(self.model)
        # Around the backward pass as well: gradient checkpointing runs the layers again there.
        attention = groupwise_attention(self.backbone.model) if self.packs else nullcontext()
        with attention, self.own:
            for part in plan(batch, rows, tokens=self.tokens_per_microbatch):
                packed = self._laid_out(batch, part)
                outputs = self._forward(packed, self.backbone, batch, entropy=entropy)
                loss = self._loss(batch.rows(part), packed, outputs, objective)
                (loss * self.optimizer.scale).backward()
                total += float(loss.detach())
                at = packed.rows[packed.row.cpu()], packed.time.cpu()
                logp_all[at] = outputs["logp"].detach().float().cpu()
                if entropy:
                    entropy_all[at] = outputs["entropy"].detach().float().cpu()
                # The graph holds the activations of this microbatch; free them before the next.
                del outputs, loss, packed
        return Update(
            version=self.version,
            logp=logp_all,
            entropy=entropy_all,
            computed=computed,
            loss=total,
            grad_norm=0.0,
            learning_rate=0.0,
        )

    def _contributing(self, batch: Batch, objective: Objective) -> Int[Tensor, "rows"]:
        """Rows with a gradient. Weights were normalised before, so leaving a row out changes
        nothing else."""
        alive = (batch.mask & (batch.weight != 0)).any(1)
        if self.skip_inert_rows and objective.skips_zero_advantage:
            alive &= (batch.mask & (batch.advantage != 0)).any(1)
        return alive.nonzero().squeeze(-1)

    def _laid_out(self, batch: Batch, rows: Int[Tensor, "rows"]) -> Pack | Padded:
        """A microbatch in the form that the model can be given."""
        return (pack if self.packs else pad)(batch, rows, device=self.device)

    def _forward(
        self, laid: Pack | Padded, backbone: Backbone, batch: Batch, *, entropy: bool
    ) -> Outputs:
        """Outputs at the predicted tokens of a microbatch."""
        vocab = len(backbone.head.weight)
        kept = None if batch.kept is None else self._kept(laid, batch, vocab=vocab)
        if isinstance(laid, Padded):
            sets = None if kept is None else kept(slice(None))
            logp, h = padded_logprobs(
                backbone.model, laid, temperature=self.temperature, entropy=entropy, kept=sets
            )
            return Outputs(logp=logp, entropy=h)
        hidden = backbone.hidden(laid.tokens, laid.positions, laid.attend)
        head = Head(
            weight=backbone.head.weight,
            bias=backbone.head.bias,
            softcap=backbone.softcap,
            temperature=self.temperature,
            wide=backbone.wide,
            adds=True,
        )
        states = hidden.index_select(0, laid.source)
        logp, h = token_logprobs(states, laid.target, head, entropy=entropy, kept=kept)
        return Outputs(logp=logp, entropy=h)

    def _kept(self, laid: Pack | Padded, batch: Batch, *, vocab: int) -> Kept:
        """What truncated sampling could have drawn, for a slice of the predicted tokens."""
        assert batch.kept is not None
        sets = [batch.kept[int(row)] for row in laid.rows]

        def kept_rows(rows: slice) -> Bool[Tensor, "chunk vocab"]:
            mask = kept_mask(sets, laid.row[rows], laid.time[rows], vocab=vocab)
            return mask.to(self.device)

        return kept_rows

    def _loss(
        self,
        batch: Batch,
        laid: Pack | Padded,
        outputs: Outputs,
        objective: Objective,
    ) -> Float[Tensor, ""]:
        """Σ weight · token loss of one microbatch."""
        at, shape = (laid.row, laid.time), batch.tokens.shape

        def grid(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros(shape).index_put(at, values)

        here = _on(batch, self.device)
        losses = objective(Outputs(logp=grid(outputs.logp), entropy=grid(outputs.entropy)), here)
        return torch.where(here.mask, losses * here.weight.to(losses.dtype), 0).sum()

    def movement(self) -> Callable[[], float]:
        """Begin to watch the trained weights; the function returned gives the share of parameters
        that have not changed since."""
        return self.optimizer.movement()

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters themselves, by name."""
        return dict(self.model.named_parameters())

    def trained(self) -> dict[str, Tensor]:
        """The parameters that learn, by name: all of them, or an adapter's."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters that learn.

        Raises:
            RunError: names or shapes belong to another model.
        """
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if own.keys() != weights.keys() or any(own[n].shape != w.shape for n, w in weights.items()):
            raise RunError(
                "weights: belong to another model or adapter; resume with the settings of the "
                "run's config.json."
            )
        for name, parameter in own.items():
            parameter.copy_(weights[name])

    @contextmanager
    def _with(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the parameters that learn are these."""
        now = {name: weight.clone() for name, weight in self.trained().items()}
        self.set_trained(weights)
        try:
            yield
        finally:
            self.set_trained(now)

    def save(self, path: str) -> None:
        """Model and tokenizer as a plain Hugging Face folder."""
        save_policy(self.policy, path)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the model's weights."""
        return {"optimizer": self.optimizer.state(), "version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.restore(state["optimizer"])
        self.version = int(state["version"])


def recompute_activations(model: Any, **how: bool) -> None:
    """Let the backward pass recompute what is inside the layers.

    Args:
        how: further settings of `torch.utils.checkpoint`.
    """
    # The newer name of the same; where a model has both, the older one warns.
    older = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False, **how})


def learning_mode(model: Any) -> None:
    """Modules as the sampler used them: without dropout, or the ratio would start as noise. An
    adapter's own dropout is on, as its settings ask for it; and transformers recomputes the layers
    of checkpointing only while they train."""
    model.eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name or getattr(module, "gradient_checkpointing", False):
            module.training = True


def _is_double(backbone: Backbone) -> bool:
    return backbone.model.dtype == torch.float64


def _on(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on a device."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in ((f.name, getattr(batch, f.name)) for f in fields(batch))
    }
    moved["columns"] = {k: v.to(device) for k, v in batch.columns.items()}
    return Batch(**moved)

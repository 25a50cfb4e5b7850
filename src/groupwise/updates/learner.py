"""The learner on one device: microbatches, backward passes, one optimizer step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from groupwise.errors import RunError, UsageError
from groupwise.models import Backbone, Policy, is_adapted, save_policy
from groupwise.models.seeds import own_random_numbers
from groupwise.models.weights import PublishedWeights
from groupwise.settings import OptimizerSettings
from groupwise.types import Batch, Objective, Outputs, Update
from groupwise.updates.chunked import LogitsObjective
from groupwise.updates.experts import check_routers, load_balancing_loss, router_logits
from groupwise.updates.grids import (
    blank_outputs,
    grid_shape,
    grids,
    read_rows,
    support_of,
    write,
)
from groupwise.updates.heads import Head
from groupwise.updates.optimizer import MasterOptimizer, moments
from groupwise.updates.packing import Pack, first_of_equal, plan
from groupwise.updates.reader import Reader
from groupwise.updates.unpacked import Padded

Reference = Literal["none", "frozen", "adapter"]


class TorchLearner:
    """Trains one model.

    Args:
        policy: model and tokenizer; the model is trained in place.
        optimizer: settings of AdamW.
        total_steps: optimizer steps of the run, where a decaying schedule ends.
        head: what is computed from the hidden states; None: log-probabilities.
        tokens_per_microbatch: packed tokens of one forward and backward pass, or up to half again
            as many that answer one prompt; bounds memory and changes no result beyond rounding.
        temperature: of the sampler; log-probabilities are of the tempered distribution.
        reference: the reference model: none, a frozen copy made now, or the model with its present
            adapter weights.
        gradient_checkpointing: recompute activations in the backward pass.
        skip_inert_rows: leave out completions whose gradient is exactly zero.
        share_equal_rows: compute equal completions of a prompt once, with the gradient of all of
            them; changes no result beyond rounding, but for an adapter's dropout.
        dropout_seed: seeds the dropout of an adapter at every update, together with the version;
            None leaves the global generator alone.
        router_aux_loss: coefficient of the load-balancing loss of a mixture of experts, the mean of
            microbatches by their rows.

    Raises:
        UsageError: the model has no experts to balance.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        optimizer: OptimizerSettings,
        total_steps: int = 0,
        head: Head | None = None,
        tokens_per_microbatch: int = 8192,
        temperature: float = 1.0,
        reference: Reference = "none",
        gradient_checkpointing: bool = False,
        skip_inert_rows: bool = True,
        share_equal_rows: bool = False,
        dropout_seed: int | None = None,
        router_aux_loss: float = 0.0,
    ) -> None:
        self.policy = policy
        self.model = policy.model
        self.tokens_per_microbatch = tokens_per_microbatch
        self.skip_inert_rows = skip_inert_rows
        self.share_equal_rows = share_equal_rows
        self.dropout_seed = dropout_seed
        self.router_aux_loss = router_aux_loss
        if router_aux_loss:
            check_routers(Backbone.of(self.model).model)
        self.reference: Reference = reference
        self.version = 0
        # The order matters: trial runs and copies need whole weights, the optimizer final ones.
        if gradient_checkpointing:
            recompute_activations(self.model)
        self.reader = Reader(self.model, head=head, temperature=temperature or 1.0)
        self._copy_reference(temperature or 1.0)
        self.place()
        self.first = self._values() if reference == "adapter" else {}
        self.optimizer = MasterOptimizer(self.reader.named(), optimizer, total_steps=total_steps)
        self._pending: _Pending | None = None

    def _copy_reference(self, temperature: float) -> None:
        """Keep a copy of the model, if the reference model is one."""
        self._replaced = False
        self.frozen: Reader | None = None
        if self.reference == "frozen":
            twin = copy.deepcopy(self.model).requires_grad_(False).eval()
            self.frozen = Reader(twin, temperature=temperature)
        elif self.reference == "adapter":
            if not is_adapted(self.model):
                raise UsageError(
                    "model.reference = 'adapter': the model has no adapter to "
                    "switch off; use 'frozen'."
                )

    def place(self) -> None:
        """Shard the readers before the optimizer is made; on one device, nothing is done."""

    # -- reading -------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
        """Outputs for every token the policy wrote, without gradient; 0 elsewhere.

        Args:
            batch: the batch; of its rows, those without a mask are 0.
            names: outputs of the head, and "ref_logp" for log-probabilities of the reference model.

        Raises:
            UsageError: an unknown name, or there is no reference model.
        """
        known = self.reader.head.outputs | {"ref_logp"}
        if unknown := sorted(set(names) - known):
            raise UsageError(
                f"names = {unknown}: this learner does not compute them. "
                f"Known: {', '.join(sorted(known))}."
            )
        found: dict[str, Tensor] = {}
        if own := set(names) - {"ref_logp"}:
            found |= self._evaluate(self.reader, batch, own)
        if "ref_logp" in names:
            found["ref_logp"] = self._evaluate_reference(batch)
        return found

    def _evaluate_reference(self, batch: Batch) -> Tensor:
        if self.reference == "none":
            raise UsageError(
                "model.reference = 'none': this algorithm needs a reference; use 'auto' or "
                "'frozen'."
            )
        if self.frozen is not None:
            return self._evaluate(self.frozen, batch, {"logp"})["logp"]
        now = self._values()
        self._set_values(self.first)
        try:
            return self._evaluate(self.reader, batch, {"logp"})["logp"]
        finally:
            self._set_values(now)

    def _evaluate(self, reader: Reader, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
        found = blank_outputs(reader, batch, names)
        with reader.evaluating():
            for part in self._plan(batch, read_rows(reader, batch)):
                self._fill(found, reader, batch, part)
        return found

    def _fill(
        self, found: Mapping[str, Tensor], reader: Reader, batch: Batch, part: Int[Tensor, "_"]
    ) -> None:
        """Compute the outputs of some rows of a batch and write them into those of the whole."""
        once, place = self._distinct(batch, part)
        laid = reader.lay_out(batch, once)
        outputs = reader(laid, names=found.keys(), support=support_of(batch, once))
        for name, grid in found.items():
            write(grid, outputs[name].cpu(), laid, part, place)

    # -- updating ------------------------------------------------------------------------------

    def update(
        self, batch: Batch, objective: Objective, *, parts: Sequence[Tensor] | None = None
    ) -> Update:
        """One optimizer step on Σ weight · loss.

        The weights were normalised over the whole batch, so splitting it into microbatches only
        reorders a sum.

        Args:
            batch: the rows of the step; none is legal and moves nothing.
            objective: the loss.
            parts: rows of each microbatch, if they were planned elsewhere.
        """
        with self._seeded_dropout():
            self.begin(batch, objective)
            for part in self.parts(batch, objective) if parts is None else parts:
                self.add(part)
            return self.finish()

    def gradient(self, batch: Batch, objective: Objective) -> Float[Tensor, "parameters"]:
        """The gradient of Σ weight · loss with respect to the trained weights, flat and in float32
        (float64 for a float64 model). Nothing moves."""
        self.begin(batch, objective)
        for part in self.parts(batch, objective):
            self.add(part)
        self.complete()
        return self.optimizer.pop_gradient()

    def parts(self, batch: Batch, objective: Objective) -> list[Int[Tensor, "_"]]:
        """Microbatches of the rows that contribute to the gradient. Rows that the objective judges
        together are neither split nor left out one by one."""
        rows = self._contributing(batch, objective)
        return self._plan(batch, rows, whole_groups=objective.granularity == "group")

    def _plan(
        self, batch: Batch, rows: Tensor, *, whole_groups: bool = False
    ) -> list[Int[Tensor, "_"]]:
        """Microbatches of rows; equal rows are in one, where they are computed once."""
        size = self.tokens_per_microbatch
        if not self.share_equal_rows:
            return plan(batch, rows, tokens=size, whole_groups=whole_groups)
        first = rows[first_of_equal(batch, rows)]
        parts = plan(batch, first.unique(), tokens=size, whole_groups=whole_groups)
        return [rows[torch.isin(first, part)] for part in parts]

    def _distinct(self, batch: Batch, part: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of a microbatch that the model computes, and which of them each row equals;
        None: all rows are computed."""
        if not self.share_equal_rows:
            return part, None
        once, place = first_of_equal(batch, part).unique(return_inverse=True)
        return part[once], place

    def begin(self, batch: Batch, objective: Objective) -> None:
        """Begin an update; clears gradients of a batch that was not finished."""
        shape = grid_shape(batch, self.reader)
        self._pending = _Pending(
            batch=batch,
            objective=objective,
            outputs={
                name: torch.full(shape, float("nan"))
                for name in ("logp", "entropy", *({"values"} & self.reader.head.outputs))
            },
            computed=torch.zeros(len(batch.tokens), dtype=torch.bool),
        )
        self.optimizer.clear()
        update_mode(self.reader)

    def add(self, part: Int[Tensor, "_"]) -> None:
        """Add the gradient of one microbatch: some rows of the batch."""
        pending = self._pending
        assert pending is not None, "begin() comes first"
        batch, objective = pending.batch, pending.objective
        names = objective.needs & self.reader.head.outputs
        pending.computed[part] = True
        with self.reader.computing(), self._balancing() as routed:
            once, place = self._distinct(batch, part)
            laid = self.reader.lay_out(batch, once)
            function = None
            if isinstance(objective, LogitsObjective):
                function = objective.on_logits(batch, laid.rows[laid.row.cpu()], laid.time.cpu())
            outputs = self.reader(
                laid, names=names, support=support_of(batch, once), function=function
            )
            own = batch.rows(part)
            made = grids(outputs, laid, shape=grid_shape(own, self.reader), place=place)
            loss = _loss(_to(own, laid.row.device), made, objective)
            if routed:
                balance = self._balance(routed, laid) * len(part) / len(batch.tokens)
                loss = loss + self.router_aux_loss * balance
                pending.aux_loss = (pending.aux_loss or 0.0) + float(balance.detach())
            (loss * self.optimizer.scale).backward()
        pending.loss += float(loss.detach())
        for name in names & pending.outputs.keys():
            found = outputs[name].detach().float().cpu()
            write(pending.outputs[name], found, laid, part, place)

    def _balancing(self) -> AbstractContextManager[Sequence[Tensor]]:
        """A context that collects router logits, where they have a loss."""
        return (
            router_logits(self.reader.backbone.model) if self.router_aux_loss else nullcontext(())
        )

    def _balance(self, routed: Sequence[Tensor], laid: Pack | Padded) -> Float[Tensor, ""]:
        """The load-balancing loss of a microbatch."""
        chosen = self.reader.backbone.model.config.get_text_config().num_experts_per_tok
        seen = laid.seen if isinstance(laid, Padded) else None
        return load_balancing_loss(tuple(routed), chosen=chosen, seen=seen)

    def complete(self) -> None:
        """Called once all microbatches of this process are added: a learner of several processes
        sums their gradients and outputs here."""

    def finish(self) -> Update:
        """Take the optimizer step on the gradients added since `begin`."""
        self.complete()
        pending, self._pending = self._pending, None
        assert pending is not None, "begin() comes first"
        backward = time.perf_counter()
        self.version += 1  # Before the step: one that is interrupted counts as begun.
        norm, rate = self.optimizer.step()
        return Update(
            version=self.version,
            logp=pending.outputs["logp"],
            entropy=pending.outputs["entropy"],
            computed=pending.computed,
            loss=pending.loss,
            grad_norm=norm,
            learning_rate=rate,
            values=pending.outputs.get("values"),
            aux_loss=pending.aux_loss,
            seconds={
                "backward": backward - pending.start,
                "optimizer": time.perf_counter() - backward,
            },
        )

    def _contributing(self, batch: Batch, objective: Objective) -> Int[Tensor, "rows"]:
        """Rows with a gradient. Weights were normalised before, so leaving a row out changes
        nothing else."""
        if objective.granularity == "token":
            alive = (batch.mask & (batch.weight != 0)).any(1)
            if self.skip_inert_rows and objective.skips_zero_advantage:
                alive &= (batch.mask & (batch.advantage != 0)).any(1)
        else:
            alive = _row_weight(batch) != 0
            if objective.granularity == "group":
                alive = torch.isin(batch.group, batch.group[alive])
        return alive.nonzero().squeeze(-1)

    @contextmanager
    def _seeded_dropout(self) -> Iterator[None]:
        """A context in which dropout depends on the seed and the version alone."""
        if self.dropout_seed is None:
            yield
            return
        with own_random_numbers(self.dropout_seed * 1_000_003 + self.version):
            yield

    # -- weights and state ---------------------------------------------------------------------

    def movement(self) -> Callable[[], float]:
        """Start to watch the trained weights; returns a function that gives the share of parameters
        that have not changed since.
        """
        before = self.moments()
        return lambda: float((self.moments() == before).all(1).double().mean())

    def moments(self) -> Float64[Tensor, "parameters 2"]:
        """Two sums of every trained parameter."""
        return moments(master.value() for master in self.optimizer.masters.values())

    def publish(self) -> PublishedWeights:
        """The present version of the weights, by reference."""
        return PublishedWeights(version=self.version, named=dict(self.reader.named()))

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, by name: all of them, or an adapter's."""
        return {name: p.detach() for name, p in self._trainable().items()}

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights that are trained.

        Raises:
            RunError: names or shapes belong to another model.
        """
        own = self._trainable()
        if own.keys() != weights.keys() or any(own[n].shape != w.shape for n, w in weights.items()):
            raise RunError(
                "weights: belong to another model or adapter; resume with the settings of the "
                "run's config.json."
            )
        self._set_values(weights)
        self.optimizer.reread()

    def _values(self) -> dict[str, Tensor]:
        """A copy of the trained weights as this process holds them."""
        return {name: p.detach().clone() for name, p in self._trainable().items()}

    @torch.no_grad()
    def _set_values(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trainable().items():
            parameter.copy_(values[name])

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.reader.named().items() if p.requires_grad}

    def save(self, path: str) -> None:
        """Model and tokenizer as a plain Hugging Face folder."""
        save_policy(self.policy, path)

    def replace_reference(self) -> None:
        """Replace the weights of the reference model, which must exist, by the current ones."""
        if self.reference == "none":
            raise UsageError("model.reference_every: this algorithm has no reference model.")
        self._set_reference(self._values())
        self._replaced = True

    def reset_optimizer(self) -> None:
        """Reset the running means of the optimizer."""
        self.optimizer.reset()

    def restart(self, optimizer: OptimizerSettings, *, total_steps: int = 0) -> None:
        """Train on from the present weights as a learner made of them would."""
        self.optimizer.remove_hooks()
        self.optimizer = MasterOptimizer(self.reader.named(), optimizer, total_steps=total_steps)
        self.version = 0

    @torch.no_grad()
    def _set_reference(self, weights: Mapping[str, Tensor]) -> None:
        if self.frozen is None:
            self.first = {name: weight.detach().clone() for name, weight in weights.items()}
            return
        own = self.frozen.named()
        for name, weight in weights.items():
            own[name].copy_(weight)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the model's weights."""
        own = self.first if self.frozen is None else self.frozen.named()
        names = self._trainable() if self._replaced else ()
        replaced = {"reference": {n: own[n].detach() for n in names}} if names else {}
        return {"optimizer": self.optimizer.state(), "version": self.version, **replaced}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the state back to what `state` returned."""
        self.optimizer.restore(state["optimizer"])
        self.version = int(state["version"])
        if "reference" in state:
            self._set_reference(state["reference"])
            self._replaced = True


@dataclass(kw_only=True)
class _Pending:
    """An update between `begin` and `finish`."""

    batch: Batch
    objective: Objective
    outputs: dict[str, Tensor]
    computed: Tensor
    loss: float = 0.0
    aux_loss: float | None = None
    start: float = 0.0

    def __post_init__(self) -> None:
        self.start = time.perf_counter()


def recompute_activations(model: Any, **how: bool) -> None:
    """Recompute the activations of layers in the backward pass.

    Args:
        how: further settings of `torch.utils.checkpoint`.
    """
    # A model that has the newer method warns about the older one.
    older = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False, **how})


def update_mode(model: nn.Module) -> None:
    """Set modules to the mode of an update: that of the sampler, without dropout, or the ratio
    would start as noise. Exceptions are an adapter's own dropout, and layers with gradient
    checkpointing, which transformers applies in training mode only."""
    model.eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name or getattr(module, "gradient_checkpointing", False):
            module.training = True


def _row_weight(batch: Batch) -> Tensor:
    if batch.row_weight is None:
        raise UsageError(
            "batch.row_weight = None: an objective that judges rows or groups needs a weight for "
            "each row."
        )
    return batch.row_weight


def _loss(batch: Batch, outputs: Outputs, objective: Objective) -> Float[Tensor, ""]:
    """Σ weight · loss of one microbatch."""
    losses = objective(outputs, batch)
    if objective.granularity == "token":
        return torch.where(batch.mask, losses * batch.weight.to(losses.dtype), 0).sum()
    return (losses * _row_weight(batch).to(losses.dtype)).sum()


def _to(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in ((f.name, getattr(batch, f.name)) for f in fields(batch))
    }
    moved["columns"] = {name: values.to(device) for name, values in batch.columns.items()}
    return Batch(**moved)

"""The learner of several processes: the gradient is the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from groupwise.distributed.balance import Cost, deal
from groupwise.distributed.sharding import own_part, own_shard, reshard, shard, whole
from groupwise.distributed.world import World
from groupwise.errors import RunError, UsageError
from groupwise.models import Policy, save_policy
from groupwise.models.weights import PublishedWeights
from groupwise.types import Batch, Objective, Outputs
from groupwise.updates import Reader, TorchLearner
from groupwise.updates.grids import blank_outputs, read_rows
from groupwise.updates.optimizer import moments

Sharding = Literal["none", "full"]
BUCKET = 1 << 24
"""Numbers that are summed over ranks at one time."""


class DistributedLearner(TorchLearner):
    """Trains one model on several ranks, which all call the same methods with the same arguments.

    Every rank computes its share of the rows, dealt by whole groups (`balance.py`). Losses are
    sums, so are gradients: nothing is averaged.

    * sharding "none": every rank holds the whole model and its optimizer. Gradients are summed once
      per update, so ranks may compute different numbers of microbatches.
    * sharding "full": weights, gradients and moments are sharded (FSDP2). All ranks go through the
      model together; one with fewer microbatches computes anchors, single tokens of weight 0.

    Args:
        world: the group of processes; rank 0's weights are everyone's when this is made.
        sharding: "none" or "full".
        given: as for `TorchLearner`.
    """

    def __init__(
        self, policy: Policy, *, world: World, sharding: Sharding = "none", **given: Any
    ) -> None:
        self.world, self.sharding = world, sharding
        self.cost = Cost.of(policy.model)
        self._take_weights_of_first(policy)
        super().__init__(policy, **given)
        if self.dropout_seed is not None:
            self.dropout_seed += 7919 * world.rank

    @torch.no_grad()
    def _take_weights_of_first(self, policy: Policy) -> None:
        own = dict(policy.model.named_parameters())
        shapes = self.world.gather(
            {name: tuple(p.shape) for name, p in own.items()}, "all ranks to load the model"
        )
        for rank, theirs in enumerate(shapes):
            if theirs != shapes[0]:
                raise UsageError(
                    f"model: rank {rank} loaded a different model from rank 0; model.path must "
                    "name the same weights on every machine."
                )
        given = own if self.world.leads else None
        for name, tensor in self.world.send(given, "the weights of rank 0"):
            own[name].copy_(tensor)

    def place(self) -> None:
        """Shard the readers. The optimizer is made afterwards, of the shards."""
        self.low: torch.dtype | None = None
        if self.sharding == "full":
            device = self.reader.backbone.device.type
            mesh = init_device_mesh(device, (self.world.size,))
            self.low = shard(self.reader, mesh)
            if self.frozen is not None:
                shard(self.frozen, mesh)

    # -- reading and updating ----------------------------------------------------------------------

    def shares(
        self, batch: Batch, rows: Int[Tensor, "rows"], *, whole_groups: bool = False
    ) -> list[list[Int[Tensor, "_"]]]:
        """The microbatches of every rank. An empty one is an anchor: with sharded weights all
        ranks go through the model equally often."""
        dealt = deal(batch, rows, self.world.size, cost=self.cost, whole_groups=whole_groups)
        shares = [self._plan(batch, own, whole_groups=whole_groups) for own in dealt]
        if self.sharding == "full":
            most = max(map(len, shares))
            none = torch.zeros(0, dtype=torch.long)
            shares = [share + [none] * (most - len(share)) for share in shares]
        return shares

    def parts(self, batch: Batch, objective: Objective) -> list[Int[Tensor, "_"]]:
        """The microbatches of this rank."""
        rows = self._contributing(batch, objective)
        whole_groups = objective.granularity == "group"
        return self.shares(batch, rows, whole_groups=whole_groups)[self.world.rank]

    def begin(self, batch: Batch, objective: Objective) -> None:
        """As `TorchLearner.begin`.

        Raises:
            RunError: the optimizer updates tensors that the model no longer reads, which would
                otherwise go unnoticed.
        """
        read = self._trainable()
        if any(read.get(name) is not p for name, p in self.optimizer.parameters.items()):
            raise RunError("optimizer: was made before the weights were sharded.")
        super().begin(batch, objective)

    def add(self, part: Int[Tensor, "_"]) -> None:
        """Add the gradient of a microbatch, or of an anchor, which is exactly 0."""
        if len(part):
            super().add(part)
            return
        assert self._pending is not None, "begin() comes first"
        names = self._pending.objective.needs & self.reader.head.outputs
        with self.reader.computing():
            outputs = self._anchored(self.reader, names)
            total = torch.stack([outputs[name].sum() for name in sorted(names)]).sum()
            (total * 0.0).backward()

    def _anchored(self, reader: Reader, names: Collection[str]) -> Outputs:
        """One token through the model."""
        one = torch.zeros(1, dtype=torch.long)
        batch = Batch(
            prompts=(one,),
            group=one,
            tokens=one[None],
            length=one + 1,
            mask=torch.ones(1, 1, dtype=torch.bool),
            advantage=torch.zeros(1, 1),
            weight=torch.zeros(1, 1),
        )
        return reader(reader.lay_out(batch, one), names=names)

    def _evaluate(self, reader: Reader, batch: Batch, names: Collection[str]) -> dict[str, Tensor]:
        shares = self.shares(batch, read_rows(reader, batch))
        found = blank_outputs(reader, batch, names)
        with reader.evaluating():
            for part in shares[self.world.rank]:
                if len(part):
                    self._fill(found, reader, batch, part)
                else:
                    self._anchored(reader, names)
        reshard(reader)
        name = "outputs of the other ranks"
        return {key: self.world.unite(grid, name) for key, grid in found.items()}

    def complete(self) -> None:
        """Sum gradients over ranks where they are whole on each, and put the outputs together."""
        pending, name = self._pending, "the gradients of the other ranks"
        assert pending is not None, "begin() comes first"
        if self.world.size == 1:
            return
        if self.sharding == "none":
            self._sum_gradients(name)
        for grid in pending.outputs.values():
            grid[~pending.computed] = 0.0
            self.world.unite(grid, name)
        everyone = pending.computed.long()
        pending.computed = self.world.add(everyone, name) > 0
        for grid in pending.outputs.values():
            grid[~pending.computed] = float("nan")
        sums = torch.tensor([pending.loss, pending.aux_loss or 0.0], dtype=torch.float64)
        pending.loss, balance = self.world.add(sums, name).tolist()
        pending.aux_loss = balance if self.router_aux_loss else None

    @torch.no_grad()
    def _sum_gradients(self, name: str) -> None:
        """Sum the gradients of all masters over ranks; where no rank has one, none is made."""
        masters = list(self.optimizer.masters.values())
        has = torch.tensor([master.grad is not None for master in masters], dtype=torch.long)
        used = self.world.add(has, name) > 0
        bucket: list[Tensor] = []
        for master, wanted in zip(masters, used.tolist(), strict=True):
            if not wanted:
                continue
            gradient = master.full_grad()
            if bucket and (
                sum(grad.numel() for grad in bucket) + gradient.numel() > BUCKET
                or (bucket[0].dtype, bucket[0].device) != (gradient.dtype, gradient.device)
            ):
                self._sum_together(bucket, name)
                bucket = []
            bucket.append(gradient)
        if bucket:
            self._sum_together(bucket, name)

    def _sum_together(self, gradients: list[Tensor], name: str) -> None:
        flat = self.world.add(torch.cat([grad.flatten() for grad in gradients]), name)
        for grad, total in zip(
            gradients, flat.split([grad.numel() for grad in gradients]), strict=True
        ):
            grad.copy_(total.view_as(grad))

    def gradient(self, batch: Batch, objective: Objective) -> Float[Tensor, "parameters"]:
        """The gradient of Σ weight · loss over all ranks, flat; nothing moves."""
        self.begin(batch, objective)
        for part in self.parts(batch, objective):
            self.add(part)
        self.complete()
        grads = [master.full_grad() for master in self.optimizer.masters.values()]
        flat = torch.cat([whole(grad).flatten() for grad in grads]) / self.optimizer.scale
        self.optimizer.clear()
        return flat

    # -- weights and state ---------------------------------------------------------------------

    def publish(self) -> PublishedWeights:
        """The present weights, whole on every rank, in the compute dtype."""
        if self.sharding == "none":
            return super().publish()
        reshard(self.reader)
        named = {n: whole(p).to(self.low or p.dtype) for n, p in self.reader.named().items()}
        return PublishedWeights(version=self.version, named=named)

    def moments(self) -> Float64[Tensor, "parameters 2"]:
        """As `TorchLearner.moments`, over the shards of all ranks, which all have to ask."""
        if self.sharding == "none":
            return super().moments()
        own = moments(own_shard(master.value()) for master in self.optimizer.masters.values())
        return self.world.add(own, "sums of the weights")

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, whole; with sharded weights all ranks call this."""
        reshard(self.reader)
        return {n: self._whole(p).to(self.low or p.dtype) for n, p in self._trainable().items()}

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor; of sharded ones, a card holds one at a time."""
        return whole(tensor).cpu() if self.sharding == "full" else whole(tensor)

    def set_trained(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the trained weights on all ranks by those that rank 0 was given."""
        reshard(self.reader)
        own = self._trainable()
        problem = None
        if self.world.leads and {n: w.shape for n, w in weights.items()} != {
            n: p.shape for n, p in own.items()
        }:
            problem = (
                "weights: belong to another model or adapter; resume with the settings of the "
                "run's config.json."
            )
        if (said := self.world.gather(problem, "rank 0 to check the checkpoint")[0]) is not None:
            raise RunError(said)
        self._take(weights if self.world.leads else None)

    def _take(self, weights: Mapping[str, Tensor] | None) -> None:
        """Set trained weights to those of rank 0."""
        own = self._trainable()
        sent = self.world.send(weights, "the weights of the checkpoint")
        self._set_values({name: own_part(tensor, own[name]) for name, tensor in sent})
        self.optimizer.reread()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights, with whole tensors: a checkpoint does not
        depend on the number of ranks that wrote it. With sharded weights all ranks call this."""
        for reader in (self.reader, self.frozen):
            if reader is not None:
                reshard(reader)
        state = _mapped(super().state(), self._whole)
        if self.low is not None:
            masters = {name: self._whole(p) for name, p in self._trainable().items()}
            state["optimizer"]["masters"] = masters
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the state back to that of a checkpoint, which rank 0 was given."""
        flat: dict[str, Tensor] = {}
        tree = _taken_apart(state, flat) if self.world.leads else None
        tree = self.world.gather(tree, "the state of the checkpoint")[0]
        parameters, names = self.optimizer.parameters, list(self.optimizer.parameters)
        # Offloaded masters stay on the CPU, and so do moments of split ones until they are set.
        stepped = {name: master.stepped for name, master in self.optimizer.masters.items()}
        found: dict[str, Tensor] = {}
        given = flat if self.world.leads else None
        for key, tensor in self.world.send(given, "the state of the checkpoint"):
            kind, *path = key.split("\n")  # "reference", name; or "optimizer", …, name, …
            owner = path[0] if kind == "reference" else path[1]
            owned = parameters if kind == "reference" else stepped
            like = owned.get(names[int(owner)] if owner.isdecimal() else owner)
            fits = like is not None and like.shape == tensor.shape
            found[key] = own_part(tensor, like) if like is not None and fits else tensor
        whole_state = _put_together(tree, found)
        if self.low is not None:
            self._set_values(whole_state["optimizer"]["masters"])
            whole_state["optimizer"]["masters"] = {}
        super().restore(whole_state)

    def save(self, path: str) -> None:
        """Model and tokenizer as a Hugging Face folder, written by rank 0; with sharded weights all
        ranks call this."""
        weights = None
        if self.sharding == "full":
            reshard(self.reader)
            # A tied weight has two names in the state and is written under the first.
            every = dict(self.model.named_parameters(remove_duplicate=False))
            tied = every.keys() - dict(self.model.named_parameters()).keys()
            state = self.model.state_dict()
            weights = {n: self._whole(each) for n, each in state.items() if n not in tied}
            if self.low is not None:
                weights = {name: each.to(self.low) for name, each in weights.items()}
        if self.world.leads:
            save_policy(self.policy, path, weights=weights)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor stood in a tree of plain values."""

    key: str


def _taken_apart(value: Any, flat: dict[str, Tensor], path: tuple[str, ...] = ()) -> Any:
    """The tree with places instead of tensors, which are collected in `flat`."""
    if isinstance(value, Tensor):
        key = "\n".join(path)
        flat[key] = value
        return _Place(key=key)
    if isinstance(value, Mapping):
        return {k: _taken_apart(inner, flat, (*path, str(k))) for k, inner in value.items()}
    return value


def _put_together(value: Any, flat: Mapping[str, Tensor]) -> Any:
    """The tree with its tensors."""
    if isinstance(value, _Place):
        return flat[value.key]
    if isinstance(value, Mapping):
        return {key: _put_together(inner, flat) for key, inner in value.items()}
    return value


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with a function applied to its tensors, in one order on every rank."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, function) for key, inner in value.items()}
    return value

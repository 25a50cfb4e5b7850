"""An algorithm as a row of functions, and the bound functions that a run calls."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise import extensions
from groupwise.algorithms.advantages import ADVANTAGES, penalised
from groupwise.algorithms.advantages.inputs import example_inputs
from groupwise.algorithms.filters import FILTERS
from groupwise.algorithms.losses import (
    CORRECTIONS,
    DIVERGENCES,
    RATIOS,
    SURROGATES,
    WEIGHTINGS,
    PolicyObjective,
)
from groupwise.errors import UsageError, suggest
from groupwise.registry import BoundFunction, FunctionSpec, Registry, spec

SLOTS: Mapping[str, Registry] = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "divergence": DIVERGENCES,
    "correction": CORRECTIONS,
    "weighting": WEIGHTINGS,
    "filter": FILTERS,
}
"""The slots of a row and what may fill them."""

OWN: Mapping[str, set[str]] = {
    "advantage": {"rms"},
    "divergence": {"coefficient", "in"},
    "entropy": {"coefficient"},
}
"""Settings of a slot that belong to the row, whatever function fills it."""

POLICY = "policy"
"""The learner whose weights the engine samples from."""
SECOND_LEARNERS: Mapping[str, str] = {"values": "critic", "token_scores": "token_reward"}
"""Inputs of advantages that a second learner computes, with its name, which is also that of its
section in a recipe."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One row of the table.

    Attributes:
        name: as users write it; `name@project` for the variant that a project ships.
        paper: where it comes from.
        advantage … filter: the function in each slot and the settings that differ from its own.
        advantage_rms: root mean square that the advantages of every batch are scaled to; None
            leaves them as they are.
        divergence_coefficient: β of the divergence, in `divergence_in`.
        divergence_in: as a term of the loss, or subtracted from the reward.
        entropy: coefficient of the entropy bonus.
        entropy_over: whether the bonus is weighted like the "loss", or is the mean entropy of the
            "tokens" of the optimizer step, whatever the weighting.
        differs: every known departure from the paper and from other projects of the same name.
    """

    name: str
    paper: str
    advantage: FunctionSpec
    advantage_rms: float | None = None
    ratio: FunctionSpec = spec("token")
    surrogate: FunctionSpec = spec("ppo_clip")
    divergence: FunctionSpec = spec("none")
    divergence_coefficient: float = 0.0
    divergence_in: Literal["loss", "reward"] = "loss"
    correction: FunctionSpec = spec("none")
    weighting: FunctionSpec = spec("batch_token_mean")
    filter: FunctionSpec = spec("all")
    entropy: float = 0.0
    entropy_over: Literal["loss", "tokens"] = "loss"
    differs: tuple[str, ...] = ()


class Algorithms:
    """The table: rows by name."""

    def __init__(self) -> None:
        self._rows: dict[str, Algorithm] = {}
        self._by_path: dict[str, Algorithm] = {}

    def register(self, row: Algorithm) -> Algorithm:
        """Add a row, after checking that its parts exist and accept its settings.

        Raises:
            UsageError: a name that is taken, an unknown function or a setting it does not accept.
        """
        if row.name in self._rows:
            raise UsageError(f"algorithm {row.name!r} is already registered; choose another name.")
        bind(row, where=row.name)
        self._rows[row.name] = row
        return row

    def names(self) -> list[str]:
        """Every registered name, in alphabetical order."""
        return sorted(self._rows)

    def get(self, name: str) -> Algorithm:
        """The row of that name, or the one that `path.py:NAME` names.

        Raises:
            UsageError: no such row.
        """
        if name not in self:
            raise UsageError(f"algorithm.name = {name!r}: no such row; {suggest(name, self._rows)}")
        return self._rows.get(name) or self._by_path[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._rows and isinstance(name, str):
            if extensions.names_code(name):
                self._by_path[name] = _row(extensions.resolve(name, kind="algorithm.name"), name)
            else:
                extensions.discover()
        return name in self._rows or name in self._by_path

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._rows)


def _row(found: Any, name: str) -> Algorithm:
    """What `path.py:NAME` names, which must be a row."""
    if not isinstance(found, Algorithm):
        raise UsageError(
            f"algorithm.name = {name!r}: must name a groupwise.algorithms.Algorithm; got "
            f"{type(found).__name__}. A function is named by its slot, such as "
            "algorithm.advantage.name."
        )
    bind(found, where=name)
    return found


ALGORITHMS = Algorithms()


@dataclass(frozen=True, kw_only=True)
class BoundAlgorithm:
    """An algorithm with every setting fixed: the functions that a run calls.

    Attributes:
        row: the algorithm's, with the overrides applied.
        objective: per-token loss from (outputs, batch).
        bound_advantage, bound_weighting, bound_filter: the functions behind the methods below.
    """

    row: Algorithm
    objective: PolicyObjective
    bound_advantage: BoundFunction
    bound_weighting: BoundFunction
    bound_filter: BoundFunction

    def advantage(self, data: Mapping[str, Any]) -> Float[Tensor, "prompt group *time"]:
        """Advantages of a batch of groups, 0 where not judged.

        Args:
            data: by the names of `groupwise.algorithms.advantages.INPUTS`; `rewards` always. With
                a divergence in the reward also `kl`: k1 per token [prompt, group, time], plain, and
                it is taken off here, token by token where the advantage takes `kl` itself.

        Raises:
            UsageError: the data lacks something that the algorithm needs.
        """
        advantages = self._unscaled(data)
        if self.row.advantage_rms is None:
            return advantages
        return scaled(advantages, data, rms=self.row.advantage_rms)

    def _unscaled(self, data: Mapping[str, Any]) -> Float[Tensor, "prompt group *time"]:
        beta = self.kl_in_reward
        if not beta:
            return self.bound_advantage({**data, "kl": None})
        if data.get("kl") is None:
            raise UsageError(
                f"{self.row.name}: subtracts its KL penalty from the reward and needs kl, "
                "which this run does not compute."
            )
        if "kl" in self.bound_advantage.inputs:
            return self.bound_advantage({**data, "kl": beta * data["kl"]})
        rewards = penalised(data["rewards"], data["kl"], data.get("mask"), coefficient=beta)
        return self.bound_advantage({**data, "rewards": rewards})

    def weighting(
        self, mask: Bool[Tensor, "batch time"], group: Int[Tensor, "batch"]
    ) -> Float[Tensor, "batch time"]:
        """The weight of every token in the loss of an optimizer step."""
        return self.bound_weighting({"mask": mask, "group": group})

    def filter(self, data: Mapping[str, Any]) -> Bool[Tensor, "prompt group"]:
        """Which completions the loss may use, from rewards, correct, valid and truncated."""
        return self.bound_filter(data)

    @property
    def kl_in_reward(self) -> float:
        """β of the KL penalty that is taken off the reward; 0 where there is none."""
        row = self.row
        return row.divergence_coefficient if row.divergence_in == "reward" else 0.0

    @property
    def needs(self) -> frozenset[str]:
        """What the loss reads (see `Objective.needs`), and "ref_logp" where the reward does."""
        in_reward = frozenset({"ref_logp"} if self.kl_in_reward else ())
        return self.objective.needs | in_reward

    @property
    def second_learner(self) -> str | None:
        """The learner beside the policy that its advantages need."""
        required = self.bound_advantage.required
        return next((name for data, name in SECOND_LEARNERS.items() if data in required), None)

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a row whose advantages are all 0 has exactly no gradient."""
        return self.objective.skips_zero_advantage

    @property
    def clip_band(self) -> tuple[float, float] | None:
        """Lowest and highest ratio at which the surrogate still has its full gradient."""
        chosen = self.row.surrogate
        if not getattr(SURROGATES.get(chosen.name), "clips_ratio", False):
            return None
        settings = settings_of(SURROGATES, chosen)
        return 1 - settings["low"], 1 + settings["high"]

    def log_ratio(
        self,
        logp: Float[Tensor, "batch time"],
        old_logp: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
    ) -> Float[Tensor, "batch time"]:
        """The log-ratio that the surrogate sees at every token."""
        return self.objective.ratio({"logp": logp, "old_logp": old_logp, "mask": mask})


def scaled(
    advantages: Float[Tensor, "prompt group *time"], data: Mapping[str, Any], *, rms: float
) -> Float[Tensor, "prompt group *time"]:
    """Advantages of a batch scaled to a root mean square over its judged completions.

        A' = A · rms / sqrt(mean(A²))

    Args:
        advantages: of the batch; those per token [prompt, group, time] count every token once.
        data: "valid" [prompt, group] and "mask" [prompt, group, time], where they are known.
        rms: positive.

    Returns:
        The scaled advantages; all 0 where all were 0.

    Example:
        >>> scaled(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), {}, rms=2.5)
        tensor([[3., 4.],
                [0., 0.]])

    Source: none; it makes algorithms that differ in the scale of their advantages comparable.
    """
    counted = torch.ones_like(advantages, dtype=torch.bool)
    if data.get("valid") is not None:
        counted &= data["valid"].view(*data["valid"].shape, *[1] * (advantages.ndim - 2))
    if advantages.ndim == 3 and data.get("mask") is not None:
        counted &= data["mask"]
    root = advantages[counted].double().square().mean().sqrt()
    return advantages * (rms / root).to(advantages) if root > 0 else advantages


def bind(
    algorithm: Algorithm | str,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    where: str = "algorithm",
) -> BoundAlgorithm:
    """The functions of an algorithm, with some settings changed.

    Args:
        algorithm: a row or its name.
        overrides: settings by slot, such as {"advantage": {"tau": 1.0}}. The key "name" puts
            another function into the slot and drops the row's settings of the old one.
            "advantage" also takes "rms", to which the advantages of every batch are scaled;
            "divergence" also takes "coefficient" and "in" ("loss" or "reward"); "entropy" takes
            "coefficient".
        where: start of the dotted path in messages.

    Raises:
        UsageError: an unknown slot, function or setting, a value of the wrong type or range, or
            parts that cannot work together.

    Example:
        >>> algorithm = bind("softrank", {"advantage": {"tau": 1.0}})
        >>> algorithm.advantage({"rewards": torch.tensor([[1.0, 0.0]])})
        tensor([[0.8808, 0.0000]])
    """
    row = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else algorithm
    row = _overridden(row, overrides or {}, where=where)
    _check(row, where=where)
    bound = {}
    for slot, registry in SLOTS.items():
        chosen = getattr(row, slot)
        if not isinstance(chosen.name, str) or chosen.name not in registry:
            known = suggest(str(chosen.name), registry)
            raise UsageError(f"{where}.{slot}.name = {chosen.name!r}: not registered; {known}")
        bound[slot] = registry.bind(_typed(registry, chosen), where=f"{where}.{slot}")
    bound_algorithm = BoundAlgorithm(
        row=row,
        objective=PolicyObjective(
            ratio=bound["ratio"],
            surrogate=bound["surrogate"],
            divergence=bound["divergence"],
            correction=bound["correction"],
            coefficient=row.divergence_coefficient if row.divergence_in == "loss" else 0.0,
            entropy=row.entropy,
            entropy_over=row.entropy_over,
        ),
        bound_advantage=bound["advantage"],
        bound_weighting=bound["weighting"],
        bound_filter=bound["filter"],
    )
    for slot, function in bound.items():
        _validate_by_call(slot, function, where=f"{where}.{slot}")
    return bound_algorithm


def _overridden(
    row: Algorithm, overrides: Mapping[str, Mapping[str, Any]], *, where: str
) -> Algorithm:
    """The row with the settings of some slots changed."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    for slot, changes in overrides.items():
        known = [*SLOTS, "entropy"]
        if slot not in known:
            raise UsageError(f"{where}.{slot}: no such slot; {suggest(slot, known)}")
        if not isinstance(changes, Mapping):
            raise UsageError(f"{where}.{slot} = {changes!r}: must be a table of settings.")
        changes = dict(changes)
        own = OWN.get(slot, set())
        for key in sorted(own & changes.keys()):
            field = "entropy" if slot == "entropy" else f"{slot}_{key}"
            values[field] = changes.pop(key)
        if slot == "entropy":
            if changes:
                key = next(iter(changes))
                known = suggest(key, ["coefficient"])
                raise UsageError(f"{where}.entropy.{key}: no such setting; {known}")
            continue
        before = values[slot]
        name = changes.pop("name", before.name)
        if slot == "divergence" and name == "none" and "coefficient" not in overrides[slot]:
            values["divergence_coefficient"] = 0.0
        kept = before.settings if name == before.name else {}
        values[slot] = FunctionSpec(name=name, settings={**kept, **changes})
    return Algorithm(**values)


def _check(row: Algorithm, *, where: str) -> None:
    """Refuse what cannot work together."""
    for path, value in {
        "divergence.coefficient": row.divergence_coefficient,
        "entropy.coefficient": row.entropy,
    }.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise UsageError(f"{where}.{path} = {value!r}: must be a number of at least 0.")
    rms = row.advantage_rms
    if rms is not None and (isinstance(rms, bool) or not isinstance(rms, int | float) or rms <= 0):
        raise UsageError(f"{where}.advantage.rms = {rms!r}: must be a positive number.")
    if row.divergence_in not in ("loss", "reward"):
        raise UsageError(
            f"{where}.divergence.in = {row.divergence_in!r}: must be 'loss' or 'reward'."
        )
    name, coefficient = row.divergence.name, row.divergence_coefficient
    if not coefficient:
        return
    if name == "none":
        raise UsageError(
            f"{where}.divergence.coefficient = {coefficient!r}: there is no divergence to weigh; "
            f"set {where}.divergence.name, for example to 'k3'."
        )
    if name == "k1" and row.divergence_in == "loss":
        raise UsageError(
            f"{where}.divergence.name = 'k1': its expected gradient in the loss is 0; "
            f"use 'k2' or 'k3', or {where}.divergence.in = 'reward'."
        )
    if name != "k1" and row.divergence_in == "reward":
        raise UsageError(
            f"{where}.divergence.name = {name!r}: only 'k1' gives the gradient of the KL "
            f"divergence inside the reward; use it, or {where}.divergence.in = 'loss'."
        )


def _typed(registry: Registry, chosen: FunctionSpec) -> FunctionSpec:
    """The part with whole numbers turned into floats where the function takes floats."""
    if chosen.name not in registry:
        return chosen
    hints = typing.get_type_hints(registry.get(chosen.name))
    settings = {
        key: float(value) if hints.get(key) is float and type(value) is int else value
        for key, value in chosen.settings.items()
    }
    return FunctionSpec(name=chosen.name, settings=settings)


def _validate_by_call(slot: str, function: BoundFunction, *, where: str) -> None:
    """Call a function on a small made-up batch: a setting out of range is refused at load."""
    settings = settings_of(SLOTS[slot], function.spec)
    size = 1 + max(3, settings.get("k", 0))
    grid = torch.zeros(size, 1)
    data: dict[str, Any] = {
        name: grid
        for name in ("logp", "old_logp", "ref_logp", "sampler_logp", "log_ratio", "advantage")
    } | {"mask": grid == 0, "group": torch.zeros(size, dtype=torch.long)}
    if slot in ("advantage", "filter"):
        data = example_inputs(size, settings)
    try:
        function(data)
    except UsageError as error:
        raise UsageError(f"{where}.{error}") from None


def settings_of(registry: Registry, chosen: FunctionSpec) -> dict[str, Any]:
    """Every setting of a part, defaults included."""
    defaults = {key: p.default for key, p in registry.settings(chosen.name).items()}
    return {**defaults, **chosen.settings}

"""Advantages of groupwise inside TRL's own trainer, and inside tools that patch that trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.advantages import ADVANTAGES
from groupwise.errors import UsageError
from groupwise.registry import BoundFunction, FunctionSpec

T = TypeVar("T", bound=type)

KNOWN = frozenset({"rewards", "valid", "parts", "lengths"})
"""The data that an advantage can receive there: rewards and lengths, but no probabilities."""
METHODS = ("_calculate_rewards", "_generate_and_score_completions")


def with_advantage(trainer: T, name: str, **settings: Any) -> T:
    """A subclass of TRL's `GRPOTrainer`, or of one of its subclasses, with another advantage.

        A = advantage(Σ_k weight_k · reward_k),   one row per prompt

    It replaces the advantages that TRL computes, and those that it logs, whatever `scale_rewards`
    says; loss, generation and every other metric stay TRL's own. `reward_std` and
    `frac_reward_zero_std` still describe the rewards.

    Args:
        trainer: `trl.GRPOTrainer`; under Unsloth the class as it is after `import unsloth`.
        name: a registered advantage, such as "softrank".
        settings: its settings, such as `tau=0.5`.

    Returns:
        A subclass that is used like the class itself.

    Raises:
        UsageError: no such advantage or setting, an advantage that needs more than rewards and
            lengths, or a class that is not built like TRL's.

    Source: TRL 1.16, which has no hook for advantages: the two methods replaced here are private.
    """
    bound = ADVANTAGES.bind(FunctionSpec(name=name, settings=settings), where="advantage")
    beyond = sorted(bound.required - KNOWN)
    if beyond:
        raise UsageError(
            f"advantage = {name!r}: needs {', '.join(beyond)}, which TRL's trainer does not have; "
            "use groupwise.train for it."
        )
    missing = [method for method in METHODS if not hasattr(trainer, method)]
    if missing:
        raise UsageError(
            f"trainer = {trainer.__name__}: has no method {missing[0]}, so it is not a GRPOTrainer "
            "of TRL 1.16; pass trl.GRPOTrainer."
        )
    methods = {
        "__doc__": f"{trainer.__name__} with the advantages {bound.spec}.",
        "__module__": __name__,
        "_calculate_rewards": _remembering(trainer),
        "_generate_and_score_completions": _replacing(trainer, bound),
    }
    return type(f"{trainer.__name__}With{name.title().replace('_', '')}", (trainer,), methods)  # pyright: ignore[reportReturnType]


def _remembering(trainer: type) -> Any:
    def calculate_rewards(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._groupwise_rewards = trainer._calculate_rewards(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return self._groupwise_rewards

    return calculate_rewards


def _replacing(trainer: type, bound: BoundFunction) -> Any:
    def generate_and_score(self: Any, inputs: Sequence[Any]) -> dict[str, Any]:
        output = trainer._generate_and_score_completions(self, inputs)  # pyright: ignore[reportAttributeAccessIssue]
        group = self.num_generations if self.model.training else self.num_generations_eval
        if group < 2:
            return output
        lengths = self.accelerator.gather(output["completion_mask"].sum(-1))
        advantages = group_advantages(
            bound,
            self._groupwise_rewards,
            self.reward_weights,
            names=self.reward_func_names,
            lengths=lengths,
            group=group,
        ).to(output["advantages"])
        own = len(output["advantages"])
        start = self.accelerator.process_index * own
        output["advantages"] = advantages[start : start + own]
        _relog(self._logs["advantages"], advantages)
        return output

    return generate_and_score


def group_advantages(
    bound: BoundFunction,
    rewards: Float[Tensor, "batch functions"],
    weights: Float[Tensor, "functions"],
    *,
    names: Sequence[str],
    lengths: Float[Tensor, "batch"] | Any,
    group: int,
) -> Float[Tensor, "batch"]:
    """The advantages of TRL's table of rewards: one row per completion, one column per function.

    Args:
        bound: the advantage.
        rewards: NaN where a function returned None for a completion.
        weights: of the functions.
        names: of the functions; two of one name count as two parts.
        lengths: tokens of the completions.
        group: completions per prompt, which are neighbours.

    Returns:
        One advantage per row; 0 for completions for which every function returned None.
    """
    judged: Bool[Tensor, "batch"] = ~torch.isnan(rewards).all(-1)
    total = (rewards * weights.to(rewards)).nansum(-1)
    labels = [f"{name}#{i}" if name in names[:i] else name for i, name in enumerate(names)]
    data: Mapping[str, Any] = {
        "rewards": total.view(-1, group),
        "valid": judged.view(-1, group),
        "parts": {label: rewards[:, i].view(-1, group) for i, label in enumerate(labels)},
        "lengths": lengths.view(-1, group),
    }
    return bound(data).flatten()


def _relog(logged: Any, advantages: Float[Tensor, "batch"]) -> None:
    """Replace the advantages that TRL has just logged; its log has a maximum length."""
    for _ in range(min(len(logged), len(advantages))):
        logged.pop()
    logged.extend(advantages.tolist())

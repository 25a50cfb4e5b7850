"""The data that an advantage may ask for: how a run computes it, and an example of it.

A new name needs only one entry: the registry of advantages takes its vocabulary from here,
the trainer computes what is asked for, and settings are validated by a call on the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.types import Batch, ScoredGroups


@dataclass(frozen=True, kw_only=True)
class AdvantageInput:
    """One name of the vocabulary.

    Attributes:
        meaning: shape and meaning.
        compute: its value from scored groups and their sequences; None where a run has none.
        example: its value for one group of the given size, whose rewards alternate between 0 and 1,
            with the settings of the function that asks for it.
    """

    meaning: str
    compute: Callable[[ScoredGroups, Batch], Any]
    example: Callable[[int, Mapping[str, Any]], Any]


def advantage_inputs(scored: ScoredGroups, batch: Batch) -> dict[str, Any]:
    """Every input by name, as [prompt, group] or [prompt, group, time].

    Args:
        batch: one row per completion, in the order of the groups.
    """
    return {name: entry.compute(scored, batch) for name, entry in INPUTS.items()}


def example_inputs(size: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An example of every input, for a group of `size` completions of one token."""
    return {name: entry.example(size, settings) for name, entry in INPUTS.items()}


def _written(scored: ScoredGroups, batch: Batch) -> Tensor:
    """From the completions: the mask of the batch leaves out rows that a filter excludes."""
    return torch.tensor([[sum(c.mask) for c in g.completions] for g in scored.groups])


def _truncated(scored: ScoredGroups, batch: Batch) -> Tensor:
    return torch.tensor([[c.finish == "length" for c in g.completions] for g in scored.groups])


def _kl(scored: ScoredGroups, batch: Batch) -> Tensor | None:
    if batch.ref_logp is None or batch.old_logp is None:
        return None
    return _grouped(torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0), scored)


def _column(name: str) -> Callable[[ScoredGroups, Batch], Tensor | None]:
    def compute(scored: ScoredGroups, batch: Batch) -> Tensor | None:
        column = batch.columns.get(name)
        return None if column is None else _grouped(column, scored)

    return compute


def _grouped(rows: Tensor, scored: ScoredGroups) -> Tensor:
    return rows.view(*scored.scores.total.shape, *rows.shape[1:])


def _rewards(size: int, settings: Mapping[str, Any]) -> Tensor:
    return torch.arange(size, dtype=torch.float32)[None] % 2


def _parts(size: int, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict.fromkeys(["total", *(settings.get("weights") or {})], _rewards(size, settings))


def _zeros(size: int, settings: Mapping[str, Any]) -> Tensor:
    return torch.zeros(1, size, 1)


INPUTS: Mapping[str, AdvantageInput] = {
    "rewards": AdvantageInput(
        meaning="[prompt, group] the reward that trains",
        compute=lambda scored, batch: scored.scores.total,
        example=_rewards,
    ),
    "valid": AdvantageInput(
        meaning="[prompt, group] judged; None: every reward that is not NaN",
        compute=lambda scored, batch: scored.scores.valid,
        example=lambda size, settings: torch.ones(1, size, dtype=torch.bool),
    ),
    "correct": AdvantageInput(
        meaning="[prompt, group] raw correctness, NaN where not defined",
        compute=lambda scored, batch: scored.scores.correct,
        example=_rewards,
    ),
    "parts": AdvantageInput(
        meaning="name -> [prompt, group] the parts of the reward, NaN where one did not apply",
        compute=lambda scored, batch: scored.scores.parts,
        example=_parts,
    ),
    "lengths": AdvantageInput(
        meaning="[prompt, group] number of tokens that the policy wrote",
        compute=_written,
        example=lambda size, settings: torch.ones(1, size, dtype=torch.long),
    ),
    "truncated": AdvantageInput(
        meaning="[prompt, group] True where a completion ran out of tokens",
        compute=_truncated,
        example=lambda size, settings: _rewards(size, settings) > 0,
    ),
    "mask": AdvantageInput(
        meaning="[prompt, group, time] True where the policy wrote the token",
        compute=lambda scored, batch: _grouped(batch.mask, scored),
        example=lambda size, settings: torch.ones(1, size, 1, dtype=torch.bool),
    ),
    "kl": AdvantageInput(
        meaning="[prompt, group, time] a penalty per token, already multiplied by its coefficient",
        compute=_kl,
        example=_zeros,
    ),
    "values": AdvantageInput(
        meaning="[prompt, group, time] expected return before the token, from a critic",
        compute=_column("values"),
        example=_zeros,
    ),
    "teacher_gap": AdvantageInput(
        meaning="[prompt, group, time] log-probability under a teacher minus under the policy",
        compute=_column("teacher_gap"),
        example=_zeros,
    ),
    "step_rewards": AdvantageInput(
        meaning="[prompt, group, time] reward of each step at its last token, NaN elsewhere",
        compute=_column("step_rewards"),
        example=lambda size, settings: _rewards(size, settings)[..., None],
    ),
    "token_scores": AdvantageInput(
        meaning="[prompt, group, time] logits of a token reward model, before each token",
        compute=_column("token_scores"),
        example=_zeros,
    ),
    "bootstrap": AdvantageInput(
        meaning="[prompt, group] expected return after a truncated completion, from a critic",
        compute=_column("bootstrap"),
        example=lambda size, settings: torch.zeros(1, size),
    ),
}
"""The vocabulary of advantages."""

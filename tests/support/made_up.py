"""Scored groups made up by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from groupwise.types import Completion, Group, Prompt, ScoredGroups, Scores, Status


def one_group(
    parts: Mapping[str, list[float]],
    tokens: Sequence[list[int]],
    *,
    texts: Sequence[str] | None = None,
) -> ScoredGroups:
    """One prompt "a" with a completion per list of tokens; the total is the sum of the parts."""
    count = len(tokens)
    completions = tuple(
        Completion(tokens=t, mask=[True] * len(t), logprobs=[0.0] * len(t), text=x, finish="stop")
        for t, x in zip(tokens, texts or [""] * count, strict=True)
    )
    group = Group(prompt=Prompt(id="a"), prompt_tokens=[1], completions=completions)
    table = {name: torch.tensor([values]) for name, values in parts.items()}
    total = torch.stack(list(table.values())).sum(0)
    scores = Scores(
        total=total,
        correct=torch.full((1, count), float("nan")),
        parts=table,
        status=((Status.OK,) * count,),
        valid=torch.ones(1, count, dtype=torch.bool),
    )
    keep = torch.ones(1, count, dtype=torch.bool)
    return ScoredGroups(groups=(group,), scores=scores, keep=keep, drawn=1)

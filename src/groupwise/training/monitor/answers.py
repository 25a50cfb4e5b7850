"""Metrics of a step by what its answers are: right or wrong, with reflection or without."""

from __future__ import annotations

import math

import torch

from groupwise.evaluation.reflection import is_reflective
from groupwise.types import Metrics, ScoredGroups


def answer_metrics(scored: ScoredGroups) -> Metrics:
    """Lengths of right and wrong answers, and how often and how well answers reflect.

    Returns:
        Over judged completions whose correctness is known: "length_right" and "length_wrong", mean
        own tokens; "accuracy_reflective" and "accuracy_plain", the accuracy of answers with and
        without reflection. Over all completions: "reflective_share". A metric over nothing is
        absent, and accuracies are given only where some answers reflect and others do not.

    Source: Dr. GRPO (2503.20783), on long wrong answers and on reflection.
    Elsewhere: reflection is usually counted by a list of words as well; lists differ, so shares of
        different projects cannot be compared.
    """
    written = torch.tensor([[c.own_tokens for c in group.completions] for group in scored.groups])
    reflective = torch.tensor(
        [[is_reflective(c.own_text) for c in group.completions] for group in scored.groups]
    )
    scores = scored.scores
    known = scores.valid & ~torch.isnan(scores.correct)
    right = scores.correct >= 1
    found: Metrics = {"reflective_share": _mean(reflective.double())}
    for name, chosen in (("length_right", known & right), ("length_wrong", known & ~right)):
        found[name] = _mean(written[chosen].double())
    if (reflective & known).any() and (~reflective & known).any():
        found["accuracy_reflective"] = _mean(scores.correct[known & reflective].double())
        found["accuracy_plain"] = _mean(scores.correct[known & ~reflective].double())
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan

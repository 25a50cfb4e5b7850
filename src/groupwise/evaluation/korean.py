"""The published score of the Korean orthography task, from the components of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from groupwise.evaluation.intervals import Estimate, prompt_mean
from groupwise.rewards.builtin.korean import split_answer
from groupwise.rewards.builtin.text import final_answer
from groupwise.types import Group, Prompt

EXACT = "korean_exact_match"
PICK = "context_pick"
SIMILARITIES = {
    "korean_reason": "ROUGE-1",
    "korean_reason_bertscore": "BERTScore",
    "korean_reason_bleurt": "BLEURT",
}
"""Rewards that compare reasons, by the similarity of the published score that they compute."""


def korean_figures(
    groups: Sequence[Group], parts: Mapping[str, np.ndarray], prompts: Sequence[Prompt]
) -> dict[str, Estimate]:
    """The published score of one answer per question, and what it consists of.

    score = (exact match + mean of the similarities of reasons)/2

    Args:
        groups: one answer to each prompt.
        parts: values of the rewards by name, [prompt, 1].
        prompts: with the references.

    Returns:
        Nothing where the recipe has no `korean_exact_match` or no similarity. Otherwise
        `korean_exact`, each similarity by its reward's name, and `korean_score`, which is called
        `official_score` where all three similarities are there. As published, a similarity is a
        mean over the answers that give a reason where the reference has one, so that leaving out
        hard reasons raises it; `reasons_given` says how many do. Intervals are a bootstrap over
        questions in which the number of such answers is fixed. With the reward `context_pick`, its
        mean over the questions whose right candidate is known.

    Source: the competition's `evaluation.py`.
    """
    known = [name for name in SIMILARITIES if name in parts]
    if EXACT not in parts or not known:
        return {}
    exact = parts[EXACT][:, 0]
    given = np.array(
        [
            bool(prompt.answer)
            and bool(split_answer(str(prompt.answer))[1])
            and bool(split_answer(final_answer(group.completions[0].text) or "")[1])
            for group, prompt in zip(groups, prompts, strict=True)
        ]
    )
    judged = ~np.isnan(exact)
    if not judged.any():
        return {}
    figures = {"korean_exact": prompt_mean(exact[judged])}
    compared = judged & given
    similarity = np.zeros(len(exact))
    for name in known:
        values = parts[name][:, 0]
        if compared.any():
            figures[name] = prompt_mean(values[compared])
        similarity += np.where(compared, np.nan_to_num(values), 0.0) / len(known)
    scale = judged.sum() / max(int(compared.sum()), 1)
    score = prompt_mean((exact[judged] + scale * similarity[judged]) / 2)
    whole = len(known) == len(SIMILARITIES)
    figures["official_score" if whole else "korean_score"] = score
    figures["reasons_given"] = prompt_mean(given[judged].astype(float))
    if PICK in parts and (known_rule := ~np.isnan(parts[PICK][:, 0])).any():
        figures[PICK] = prompt_mean(parts[PICK][known_rule, 0])
    return figures

"""The published Korean score of a measurement, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.evaluation.korean import korean_figures
from groupwise.types import Completion, Group, Prompt

TEXTS = ['"가을"이 옳다. 까닭', '"가을"이 옳다', '"봄"이 옳다. 다른 까닭', '"봄"이 옳다. 까닭']
ANSWERS = ['"가을"이 옳다. 까닭'] * 3 + ['"봄"이 옳다']


def figures(**parts: list[float]) -> dict[str, float]:
    prompts = [Prompt(id=str(n), text="?", answer=answer) for n, answer in enumerate(ANSWERS)]
    groups = [
        Group(
            prompt=prompt,
            prompt_tokens=[1],
            completions=(
                Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop"),
            ),
        )
        for prompt, text in zip(prompts, TEXTS, strict=True)
    ]
    values = {name: np.array(each)[:, None] for name, each in parts.items()}
    return {name: each.value for name, each in korean_figures(groups, values, prompts).items()}


def test_reasons_count_only_where_both_sides_give_one() -> None:
    nan = float("nan")
    found = figures(
        korean_exact_match=[1, 1, 0, 1],
        korean_reason=[1.0, 0.0, 0.5, nan],
        korean_reason_bertscore=[0.9, 0.0, 0.7, nan],
        korean_reason_bleurt=[0.8, 0.0, 0.2, nan],
    )
    assert found["korean_reason"] == 0.75 and found["korean_reason_bleurt"] == 0.5
    assert found["reasons_given"] == 0.5
    wanted = (0.75 + (0.75 + 0.8 + 0.5) / 3) / 2  # (EM + (ROUGE-1 + BERTScore + BLEURT)/3)/2
    assert found["official_score"] == pytest.approx(wanted)


def test_without_all_similarities_the_score_is_not_the_official_one() -> None:
    found = figures(korean_exact_match=[1, 1, 0, 1], korean_reason=[1.0, 0.0, 0.5, 0.0])
    assert found["korean_score"] == pytest.approx((0.75 + 0.75) / 2)
    assert "official_score" not in found
    assert figures(korean_exact_match=[1, 1, 0, 1]) == {}


def test_picks_count_where_the_right_candidate_is_known() -> None:
    nan = float("nan")
    given = {"korean_exact_match": [1, 1, 0, 1], "korean_reason": [1.0, 0.0, 0.5, 0.0]}
    assert figures(**given, context_pick=[1, 0, nan, 1])["context_pick"] == pytest.approx(2 / 3)
    assert "context_pick" not in figures(**given, context_pick=[nan] * 4)

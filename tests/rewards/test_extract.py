"""Where the answer of a completion is found."""

from __future__ import annotations

import pytest

from groupwise.errors import UsageError
from groupwise.rewards import extract_answer


@pytest.mark.parametrize(
    "style, text, answer",
    [
        ("boxed", r"first \boxed{1}, no: \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        ("boxed", r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        ("boxed", r"\boxed{-2} and \boxed{1}", "-2, 1"),
        ("boxed", r"\boxed{4}. Let me check. \boxed{5}", "5"),
        ("boxed", r"\boxed{5} and \boxed{5}", "5"),
        ("boxed", r"\boxed{28}\%", "28%"),
        ("boxed", r"\boxed 7", "7"),
        ("boxed", r"\boxed{7", None),
        ("boxed", "7", None),
        ("boxed", "", None),
        ("answer_tag", "<answer> 1 </answer><answer>\n2\n</answer> 3", "2"),
        ("answer_tag", "<answer>2", None),
        ("answer_tag", "2</answer>", None),
        ("answer_tag", "<think><answer>1</answer></think> none", None),
        ("gsm8k", "so 5 + 5 = 10\n#### 1,010\nbye", "1,010"),
        ("gsm8k", "#### 1 #### 2", "2"),
        ("gsm8k", "10", None),
        ("last_number", "3 apples cost $1,250.50.", "1250.50"),
        ("last_number", "Therefore the answer is -3", "-3"),
        ("last_number", "it is 7-3", "3"),
        ("last_number", "10 x 5 = 50", "50"),
        ("last_number", "the share is 3/4 of it", "3/4"),
        ("last_number", "about .5", ".5"),
        ("last_number", "none at all", None),
        ("choice", "The answer is (C).", "C"),
        ("choice", "A) 1 B) 2; I take B", "B"),
        ("choice", r"\boxed{\text{D}}", "D"),
        ("choice", "<answer>e) five</answer>", "E"),
        ("choice", "none of them", None),
        ("auto", "<answer>5</answer> or 7", "5"),
        ("auto", r"\boxed{5} or 7", "5"),
        ("auto", "6 then #### 5", "5"),
        ("auto", "The answer is 5. It took 3 steps", "5"),
        ("auto", r"Hence $x = \frac{1}{2}$ holds.", r"x = \frac{1}{2}"),
        ("auto", "<think>7 or 8</think>It is 4 4/9.", "4 4/9"),
        ("auto", "a rise of 20%", "20%"),
        ("auto", "nothing", None),
        ("auto", "", None),
    ],
)
def test_styles(style: str, text: str, answer: str | None) -> None:
    assert extract_answer(text, style=style) == answer


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean boxed"):
        extract_answer("1", style="box")  # type: ignore[arg-type]


def test_long_texts_are_searched_from_the_end() -> None:
    assert extract_answer("1 " * 200_000 + r"\boxed{2}") == "2"
    assert extract_answer("{" * 200_000, style="boxed") is None

"""Where the answer of a completion is found."""

from __future__ import annotations

import time

import pytest

from groupwise.errors import UsageError
from groupwise.rewards import extract_answer, math_equal
from groupwise.rewards.math.reward import exact_answer


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


@pytest.mark.parametrize(
    ("text", "found"),
    [("총99개", "99"), ("정답은42", "42"), ("정답은-3이다", "-3"), ("合計は12個です", "12"),
     ("答案是7。", "7"), ("3일-5일", "5"), ("모두 1,234명이다.", "1234"), ("답:3/4", "3/4"),
     ("答案是-5", "-5"), ("答案為−5", "-5"), ("答えは-5です", "-5"), ("2x等于-5", "-5"),
     ("正答は3日-5日", "5"), ("答案是3-5", "5"), ("3月-5月", "5"),
     ("정답은.5", ".5"), ("약.5", ".5"), ("정답은-.5", "-.5"), ("끝이다.5", None), ("계약.5", None),
     ("é5", None), ("a1", None), ("v1.2.3", None)],
)  # fmt: skip
def test_a_number_may_follow_hangul_and_cjk_letters(text: str, found: str | None) -> None:
    assert extract_answer(text, style="last_number") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("정답은 5이고 6이 아니다", "5"), ("정답은 5지 6개가 아니다.", "5"), ("5가 아니라 6이다", "6"),
     ("정답은 1도 아니고 2도 아닌 3이다", "3"), ("정답은 5이고 -1.5가 아닙니다", "5"),
     ("정답은 $5$이고 $6$이 아니다", "5"), ("정답은 5%이고 6%가 아니다", "5%"),
     ("答案是$5$，不是$6$", "5"),
     ("5であり6ではない", "5"), ("5であり、6ではありません。", "5"), ("答案是5，不是6", "5"),
     ("答案是5而不是6。", "5"), ("答案不是6而是5", "5"),
     ("6이 아니다", "6"), ("12는 소수가 아니다", "12"), ("5 아니면 6", "6"),
     ("정답은 6이 아닐까?", "6"), ("정답은 6이 아닌가 싶다", "6"), ("5、6ではないか", "6"),
     ("是5还是6？是不是6", "6")],
)  # fmt: skip
def test_a_denied_alternative_is_left_out_in_korean_chinese_and_japanese(
    text: str, found: str
) -> None:
    assert extract_answer(text, style="auto") == found
    assert extract_answer(text, style="last_number") == found.rstrip("%")


def test_a_negative_answer_does_not_earn_the_reward_of_its_opposite() -> None:
    assert exact_answer("答案是-5", "5", style="last_number") == 0.0
    assert exact_answer("答案是-5", "-5", style="last_number") == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [("99", "총 99개", True), ("99개", "99", True), ("1,234", "1,234명", True),
     ("99", "98개", False), ("3시간", "3분", False), ("3시간", "3시간", True),
     ("0.5", "0.5개", True), ("12", "12個。", True), ("12", "12만", False), ("3", "3억원", False)],
)  # fmt: skip
def test_a_counter_behind_a_number_is_left_out_unless_both_have_one(
    gold: str, answer: str, equal: bool
) -> None:
    assert math_equal(gold, answer) is equal


@pytest.mark.parametrize(
    ("style", "text", "answer"),
    [
        ("auto", "It is .5", ".5"),
        ("auto", "The answer is .5", ".5"),
        ("auto", "The answer is: **.5**.", ".5"),
        ("auto", r"The answer is \sqrt{2}.", r"\sqrt{2}"),
        ("auto", r"So we get 3\sqrt{2} cm", r"3\sqrt{2}"),
        ("auto", r"The answer is \frac{1}{\sqrt{3}}.", r"\frac{1}{\sqrt{3}}"),
        ("auto", r"It is -\dfrac{1}{2}", r"-\dfrac{1}{2}"),
        ("last_number", "the answer is −5", "-5"),
        ("auto", "so x is −5.", "-5"),
        ("auto", "The result is 2^10.", "2^10"),
        ("auto", "정답은2^10이다", "2^10"),
        ("auto", "答案是-√2。", "-√2"),
        ("auto", r"答案是\frac{1}{2}", r"\frac{1}{2}"),
        ("auto", "3일-5^2", "5^2"),
        ("auto", "So we get (1, 2).", "(1, 2)"),
        ("auto", "the point (−1, 2) works", "(-1, 2)"),
        ("auto", "Thus √2", "√2"),
        ("auto", "it equals 3√2.", "3√2"),
        ("auto", "it equals sqrt(2)/2", "sqrt(2)/2"),
        ("auto", "The answer is 2√3 cm", "2√3"),
        ("auto", "The answer is (3, 4)", "(3, 4)"),
        ("auto", "The answer is 5, not 6.", "5"),
        ("auto", "It is 5, not 6", "5"),
        ("last_number", "It is 5, not 6.", "5"),
        ("auto", "It is not 6 but 5.", "5"),
        ("auto", "It is 5 rather than 6.", "5"),
        ("auto", "it is not 5.", "5"),
        ("last_number", "There are 3 apples, not 4.5 apples", "3"),
        ("choice", "I think the answer is B", "B"),
        ("choice", "B, I think", "B"),
        ("choice", "정답은 B입니다.", "B"),
        ("choice", "정답은B", "B"),
        ("choice", "따라서 A입니다", "A"),
        ("choice", "答案是C。", "C"),
        ("choice", "답은 D이다", "D"),
        ("choice", "B형 간염", None),
        ("choice", "The answer I found is B", "B"),
        ("choice", "I choose B, not C.", "B"),
        ("choice", "The answer is A because I said so", "A"),
        ("choice", "The answer is I.", "I"),
        ("choice", "(I)", "I"),
        ("choice", "So I think it must be (D), I am sure", "D"),
        ("choice", "A good reason is given. C", "C"),
        ("choice", "A", "A"),
        ("choice", "A.", "A"),
        ("choice", "I", "I"),
        ("choice", "answer: b", "B"),
        ("choice", "The answer is a mystery", None),
        ("choice", "The answer is I think C", "C"),
        ("choice", "Answer: A", "A"),
        ("choice", "option A is right", "A"),
        ("choice", "It's A and not B", "A"),
        ("auto", "```python\nprint(42)\n```", None),
        ("last_number", "```python\nx=1\nprint(42)\n```", None),
        ("auto", "def f():\n    return 3", None),
        ("auto", "The answer is:\n```\n42\n```", "42"),
        ("last_number", "The answer is:\n```\n42\n```", "42"),
        ("auto", "```python\nprint(42)\n```\nThe answer is 7", "7"),
        ("auto", "```python\nprint(42)\n```\nIt prints 42", "42"),
        ("auto", "10^-3", "10^-3"),
        ("auto", "3 × 10^8 m", "3 × 10^8"),
        ("auto", "10⁻³", "10⁻³"),
        ("auto", "2(3) = 6", "6"),
        ("auto", "f(2, 3) = 7", "7"),
        ("auto", "It cost $5 million.", "$5 million"),
        ("last_number", "It cost $5 million.", "5 million"),
        ("auto", "The answer is 5 Million people.", "5 Million"),
        ("auto", r"\boxed{5} million", "5 million"),
        ("auto", r"It is $x = 5$ hundred thousand", "x = 5 hundred thousand"),
        ("last_number", r"It is $5\text{ million}$", "5 million"),
        ("last_number", "It costs 5 hundred-dollar bills", "5"),
        ("last_number", "There are 2 millionaires", "2"),
        ("last_number", "It rose by 20%", "20"),
    ],
)
def test_answers_without_tags(style: str, text: str, answer: str | None) -> None:
    assert extract_answer(text, style=style) == answer


PROGRAMS = [
    "#include <stdio.h>\n# 42",
    "def f():\n    return 42",
    "return 42",
    "return a * 42;",
    "console.log(42)",
    'printf("%d", 42)',
    "System.out.println(42);",
    "std::cout << 42;",
    "int x = 42;",
    "echo 42",
    "SELECT 42",
    "SELECT 42;",
    "assert f(1) == 42",
    "x = [1,2,3]\nx[0] = 42",
    "x = 1\nprint(x)\ny = 42",
    "x = 1\nprint(x)  # 42",
    "x = 1\nprint(x)\n# 42",
    "```python\nx = 42\n```",
    "```Python3.11\nx = 42\n```",
    "~~~js\nx = 42\n~~~",
    "```python\nx = [1,2,3]\nx[0] = 42\n```",
    "```cpp\nreturn 42;\n```",
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_a_program_does_not_earn_the_reward_of_its_last_number(text: str) -> None:
    for style in ("auto", "last_number"):
        assert extract_answer(text, style=style) is None
        assert extract_answer(f"{text}\nThe answer is 42.", style=style) == "42"
    assert exact_answer(f"<answer>{text}</answer>", "42") == 0.0
    for said in ("This gives 7 in the end.", "7", "Result: 7", "-7 + 14 is 7"):
        assert extract_answer(f"{text}\n{said}", style="last_number") == "7"


@pytest.mark.parametrize(
    "text",
    [
        "x = 42", "x == 42", "x = 42;", "```text\n42\n```", "```latex\nx = 42\n```", "E[X] = 42",
        "```\nx = 42\n```", "The answer is:\n```python\n42\n```", "They\nreturn 42.", "a[10] = 42",
        "They\nreturn 42 books", "return\n42", "return to 42", "return x = 42", "f(x) = 42",
        "We print out 42", "So a and b,\nboth prime, sum = 42", "Let f(x) = 2x.\nf(21) = 42",
        "Thus, x = 42", "Thus, x = 5, so y = 42", "Hence, x, y = 1, 42", "a, b = 1, 42",
        "x = 1\ny = 42", "We select 42", "They assert that x = 42", "assert x = 42", "int x = 42",
        "let us say x = 42", "X = {1, 2}\nP(X[1]) = 42", "x = [1, 2]\nthen x + 1 = 42",
    ],
)  # fmt: skip
def test_sentences_and_equations_are_no_programs(text: str) -> None:
    for style in ("auto", "last_number"):
        assert extract_answer(text, style=style) == "42"


@pytest.mark.parametrize(
    "piece",
    [
        "not ",
        "1 ",
        "√(",
        "(1,",
        "```\n",
        "1^",
        "answer ",
        "1*",
        r"\frac{",
        r"\sqrt{{",
        r"\frac{1}{",
        "~~~~",
        "```\nx\n",
        " not 5",
        "A ",
        " ",
        "6이 ",
        "不是6",
        "5 million ",
        "return a",
        "x = [\n",
        "assert ",
    ],
)
def test_extraction_takes_time_in_proportion_to_the_text(piece: str) -> None:
    start = time.perf_counter()
    for style in ("auto", "last_number", "choice"):
        extract_answer(piece * (20_000 // len(piece)), style=style)
    assert time.perf_counter() - start < 10  # quadratic patterns take half a minute

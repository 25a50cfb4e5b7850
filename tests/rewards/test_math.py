"""Mathematical equality: what must be accepted, what must not, and what must never run."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_folder import data_file
from groupwise.rewards import extract_answer, math_equal
from groupwise.rewards.math.reward import exact_answer

SAME = [
    ("58 square units", "58"),
    ("4 square meters", "4 m^2"),
    ("C", "C. x = 42"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{\sqrt{3}}{3} \approx 0.577"),
    ("11z^{17}(5+11z^{17})", "11z^17(11z^17+5)"),
    ("10 - 10*i**2", "20"),
    (r"1\leq|z|\leq \frac{3}{2}", r"[-\frac{3}{2}, -1] \cup [1, \frac{3}{2}]"),
    ("AB=4,CD=5", "4, 5"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
    (r"\frac{1}{2}", "0.5"),
    (r"50\%", "1/2"),
    ("50%", "50"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x=5", "5"),
    ("(1,2)", "(1, 2)"),
    (r"(-\infty,3]", r"(-\infty, 3]"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90 degrees"),
    (r"90^\circ", r"90\degree"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}", "5 cm"),
    (r"5\text{ cm}", "50 mm"),
    (r"\dfrac{3}{4}", "3/4"),
    (r"\frac34", "0.75"),
    (r"1\frac{1}{2}", "3/2"),
    ("1 1/2", "1.5"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    (r"1,\!000", "1000"),
    (r"1.5\times10^3", "1500"),
    ("1.5e3", "1500"),
    (r"3\cdot 10^{-2}", "0.03"),
    ("x^2+2x+1", "(x+1)^2"),
    ("y=2x+1", "2x+1"),
    ("y=2x+1", "y = 1+2x"),
    ("2x+y=3", "y=3-2x"),
    (r"\pm 3", "3,-3"),
    (r"\pm 3", r"\{-3,3\}"),
    (r"x=\pm 3", "x=3 or x=-3"),
    ("even", "Even"),
    ("C", "(C)"),
    ("(C)", "C"),
    ("C", r"\text{(C)}"),
    (r"\text{(C)}", "C) 12"),
    ("C", "C. 12 apples"),
    (r"1-\frac{1}{e}", r"\frac{e-1}{e}"),
    (r"2\pi", "6.283185307"),
    (r"\frac13", "0.3333"),
    ("3.14159", r"\pi"),
    ("i", r"\sqrt{-1}"),
    ("3+4i", "4i+3"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\log_2 8", "3"),
    (r"\ln e^2", "2"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\cos\frac{\pi}{3}", "0.5"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    (r"\sqrt{x^2}", "|x|"),
    (r"(-\infty,2)\cup(5,\infty)", r"(5,\infty)\cup(-\infty,2)"),
    (r"x<2\text{ or }x>5", r"(-\infty,2)\cup(5,\infty)"),
    (r"\mathbb{R}\setminus\{0\}", r"(-\infty,0)\cup(0,\infty)"),
    ("x>3", r"(3,\infty)"),
    ("x>3", "3<x"),
    ("-1<x<1", "(-1,1)"),
    (r"-1\le x\le 1", "[-1,1]"),
    (r"x \in [1,2]", "[1,2]"),
    (r"x\neq 3", r"(-\infty,3)\cup(3,\infty)"),
    ("3:4", "3:4"),
    ("1,2,3", "3,2,1"),
    ("1, 2 and 3", "1,2,3"),
    ("x=1,y=2", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\emptyset", r"\varnothing"),
    (r"\emptyset", r"\{\}"),
    (r"\infty", "infinity"),
    ("$18", "18"),
    (r"\$18.90", "18.9"),
    ("18 dollars", "$18"),
    ("7.0", "7"),
    ("007", "7"),
    ("−3", "-3"),
    ("½", "0.5"),
    ("√2", r"\sqrt{2}"),
    ("2π", r"2\pi"),
    ("3×4", "12"),
    (r"\text{Monday}", "monday"),
    (r"\text{The even function}", "even function"),
    ("p - q", "-(q-p)"),
    ("6r^2-4r-24", "6r^2 - 4r - 24"),
    ("a+b", "b+a"),
    ("ab", "ba"),
    ("2(x+3)", "2x+6"),
    (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}"),
    ("x^{10}", "x^10"),
    ("x^{1/2}", r"\sqrt{x}"),
    ("e^{2x}", "(e^x)^2"),
    (r"\ln(xy)", r"\ln x+\ln y"),
    ("204_5", "204_5"),
    ("204_5", "204"),
    ("1011_2", "1011_2"),
    (r"\frac{1}{x+1}-\frac1{x}", r"-\frac{1}{x(x+1)}"),
    ("f(x)=x^2", "x^2"),
    ("f(x)=x^2", "y=x^2"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", r"-\frac12"),
    (r"\frac{1}{-2}", r"-\frac12"),
    ("1/3", r"\frac{2}{6}"),
    (r"\frac{5\sqrt{42}}{27}", r"\frac{10\sqrt{10.5}}{27}"),
    ("12 apples", "12"),
    ("12", "12 apples"),
    ("16:9", "16:9"),
    ("(x-1)(x+2)", "x^2+x-2"),
    ("n(n+1)/2", r"\frac{n^2+n}{2}"),
    ("n!", "n(n-1)!"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
    ("True", "true"),
    ("No solution", "no solution"),
    ("DNE", r"\text{DNE}"),
    (r"3.0\%", "3%"),
    (r"15\mbox{ cm}^2", "15"),
    (r"15\text{ cm}^2", "15 cm^2"),
    ("5 hours", "300 minutes"),
    ("1 m", "100 cm"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    (r"(3,\frac{\pi}{2})", "(3, 1.5707963)"),
    ("(1,2),(3,4)", "(3,4),(1,2)"),
    ("1000000", "1,000,000"),
    ("1000000", "10^6"),
    ("1 000 000", "1000000"),
    ("0.1", "0.10"),
    ("3.5", "7/2"),
    (r"\boxed{5}", "5"),
    ("5", "The answer is 5."),
    ("5", "Therefore, the answer is $5$."),
    ("2/3", r"\frac{2}{3}"),
    ("x^2+y^2=4", "4=y^2+x^2"),
    ("x^2+y^2=4", "2x^2+2y^2=8"),
    ("k>0", "0<k"),
    (r"[0,1)\cup[1,2]", "[0,2]"),
    (r"\frac{a}{b}", "a/b"),
    ("a/b/c", "a/(bc)"),
    ("2^{3^2}", "512"),
    ("(2^3)^2", "64"),
    (r"\text{6 hours}", "6"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"\frac{\sqrt2}{2}", "0.7071"),
    ("3.14", "3.140"),
    ("0.5", r"\frac{1}{2}"),
    ("0.5", r"50\%"),
    ("25%", "1/4"),
    ("1/4", "25 percent"),
    (r"\$5", "5 dollars"),
    ("5 dollars", "500 cents"),
    (r"x=2 \text{ or } x=3", "2,3"),
    ("2,3", "x=2, x=3"),
    ("a=1,b=2", "b=2,a=1"),
    (r"\frac{7}{3}", r"2\frac13"),
    (r"\frac{7}{3}", "2 1/3"),
    ("-2 1/3", r"-\frac73"),
    (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
    (r"\arctan 1", r"\frac{\pi}{4}"),
    ("C_5^2", "C_5^2"),
    (r"\overline{AB}", "AB"),
    (r"\vec{a}+\vec{b}", r"\vec b+\vec a"),
    (r"\mathbf{i}+2\mathbf{j}", r"2\mathbf{j}+\mathbf{i}"),
    (r"\frac{1}{2}bh", r"\frac{bh}{2}"),
    (r"0.\overline{3}", "1/3"),
    (r"0.\overline{27}", r"\frac{3}{11}"),
    (r"5\,\mathrm{m/s}", "5"),
    (r"3\text{ and }4", "3,4"),
    (r"2\text{ or }3", "2,3"),
    ("28", r"28\%"),
    ("0.28", r"28\%"),
    (r"28\%", "0.28"),
    ("10455", "10,455"),
    (r"\{1,2,2\}", r"\{1,2\}"),
    (r"\frac{0}{5}", "0"),
    ("0", "-0"),
    ("2^{10}", "1024"),
    (r"\frac{1}{3}", "1/3."),
]

DIFFERENT = [
    ("3/4", "-0.5e312"),  # beyond what a float can hold
    (r"(1,\infty)", r"x\ge 1"),
    (r"[0,1)\cup(2,3)", r"(0,1)\cup(2,3)"),
    (r"(0,1]\cup(2,3)", r"(0,1)\cup(2,3)"),
    ("(a,b)", r"\{a,b\}"),
    ("(1,2,3)", r"\{1,2,3\}"),
    ("4 square meters", "4 cubic meters"),
    ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0"),
    (r"\sqrt{67},-\sqrt{85}", r"\sqrt{67}"),
    ("0.28", "28"),
    ("(1,2)", "(2,1)"),
    (r"(-\infty,3]", r"(-\infty, 3)"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "{1,2}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 5\end{bmatrix}"),
    (r"5 \text{ cm}", "5 m"),
    ("x^2+2x+1", "(x-1)^2"),
    ("2x+y=3", "y=3+2x"),
    (r"\pm 3", "3"),
    ("even", "odd"),
    ("C", "B"),
    (r"1-\frac1e", r"1+\frac1e"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("1e-7", "2e-7"),
    ("[1,2]", "(1,2)"),
    ("9**9**9", "387420489"),
    ("2^{100}", "2^{101}"),
    ("10^{30}", "10^{30}+1"),
    (r"\frac{\pi}{4}", r"45^\circ"),
    (r"\pi", "3.14"),
    (r"\frac13", "0.33"),
    (r"\frac13", "0.3"),
    ("3+4i", "3-4i"),
    ("|x|", "x"),
    (r"x\ge 3", "x>3"),
    ("12:00", "1:00"),
    ("3:4", "4:3"),
    ("1,2,3", "1,2"),
    (r"-\infty", r"\infty"),
    ("-3", "3"),
    ("Monday", "Tuesday"),
    ("a-b", "b-a"),
    ("2^x", "x^2"),
    ("204_5", "204_6"),
    ("x=3", "y=3"),
    (r"4\sqrt{2}", "4"),
    ("4", r"4\sqrt2"),
    ("12", "12 x"),
    ("2x", "2"),
    ("yes", "no"),
    ("(1,2),(3,4)", "(1,2),(4,3)"),
    ("5", "I think 5 or maybe 6"),
    ("5", ""),
    ("5", r"\sqrt{"),
    ("x^2+y^2=4", "x^2+y^2=5"),
    (r"[0,1)\cup(1,2]", "[0,2]"),
    ("-x^2", "(-x)^2"),
    (r"\frac{\sqrt2}{2}", "0.71"),
    ("1/4", "25"),
    ("a=1,b=2", "a=2,b=1"),
    (r"28\%", "0.29"),
    ("(1,2]", "(1,2)"),
    ("1e400", "1e401"),
    ("x", "y"),
    ("2", "2^{10}"),
    ("7", "exec(open('/data/part-7/run'))"),
    ("7", r"\text{exec(open('/data/part-7/run'))}"),
    ("7", "lambda: open('/data/part-7/run', 'w')"),
]

UNREADABLE = [
    "",
    "   ",
    r"\sqrt{",
    r"\int_0^1 x\,dx",
    "a long sentence that says nothing at all of use",
]

HOSTILE = [
    "__import__('os').system('touch {mark}')",
    "exec(open('{mark}','w').write('x'))",
    r"\text{{__import__('os').system('touch {mark}')}}",
    "().__class__.__bases__[0].__subclasses__()",
    "lambda: open('{mark}', 'w')",
    "9**9**9**9", "9^{{9^{{9^{{9}}}}}}", "(9^9)!!!!", "10000000000!", r"\sum_{{k=1}}^{{10^9}} k",
    r"\prod_{{k=1}}^{{1000}} \sum_{{j=1}}^{{1000}} \sum_{{i=1}}^{{1000}} ijk",
    r"\sin(9^{{9^9}})", r"\lfloor 9^{{9^9}} \rfloor", r"\binom{{10^9}}{{10^8}}", "1e999999999",
    "(" * 500 + "1" + ")" * 500, "{{" * 400 + "1" + "}}" * 400, "-" * 1500 + "1", "1," * 900,
    r"\frac" * 300 + "1", "x^" * 400 + "2", r"\sqrt" * 500 + "2", "1+" * 900 + "1", "|" * 301,
    r"\begin{{pmatrix}}" + "1&" * 300 + "1" + r"\end{{pmatrix}}", "(x+1)" * 300, "a" * 100_000,
    "1 " * 5000, "\x00\x00", "1/0", "0^0", "\\", "$", r"\boxed{{", "}}{{", r"\left(", "=", ",",
]  # fmt: skip


@pytest.mark.parametrize("gold, answer", SAME)
def test_the_same(gold: str, answer: str) -> None:
    assert math_equal(gold, answer) is True


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_different(gold: str, answer: str) -> None:
    assert math_equal(gold, answer) is False


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_reference_that_cannot_be_read(gold: str) -> None:
    assert math_equal(gold, "5") is None


def test_an_unreadable_reference_still_equals_itself() -> None:
    assert math_equal(r"\int_0^1 x\,dx", r"$\int_0^1 x\,dx$") is True


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_are_wrong_soon_and_never_run(text: str, tmp_path) -> None:
    folder = tmp_path / "x-5"  # no answer of 5 either
    folder.mkdir()
    mark = folder / "ran"
    start = time.perf_counter()
    for gold in ("5", "x^2+1", "(1,2)", r"\{1,2\}", "x>3", "even"):
        assert math_equal(gold, text.format(mark=mark)) is False
    math_equal(text.format(mark=mark), "5")
    assert not mark.exists()
    assert time.perf_counter() - start < 10  # milliseconds each; a bomb would take for ever


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789xyabe+-*/^_=<>(){}[]|!,.%$ \\frcsqtpinmdo&", max_size=60))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert math_equal("5", text) in (True, False)
    assert math_equal(text, "5") in (True, False, None)


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(-(10**9), 10**9))
def test_fractions_are_compared_exactly(top: int, bottom: int, other: int) -> None:
    gold = rf"\frac{{{top}}}{{{bottom}}}"
    assert math_equal(gold, f"{3 * top}/{3 * bottom}") is True
    assert math_equal(gold, f"{other}/{bottom}") is (other == top)


def test_gold_answers_of_the_data_equal_themselves() -> None:
    rows = json.loads(data_file("math_new50/math_new50_exercise.json").read_text())
    answers = [str(row["answer"]) for row in rows]
    for i, gold in enumerate(answers):
        assert math_equal(gold, rf"so it is $\boxed{{{gold}}}$.") is True, gold
        if gold != answers[i - 1]:
            assert math_equal(gold, answers[i - 1]) is False, (gold, answers[i - 1])
    assert len(answers) == 50


def test_solutions_of_the_data_earn_their_reward() -> None:
    rows = [json.loads(line) for line in data_file("gsm8k/test.jsonl").open()]
    for row in rows:
        final = extract_answer(row["answer"], style="gsm8k")
        assert final is not None
        assert exact_answer(f"<answer>{final}</answer>", row["answer"]) == 1.0
        assert exact_answer(f"<answer>{final}1</answer>", row["answer"]) == 0.0
        assert exact_answer(row["answer"], row["answer"], style="last_number") == 1.0


@pytest.mark.parametrize(
    "text, answer, settings, reward",
    [
        ("<answer>0.5</answer>", "1/2", {}, 1.0),
        ("0.5", "1/2", {}, 0.0),
        ("no answer", "", {}, None),
        (r"\boxed{A", "A", {"style": "boxed"}, 0.0),
        ("<answer>7</answer>", ["5", "7"], {}, 1.0),
        ("<answer>7</answer>", 7, {}, 1.0),
        ("<think>7", "7", {"style": "last_number", "after": "</think>"}, 0.0),
        ("<think>8</think> 7", "7", {"style": "last_number", "after": "</think>"}, 1.0),
        ("I choose (C).", "C", {"style": "choice"}, 1.0),
    ],
)
def test_exact_answer(text: str, answer: object, settings: dict, reward: float | None) -> None:
    assert exact_answer(text, answer, **settings) == reward

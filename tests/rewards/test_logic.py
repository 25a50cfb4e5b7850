"""Knights and Knaves, countdown, formulas, reasoning-gym: no answer is ever executed."""

from __future__ import annotations

import ast
import json
from fractions import Fraction
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_folder import data_file
from groupwise.errors import UsageError
from groupwise.prompts.generators import (
    puzzles,
)
from groupwise.rewards.builtin import (
    reasoning,
)
from groupwise.rewards.builtin.algebra import read_formula
from groupwise.rewards.builtin.countdown import countdown, evaluate, solves
from groupwise.rewards.builtin.format import ordered_tags
from groupwise.rewards.builtin.logic import knights_knaves, logic_rl, read_roles

ROW = {"names": ("Zoey", "Oliver"), "solution": (True, False)}
RIGHT = "<think>t</think><answer>(1) Zoey is a knight (2) Oliver is a knave</answer>"


@pytest.mark.parametrize(
    "text, total",
    [  # the totals that the original gives
        (RIGHT, 3.0),
        (RIGHT.replace("knave", "knight"), -0.5),
        ("<think>t</think><answer>Zoey is a knight</answer>", -1.0),
        (RIGHT.replace("a knave", "a knave, not a knight"), -1.0),
        (RIGHT + "<answer>x</answer>", -3.0),
        (RIGHT.replace("</think>", ""), -3.0),
        (RIGHT.replace("is a knave", "is the knave"), -1.0),
        (RIGHT.replace("Zoey", "zoey"), 3.0),
        (RIGHT + " that is all", 3.0),
        ("<think>t</think><answer></answer>", -1.0),
        ("", -3.0),
        ("<answer>a</answer><think>t</think>", -3.0),
    ],
)
def test_logic_rl_totals(text: str, total: float) -> None:
    assert logic_rl(text, ROW) == total


def test_logic_rl_with_a_prefilled_tag_and_other_values() -> None:
    rest = RIGHT.removeprefix("<think>")
    assert logic_rl(rest, ROW) == -3.0
    assert logic_rl(rest, ROW, prefix="<think>") == 3.0
    assert logic_rl(RIGHT, ROW, prefix="<think>") == -3.0
    assert logic_rl(RIGHT, ROW, format=0.5, right=1.0) == 1.5
    assert logic_rl(RIGHT, {}) is None


def test_knights_knaves_reads_the_answer_in_words_too() -> None:
    assert knights_knaves(RIGHT, {}, "Zoey is a knight, Oliver is a knave") == 1.0
    assert knights_knaves(RIGHT, {}, "Zoey is a knave, Oliver is a knave") == 0.0
    assert knights_knaves(RIGHT, {}) is None
    assert knights_knaves("Zoey is a knight, Oliver is a knave", ROW) == 0.0
    assert ordered_tags(RIGHT) == 1.0 and ordered_tags(RIGHT + "</answer>") == -1.0


def test_names_are_whole_words() -> None:
    assert read_roles("Hugo is a knight, Ugo is a knave", ["Ugo", "Hugo"]) == {
        "Ugo": False,
        "Hugo": True,
    }


def _holds(statement: puzzles.Statement, roles: tuple[bool, ...]) -> bool:
    """An independent reading of a statement, one assignment at a time."""
    op, *rest = statement
    if op == "telling-truth":
        return roles[rest[0]]
    if op == "lying":
        return not roles[rest[0]]
    values = [_holds(part, roles) for part in rest]
    return {
        "not": lambda a: not a,
        "and": lambda a, b: a and b,
        "or": lambda a, b: a or b,
        "->": lambda a, b: not a or b,
        "<=>": lambda a, b: a == b,
    }[op](*values)


def test_the_worked_puzzle_has_one_solution() -> None:
    # A: "B is a knave"; B: "A and B are both knights". If A lies, B is a knight and says the truth,
    # so A is a knight: contradiction. So A is a knight and B a knave.
    statements = [("lying", 1), ("and", ("telling-truth", 0), ("telling-truth", 1))]
    assert puzzles.solutions(statements) == [(True, False)]
    # "I am a knight" fits both roles; "I am a knave" fits none.
    assert puzzles.solutions([("telling-truth", 0)]) == [(False,), (True,)]
    assert puzzles.solutions([("lying", 0)]) == []


@pytest.mark.parametrize("people", list(puzzles.PEOPLE))
def test_generated_puzzles_have_one_solution_by_another_solver(people: int) -> None:
    row = puzzles.knights_knaves_puzzle(Random(people), people=people)
    fitting = [
        roles
        for roles in product((False, True), repeat=people)
        if all(_holds(s, roles) == role for s, role in zip(row["statements"], roles, strict=True))
    ]
    assert fitting == [row["solution"]]
    prompt = puzzles.knights_knaves_prompt(row, id="x")
    said = f"<think></think><answer>{prompt.answer}</answer>"
    assert logic_rl(said, prompt.columns) == 3.0
    assert all(str(prompt).count(name) >= 2 for name in row["names"])


def test_generated_puzzles_are_distinct_reproducible_and_split() -> None:
    first = puzzles.knights_knaves(300, seed=1)
    assert [str(p) for p in first] == [str(p) for p in puzzles.knights_knaves(300, seed=1)]
    assert len({str(p) for p in first}) == 300
    assert [str(p) for p in first] != [str(p) for p in puzzles.knights_knaves(300, seed=2)]
    held_out = puzzles.knights_knaves(50, split="held_out", seed=1)
    assert not {str(p) for p in first} & {str(p) for p in held_out}
    with pytest.raises(UsageError, match="people"):
        puzzles.knights_knaves(1, people=(1, 3))
    with pytest.raises(UsageError, match="only about"):
        puzzles.knights_knaves(100_000, people=(2, 2))


def test_every_published_puzzle_has_its_one_solution() -> None:
    path = data_file("knights_knaves/kk_compact.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 5000
    for row in rows:
        assert puzzles.solutions(ast.literal_eval(row["statements"])) == [tuple(row["solution"])]
    for row in rows[::100]:
        prompt = puzzles.knights_knaves_prompt(row, id="1")
        said = f"<think></think><answer>{prompt.answer}</answer>"
        assert logic_rl(said, prompt.columns) == 3.0


HOSTILE = [
    "__import__('os').system('touch EXECUTED')",
    "().__class__.__base__.__subclasses__()",
    "open('EXECUTED','w')",
    "9**9**9**9",
    "9**9",
    "5//2",
    "1 if 1 else 2",
    "(lambda: 3)()",
    "1e3",
    "0x10",
    "1_0",
    "08",
    "1/0",
    "1/(2-2)",
    "(" * 90 + "1" + ")" * 90,
    "(" * 5000 + "1" + ")" * 5000,
    "9" * 300,
    "1+" * 120 + "1",
    "",
    "=",
    "１+２",
    "True",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_expressions_are_never_executed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"numbers": [9, 9, 9, 9], "target": 3}
    assert countdown(f"<answer>{text}</answer>", row) == 0.0
    found = evaluate(text)
    assert found is None or found[0] == 1
    read_formula(text)
    assert not (tmp_path / "EXECUTED").exists()


def test_countdown_worked() -> None:
    row = {"numbers": (44, 19, 10), "target": 35}
    assert countdown("<think>…</think><answer>44 - 19 + 10</answer>", row) == 1.0
    assert countdown("<answer>44 − 19 + 10 = 35</answer>", row) == 1.0
    assert countdown("<answer>44 - 19 + 10 = 36</answer>", row) == 0.0
    assert countdown("<answer>35 = 44 - 19 + 10</answer>", row) == 0.0
    assert countdown("<answer>44 - 19 + 10 = 35 = 35</answer>", row) == 0.0
    assert countdown("<answer>35</answer>", row) == 0.0
    assert countdown("<answer>44 - 9</answer>", row) == 0.0
    assert countdown("", row) == 0.0
    assert countdown("1", {}) is None


def test_countdown_uses_every_number_once_and_exact_fractions() -> None:
    assert solves("8 / (3 - 8 / 3)", [8, 3, 8, 3], Fraction(24))
    assert not solves("8 / (3 - 8 / 3)", [8, 3, 3, 7], Fraction(24))
    # Off by 1e-7, which a tolerance of 1e-5 would let pass.
    assert not solves("3 + 1 / 9999999", [3, 1, 9999999], Fraction(3))
    assert solves("3", [3, 1], Fraction(3))
    assert not solves("3", [3, 1], Fraction(3), use_all=True)
    assert evaluate("-(2 - 5)") == (Fraction(3), [2, 5])


def test_generated_countdowns_can_be_solved() -> None:
    prompts = puzzles.countdown(200, numbers=(2, 6), seed=3)
    assert len({p.id for p in prompts}) == 200
    for prompt in prompts:
        assert countdown(f"<answer>{prompt.answer}</answer>", prompt.columns, use_all=True) == 1.0
        assert prompt.columns["target"] not in prompt.columns["numbers"]
    held_out = puzzles.countdown(50, split="held_out")
    assert not {str(p) for p in held_out} & {str(p) for p in puzzles.countdown(500)}
    with pytest.raises(UsageError, match="countdown"):
        puzzles.countdown(1, numbers=(1, 3))


def test_formulas_are_built_not_evaluated() -> None:
    sympy = pytest.importorskip("sympy")
    x = sympy.Symbol("x")
    assert read_formula("2*x^2 + sin(x)/3") == 2 * x**2 + sympy.sin(x) / 3
    assert read_formula("ln(x)") == sympy.log(x)
    assert read_formula("E**x") == sympy.exp(x)
    assert read_formula("0.5*x") == x / 2
    for text in (
        "x.diff()",
        "print(x)",
        "sin(x, y)",
        "sin(x=1)",
        "[x]",
        "xyz",
        "10**10000",
        "2**x**",
    ):
        assert read_formula(text) is None, text
    for text in ("(((9**99)**99)**99)**99", "((1/3)**99)**99", "((x+1)**99)**99", "2**(1/10**9)"):
        assert read_formula(text) is None, text


def test_hostile_formulas_cost_little() -> None:
    pytest.importorskip("reasoning_gym")
    row = {"source_dataset": "simple_integration", "integrand": "2*x", "variable": "x"}
    for text in (
        "(x + y + z)**100 * (x - y + z)**100",
        "exp(exp(exp(exp(exp(9)))))*x",
        "sin(" * 60 + "x" + ")" * 60,
        "x**2 + " + " + ".join(f"sin(x)**{n}" for n in range(1, 40)),
        "9**(9**2) * x",
        "x**2 + y + K",
        "x**2 + y*x",
    ):
        assert reasoning.reasoning_gym(text, {"metadata": row}) == float(text.endswith("y + K"))


def _score(task: str, answer: str, *, index: int = 0, partial: bool = False) -> float | None:
    prompt = puzzles.reasoning_gym(index + 1, task=task, seed=3)[index]
    return reasoning.reasoning_gym(
        f"<answer>{answer}</answer>", prompt.columns, prompt.answer, partial=partial
    )


@pytest.mark.parametrize("task", sorted(reasoning.OWN_SCORERS))
def test_own_scorers_agree_with_the_package_on_its_own_answers(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    for prompt in puzzles.reasoning_gym(5, task=task, seed=1):
        said = f"<think>t</think><answer>{prompt.answer}</answer>"
        # An integral that is merely written down again is an answer to the package, not to us.
        solved = "Integral" not in str(prompt.answer)
        assert reasoning.reasoning_gym(said, prompt.columns, prompt.answer) == solved
        assert reasoning.reasoning_gym("<answer>7</answer>", prompt.columns, prompt.answer) == 0.0


@pytest.mark.parametrize("task", sorted(reasoning.OWN_SCORERS))
def test_own_scorers_execute_nothing(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    assert _score(task, "__import__('os').system('touch EXECUTED')") == 0.0
    assert _score(task, "[open('EXECUTED', 'w')]") == 0.0
    assert not (tmp_path / "EXECUTED").exists()


def test_own_scorers_read_other_forms() -> None:
    pytest.importorskip("reasoning_gym")
    prompt = puzzles.reasoning_gym(1, task="spiral_matrix")[0]
    as_list = str([int(cell) for cell in str(prompt.answer).split()])
    args = (f"<answer>{as_list}</answer>", prompt.columns, prompt.answer)
    assert reasoning.reasoning_gym(*args, partial=True) == 0.1
    assert reasoning.reasoning_gym(*args) == 0.0
    row = {"metadata": {"source_dataset": "puzzle24", "numbers": [4, 8, 6, 2]}}
    assert reasoning.reasoning_gym("4*8 - 6 - 2", row) == 1.0
    # 24 by four numbers that were not given, which the package's scorer lets pass
    assert reasoning.reasoning_gym("6*4*1*1", row) == 0.0
    row = {"metadata": {"source_dataset": "puzzle24", "numbers": [24, 1, 1, 1]}}
    assert reasoning.reasoning_gym("24", row) == 0.0
    row = {"metadata": {"source_dataset": "countdown", "numbers": [3, 1], "target": 3}}
    assert reasoning.reasoning_gym("3", row) == 0.0
    assert reasoning.reasoning_gym("3 * 1", row) == 1.0
    row = {
        "metadata": {"source_dataset": "simple_integration", "integrand": "2*x", "variable": "x"}
    }
    assert reasoning.reasoning_gym("x**2 + C", row) == 1.0
    assert reasoning.reasoning_gym("x**2/2 + C", row) == 0.0


def test_other_tasks_go_through_their_scorers() -> None:
    pytest.importorskip("reasoning_gym")
    for task in ("leg_counting", "propositional_logic", "number_sorting", "gcd"):
        prompt = puzzles.reasoning_gym(1, task=task, seed=2)[0]
        if prompt.answer:
            said = f"<answer>{prompt.answer}</answer>"
            assert reasoning.reasoning_gym(said, prompt.columns, prompt.answer) == 1.0, task
        garbage = reasoning.reasoning_gym("<answer>?</answer>", prompt.columns, prompt.answer)
        assert garbage == 0.0
    assert reasoning.reasoning_gym("x", {}) is None


def test_tasks_that_execute_text_are_refused() -> None:
    pytest.importorskip("reasoning_gym")
    known = reasoning.tasks()
    assert len(known) >= 100
    assert "countdown" in known and "codeio" not in known and "composite" not in known
    for name, reason in [("codeio", "executes"), ("composite", "mixes"), ("countdwn", "countdown")]:
        with pytest.raises(UsageError, match=reason):
            reasoning.check_task(name)
        with pytest.raises(UsageError, match=reason):
            puzzles.reasoning_gym(1, task=name)
    with pytest.raises(UsageError, match="no_such"):
        puzzles.reasoning_gym(1, task="leg_counting", settings={"no_such": 3})


def test_a_task_whose_module_evaluates_text_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(reasoning, "OWN_SCORERS", {})
    for name in ("countdown", "n_queens", "simple_integration", "puzzle24"):
        with pytest.raises(UsageError, match="executes"):
            reasoning.check_task(name)


NONSENSE = (
    "nonsense", "nan", "NaN", "inf", "-inf", "1e999", "1e99999999", "[]", "{}", "[[]]", "[NaN]",
    '{"a": NaN}', "null", "None", "-1", "(,)", "[", '{"', "[[1]]", "[1,2", "\x00", "9" * 5000,
    "[" * 3000, "1/0", "[null]", '{"x": null}', "a,b", "nan nan", "nan,nan", "[inf]", "?", "_", " ",
    '[""]', '{"solution": ""}', "...", "nan/1", "[nan, nan]", "nan degrees", "1" + "0" * 400,
)  # fmt: skip


def nonsense_pays(task: str) -> list[tuple[str, Any]]:
    """Answers that are none and yet earn something; raises what a scorer raises."""
    found = []
    for prompt in puzzles.reasoning_gym(3, task=task, seed=3):
        for said in NONSENSE:
            row = (prompt.columns, prompt.answer)
            score = reasoning.reasoning_gym(f"<answer>{said}</answer>", *row)
            share = reasoning.reasoning_gym(f"<answer>{said}</answer>", *row, partial=True)
            if score != float(said == prompt.answer) or share is None or not 0 <= share <= 1:
                found.append((said, score))
    return found


@pytest.mark.parametrize(
    "task",
    ["boxnet", "coin_flip", "complex_arithmetic", "game_of_life", "game_of_life_halting",
     "prime_factorization"],
)  # fmt: skip
def test_nonsense_never_pays_and_never_raises(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    assert nonsense_pays(task) == []


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_nonsense_never_pays_in_any_task() -> None:
    pytest.importorskip("reasoning_gym")
    paid = {task: found for task in reasoning.tasks() if (found := _tried(task))}
    assert paid == {}


def _tried(task: str) -> Any:
    try:
        return nonsense_pays(task)
    except UsageError as error:  # too few questions
        return [] if "too few" in str(error) else error
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(
    ("solution", "right"),
    [(["True", "False"], True), (["False", "False"], False), (["knight", "knave"], True),
     ([1, 0], True), (["true", "maybe"], None)],
)  # fmt: skip
def test_roles_written_as_text(solution: list[Any], right: bool | None) -> None:
    row = {"names": ["Ann", "Bo"], "solution": solution}
    said = "<answer>Ann is a knight, Bo is a knave</answer>"
    assert knights_knaves(said, row) == (None if right is None else float(right))
    if right is None:
        with pytest.raises(UsageError, match="solution = 'maybe'"):
            puzzles.knights_knaves_prompt({**row, "quiz": "?"}, id="1")
    else:
        columns = puzzles.knights_knaves_prompt({**row, "quiz": "?"}, id="1").columns
        assert columns["solution"] == (right, False)

"""The tasks of reasoning-gym through one reward, except that no answer is ever executed.

Nine of its scorers hand the model's answer to `eval` or to sympy's `parse_expr`. Own scorers
replace them; any other task whose module evaluates text, in this or a later version of the package,
is refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.builtin.algebra import read_formula, same_values
from groupwise.rewards.builtin.countdown import solves
from groupwise.rewards.builtin.text import Source, final_answer
from groupwise.rewards.math.numbers import plain_number

Scorer = Callable[[str, Mapping[str, Any]], float]

EVALUATES_OWN_TEXT = frozenset(
    {"basic_arithmetic", "bitwise_arithmetic", "number_sorting", "propositional_logic"}
)
"""Tasks whose modules evaluate what they made themselves, or define a harmless function of such a
name; read and found safe."""

_EVALUATION = re.compile(r"\b(?:eval|exec|sympify|parse_expr|parse_latex)\(")
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf|infinity)(?![a-z])|\d[eE][+-]?\d{4}", re.IGNORECASE)
_LONGEST = 20_000


def _countdown(answer: str, entry: Mapping[str, Any]) -> float:
    data = entry["metadata"]
    return float(solves(answer, list(data["numbers"]), Fraction(data["target"]), use_all=True))


def _puzzle24(answer: str, entry: Mapping[str, Any]) -> float:
    return float(solves(answer, list(entry["metadata"]["numbers"]), Fraction(24), use_all=True))


def _listed(
    answer: str, *, right: tuple[str, ...], joined: Callable[[Any], str], partial: float
) -> float:
    """1 for the asked form, `partial` for the same content as a list."""
    if answer.strip() in right:
        return 1.0
    try:
        return partial if joined(json.loads(answer.replace("'", '"'))) in right else 0.0
    except (ValueError, TypeError, RecursionError):
        return 0.0


def _rows(matrix: list[list[Any]]) -> str:
    return "\n".join(" ".join(str(cell) for cell in row) for row in matrix)


def _string_insertion(answer: str, entry: Mapping[str, Any]) -> float:
    return _listed(answer, right=(entry["answer"],), joined="".join, partial=0.1)


def _spiral_matrix(answer: str, entry: Mapping[str, Any]) -> float:
    return _listed(
        answer,
        right=(entry["answer"].strip(),),
        joined=lambda cells: " ".join(str(c) for c in cells),
        partial=0.1,
    )


def _binary_matrix(answer: str, entry: Mapping[str, Any]) -> float:
    return _listed(answer, right=(entry["answer"],), joined=_rows, partial=0.1)


def _n_queens(answer: str, entry: Mapping[str, Any]) -> float:
    return _listed(
        answer, right=tuple(entry["metadata"]["valid_answers"]), joined=_rows, partial=0.5
    )


def _integration(answer: str, entry: Mapping[str, Any]) -> float:
    """1 if the derivative of the answer has the integrand's values; other letters are constants."""
    import sympy

    variable = entry["metadata"]["variable"]
    symbols = frozenset({variable, "C"})
    said = read_formula(answer, symbols=symbols)
    integrand = read_formula(entry["metadata"]["integrand"], symbols=symbols)
    if said is None or integrand is None:
        return 0.0
    x = sympy.Symbol(variable)
    others = sorted(said.free_symbols - {x}, key=str)
    try:
        constants = {symbol: sympy.Rational(101 + n, 53) for n, symbol in enumerate(others)}
        slope = sympy.diff(said.subs(constants), x)
        return float(same_values(slope, integrand, variable=variable))
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError):
        return 0.0  # sympy cannot differentiate or evaluate what was said


def _polynomial_multiplication(answer: str, entry: Mapping[str, Any]) -> float:
    """1 if the answer is the expanded polynomial itself, in any order of terms."""
    said, wanted = read_formula(answer), read_formula(entry["answer"])
    return float(said is not None and said == wanted)


def _coin_flip(answer: str, entry: Mapping[str, Any]) -> float:
    """1 for the probability to three digits."""
    said, ratio = plain_number(answer), entry["metadata"]["rational"]
    wanted = Fraction(ratio["numerator"], ratio["denominator"])
    value = said.value / 100 if said and said.percent else said.value if said else None
    return float(value is not None and abs(value - wanted) * 1000 <= wanted)


def _game_of_life_halting(answer: str, entry: Mapping[str, Any]) -> float:
    """1 for the right one of True and False."""
    return float(answer.strip().strip(".").lower() == str(entry["answer"]).strip().lower())


OWN_SCORERS: dict[str, Scorer] = {
    "binary_matrix": _binary_matrix,
    "coin_flip": _coin_flip,
    "countdown": _countdown,
    "game_of_life_halting": _game_of_life_halting,
    "intermediate_integration": _integration,
    "n_queens": _n_queens,
    "polynomial_multiplication": _polynomial_multiplication,
    "puzzle24": _puzzle24,
    "simple_integration": _integration,
    "spiral_matrix": _spiral_matrix,
    "string_insertion": _string_insertion,
}
"""Replacements for the scorers that evaluate the answer or accept nonsense."""


def tasks() -> list[str]:
    """Every task that can be used, in alphabetical order.

    Raises:
        UsageError: reasoning-gym is not installed.
    """
    return sorted(name for name in _package().factory.DATASETS if _refusal(name) is None)


def check_task(name: str) -> None:
    """Refuse a task that does not exist, that mixes others, or whose code evaluates text.

    Raises:
        UsageError: naming the reason.
    """
    if reason := _refusal(name):
        raise UsageError(f"task = {name!r}: {reason}")


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise UsageError("reasoning-gym is not installed; pip install reasoning-gym.") from None


def _refusal(name: str) -> str | None:
    known = _package().factory.DATASETS
    if name not in known:
        return f"reasoning-gym has no such task; {suggest(name, known)}"
    if name == "composite":
        return "it mixes other tasks and their scorers; use those by name."
    if name in OWN_SCORERS or name in EVALUATES_OWN_TEXT:
        return None
    module = importlib.import_module(known[name][0].__module__)
    if _EVALUATION.search(inspect.getsource(module)):
        return "its code executes text, which could be the model's; it is refused."
    return None


@functools.lru_cache(maxsize=128)
def scorer(name: str) -> Scorer:
    """The function that judges an answer of a task; ours where the package's own would execute the
    answer.

    Raises:
        UsageError: see `check_task`.
    """
    check_task(name)
    if name in OWN_SCORERS:
        return OWN_SCORERS[name]
    return _package().get_score_answer_fn(name)


@verifier
@REWARDS.register
def reasoning_gym(
    text: str,
    columns: Mapping[str, Any],
    answer: Any = None,
    *,
    partial: bool = False,
    source: Source = "final",
) -> float | None:
    """The score of a reasoning-gym task; the task is named by the row.

    Args:
        text: the completion.
        columns: the row: `metadata`, with the task in `source_dataset`.
        answer: the package's own answer; some tasks have none, because many answers are right.
        partial: keep the package's shares for answers that are nearly right or merely present (0.01
            in many tasks).
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Returns:
        1.0 or 0.0, or the share from 0 to 1 with `partial`; None where the row names no task.

    Raises:
        UsageError: reasoning-gym is not installed, or the task is refused.

    Source: reasoning-gym 0.1.25, `score_answer` of every task.
    Elsewhere: its scorers for countdown, puzzle24, n_queens, binary_matrix, spiral_matrix,
        string_insertion, the two integrations and polynomial_multiplication execute the answer;
        ours read it, and for puzzle24 also check that the given numbers are used, which the
        original does not. Its scorers pay for any text in game_of_life_halting, for "0" in
        coin_flip and for NaN in complex_arithmetic, and raise on answers of an unexpected form in
        prime_factorization, boxnet and game_of_life; here these earn 0.
    """
    metadata = columns.get("metadata") or {}
    name = metadata.get("source_dataset")
    if name is None:
        return None
    said = final_answer(text, source=source)
    if said is None or len(said) > _LONGEST:
        return 0.0
    score = _guarded(scorer(name), said, {"answer": answer, "metadata": metadata})
    return score if partial else float(score >= 1 - 1e-9)


def _guarded(judge: Scorer, said: str, entry: Mapping[str, Any]) -> float:
    """A score from 0 to 1. Scorers raise on answers of a form that they do not expect, and some
    take NaN, which is never greater than any distance, for a perfect answer."""
    if _NOT_FINITE.search(said) and not _NOT_FINITE.search(str(entry["answer"])):
        return 0.0
    try:
        score = float(judge(said, entry))
    except Exception:
        return 0.0
    return min(score, 1.0) if score > 0 else 0.0

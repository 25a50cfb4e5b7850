"""Tests of programs as data rows hold them, and when an output is the expected one."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from groupwise.errors import UsageError, suggest

Checker = Literal["lines", "tokens", "numbers", "any_order"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input with its expected output, as text, or arguments with the expected value."""

    given: Any
    wanted: Any


def column(columns: Mapping[str, Any], name: str) -> Any:
    """A column of a row.

    Raises:
        UsageError: the row has none of that name.
    """
    if name not in columns:
        raise UsageError(
            f"code reward: column = {name!r}: the data has none; {suggest(name, columns)}"
        )
    return columns[name]


def sources_of(tests: Any, name: str) -> list[str]:
    """Test sources: a list of them, a list written as text, or one source.

    Raises:
        UsageError: another form.

    Example:
        >>> sources_of(["assert f(1)"], "tests"), sources_of("assert f(1)", "tests")
        (['assert f(1)'], ['assert f(1)'])
        >>> sources_of("['assert f(1)', 'assert f(2)']", "tests")
        ['assert f(1)', 'assert f(2)']
    """
    if isinstance(tests, str):
        try:
            read = ast.literal_eval(tests)
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
            read = None
        tests = read if isinstance(read, list) else [tests] if tests.strip() else []
    listed = tests.tolist() if hasattr(tests, "tolist") else tests
    if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
        raise UsageError(
            f"code_asserts: column {name!r}: must be a list of test sources, or one source; "
            f"got {type(tests).__name__}. For inputs and outputs use code_stdio."
        )
    return list(listed)


def cases_of(
    tests: Any, name: str, columns: Mapping[str, Any] | None = None
) -> tuple[list[Case], str]:
    """Inputs with expected outputs, and the function to call with them ("" for a main program).

    Args:
        tests: in one of the forms of `code_stdio`.
        name: of their column, for messages.
        columns: the row; LiveCodeBench names the function in its column "metadata".

    Raises:
        UsageError: another form.

    Example:
        >>> cases_of({"input": ["1"], "output": ["2"]}, "tests")
        ([Case(given='1', wanted='2')], '')
        >>> cases_of("[{'type': 'function_call', 'fn_name': 'f', 'input': [1], 'output': 2}]", "")
        ([Case(given=[1], wanted=2)], 'f')
    """
    try:
        tests = _read(tests) if isinstance(tests, str) else tests
        if isinstance(tests, Mapping):
            given, wanted = (_either(tests, key) for key in ("input", "output"))
            pairs = list(zip(given, wanted, strict=True))
            function = str(tests.get("fn_name") or "")
        else:
            pairs = [(case["input"], case["output"]) for case in tests]
            function = _called(tests, columns or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"code_stdio: column {name!r}: must be a list of {{input, output}} or "
            f"{{inputs: […], outputs: […]}} ({type(error).__name__}: {error})."
        ) from error
    if function and not function.isidentifier():
        raise UsageError(f"code_stdio: fn_name = {function!r}: must be the name of a function.")
    if function:
        return [Case(given=_arguments(a), wanted=_value(b)) for a, b in pairs], function
    if any(value is None for pair in pairs for value in pair):
        raise UsageError(f"code_stdio: column {name!r}: an input or an output is null.")
    return [Case(given=_text(given), wanted=_text(wanted)) for given, wanted in pairs], ""


def _read(text: str) -> Any:
    """Tests written as JSON or as a Python literal."""
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
            raise error from None


def _either(tests: Mapping[str, Any], key: str) -> Any:
    """The inputs or the outputs, whose column is written in the plural or the singular."""
    found = tests[f"{key}s"] if f"{key}s" in tests else tests[key]
    if isinstance(found, str | Mapping):
        raise TypeError(f"{key}s must be a list, got {type(found).__name__}")
    return found


_MAIN, _CALL = ("", "stdin", "stdin_stdout"), ("functional", "function_call")


def _called(tests: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> str:
    """The function that all tests of a list call; "" for a main program.

    Raises:
        ValueError: tests of an unknown type, or of several.
    """
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in tests}
    names = {str(case["fn_name"]) for case in tests if case.get("fn_name")}
    if unknown := sorted(kinds - {*_MAIN, *_CALL}):
        raise ValueError(f"type = {unknown[0]!r}; known: {', '.join(_MAIN[1:] + _CALL)}")
    if len(names) > 1 or (kinds & {*_MAIN[1:]} and kinds & {*_CALL}):
        raise ValueError("the tests of a row must be of one type and call one function")
    if names:
        return names.pop()
    return _function_of(columns) if kinds & {*_CALL} else ""


def _function_of(columns: Mapping[str, Any]) -> str:
    """The name of the function under test in a row of LiveCodeBench: metadata.func_name."""
    metadata = columns.get("metadata")
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        return str(dict(metadata or {})["func_name"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            "tests of type 'functional' need fn_name, or func_name in the column 'metadata'"
        ) from None


def _arguments(given: Any) -> list[Any]:
    """Arguments as a list, or as one JSON value per line."""
    if isinstance(given, str):
        return [_value(line) for line in given.split("\n") if line.strip()]
    return list(given) if isinstance(given, list | tuple) else [given]


def _value(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def call_source(function: str, case: Case) -> str:
    """A test that calls a function, or the method of class Solution, and compares the result.

    Tuples count as lists, and an expected value may stand alone in a list, as in APPS.
    """
    return (
        f"try:\n    __f = Solution().{function}\nexcept NameError:\n    __f = {function}\n"
        f"__plain = lambda v: [__plain(x) for x in v] if type(v) in (list, tuple) else v\n"
        f"__said, __wanted = __plain(__f(*{case.given!r})), {case.wanted!r}\n"
        "assert __said == __wanted or (type(__wanted) is list and [__said] == __wanted)\n"
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same_output(wrote: str, wanted: str, *, checker: Checker, tolerance: float = 1e-6) -> bool:
    """Whether an output is right.

    Args:
        wrote, wanted: what the program wrote, and what is expected.
        checker: "lines": equal lines, white space at their ends and empty lines at the end aside;
            "tokens": equal words, however they are spaced; "numbers": equal words, or numbers that
            differ by at most `tolerance`, absolutely or relatively; "any_order": equal lines in any
            order.
        tolerance: see "numbers".

    Raises:
        UsageError: an unknown checker.

    Example:
        >>> same_output("1 2", "1\\n2", checker="tokens")
        True
        >>> same_output("0.3333333", "0.33333333", checker="numbers")
        True
    """
    if checker not in get_args(Checker):
        raise UsageError(f"checker = {checker!r}: {suggest(checker, get_args(Checker))}")
    if checker in ("tokens", "numbers"):
        one, two = wrote.split(), wanted.split()
        near = checker == "numbers"
        return len(one) == len(two) and all(
            a == b or (near and _near(a, b, tolerance)) for a, b in zip(one, two, strict=True)
        )
    lines = _lines(wrote), _lines(wanted)
    return lines[0] == lines[1] or (checker == "any_order" and sorted(lines[0]) == sorted(lines[1]))


def _near(one: str, two: str, tolerance: float) -> bool:
    try:
        a, b = float(one), float(two)
    except ValueError:
        return False
    return math.isfinite(a) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

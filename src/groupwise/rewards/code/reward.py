"""Rewards for programs: they are run, in a sandbox, against the tests of the data row.

A program that fails, hangs, crashes, floods its output or attacks gets 0: that is its own doing.
Where the tests cannot be run (they do not compile, import what is not there, call nothing of the
program, or hand it an object that cannot leave their process) `Unjudgeable` is raised with the
reason: nobody can judge. Where the sandbox does not start,
`SandboxError` is raised, and where there is none, `UsageError`: neither says a thing about the
program.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.registry import checked_by
from groupwise.rewards.base import REWARDS, Unjudgeable, reads_rows, verifier
from groupwise.rewards.code.extraction import defined, extract_code, parsed
from groupwise.rewards.code.rows import (
    Case,
    Checker,
    call_source,
    cases_of,
    column,
    same_output,
    sources_of,
)
from groupwise.rewards.code.sandbox import Limits, Outcome, Suite, Verdict, run_inputs, run_tests
from groupwise.rewards.code.suite import judging


def _asserts(
    columns: Mapping[str, Any],
    tests: str = "test_list",
    setup: str = "test_setup_code",
    partial: bool = False,
) -> Suite:
    """The tests of a row of `code_asserts`."""
    sources = sources_of(column(columns, tests), tests)
    suite = Suite(sources=sources, setup=str(columns.get(setup) or ""), stop=not partial)
    return judging(suite) if sources else suite


@verifier
@reads_rows(_asserts)
@checked_by(Limits)
@REWARDS.register
def code_asserts(
    text: str,
    columns: Mapping[str, Any],
    *,
    tests: str = "test_list",
    setup: str = "test_setup_code",
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> float | None:
    """Whether a program passes assert statements, as in MBPP.

    Value: 1 if every test passes, else 0; with `partial` the share of tests that pass. Tests that
    pass whatever the program is, such as a lone import, are left out.

    Args:
        text: the completion; the program is found by `extract_code`.
        columns: the data row.
        tests: column with a list of tests, each Python source, or with one source.
        setup: column with source that runs before the tests; may be missing.
        partial: reward the share of tests.
        seconds: processor time for each test; see `Limits`.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1, or None: there is no test.

    Raises:
        UsageError: no such column, tests of another form, or no sandbox.
        Unjudgeable: the tests cannot be run, or say nothing about the program.
        SandboxError: the sandbox did not start.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> row = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]}
        >>> program = "def add(a, b): return a + b"
        >>> if not unavailable():
        ...     assert code_asserts(program, row, partial=True) == 0.5

    Source: Austin et al. 2021, the three asserts of each problem.
    Elsewhere: most graders append the asserts to the program and run both together, so that a
        program may read the expected values or return an object that equals everything.
    """
    suite = _asserts(columns, tests, setup, partial)
    if not suite.sources:
        return None
    wanted = sorted(
        {name for source in suite.sources for name in re.findall(r"\b(\w+)\s*\(", source)}
    )
    outcomes = run_tests(
        extract_code(text, defines=wanted),
        suite,
        limits=Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unsandboxed=allow_unsandboxed,
    )
    return share_passed(outcomes, len(suite.sources), partial=partial)


@dataclass(frozen=True, kw_only=True)
class _Function:
    """A row of `code_function`: the stub, the source of `check`, and the name of the function."""

    stub: str
    source: str
    name: str


def _function(
    columns: Mapping[str, Any],
    stub: str = "prompt",
    tests: str = "test",
    entry: str = "entry_point",
) -> _Function:
    """A row of `code_function`."""
    row = {key: column(columns, key) for key in (stub, tests, entry)}
    for key, value in row.items():
        if not isinstance(value, str):
            raise UsageError(
                f"code_function: column {key!r}: must be text, got {type(value).__name__}. "
                "For a list of asserts use code_asserts."
            )
    if not row[entry].isidentifier():
        raise UsageError(
            f"code_function: column {entry!r} = {row[entry]!r}: must be the name of a function."
        )
    tree = parsed(row[tests])
    if tree is None or not defined(row[tests], "check"):
        raise Unjudgeable(f"the tests in column {tests!r} do not compile or define no check()")
    if not any(map(_may_fail, ast.walk(tree))):
        raise Unjudgeable("check() has no assert, so every program passes")
    return _Function(stub=row[stub], source=row[tests], name=row[entry])


def _may_fail(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert | ast.Raise | ast.Call)


@verifier
@reads_rows(_function)
@checked_by(Limits)
@REWARDS.register
def code_function(
    text: str,
    columns: Mapping[str, Any],
    *,
    stub: str = "prompt",
    tests: str = "test",
    entry: str = "entry_point",
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> float | None:
    """Whether a function passes `check(function)`, as in HumanEval.

    The completion either defines the function or continues the stub. Helpers that the stub
    defines are the stub's own in the tests, whatever the completion makes of them.

    Value: 1 if `check` returns, else 0; with `partial` the asserts that hold, each time they run,
    as a share of those that ran, and at least of those in the source.

    Args:
        text: the completion; the program is found by `extract_code`.
        columns: the data row.
        stub: column with imports, helpers, signature and docstring.
        tests: column with source that defines `check(candidate)`.
        entry: column with the name of the function.
        partial: reward the share of asserts.
        seconds: processor time for each test; see `Limits`.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1.

    Raises:
        UsageError: no such column, one of another form, or no sandbox.
        Unjudgeable: the tests cannot be run, or say nothing about the program.
        SandboxError: the sandbox did not start.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> row = {"prompt": "def inc(x):\\n", "entry_point": "inc",
        ...        "test": "def check(candidate):\\n    assert candidate(1) == 2\\n"}
        >>> if not unavailable():
        ...     assert code_function("    return x + 1", row) == 1.0
        ...     assert code_function("    return None", row) == 0.0

    Source: Chen et al. 2021, `human_eval/execution.py`.
    Elsewhere: the original runs stub, completion and tests as one program in one process, and
        counts a program that ends the process with status 0 as failed only because it waits for a
        list to be filled.
    """
    row = _function(columns, stub, tests, entry)
    start, source, name = row.stub, row.source, row.name
    code = extract_code(text, defines=[name])
    whole = f"{_whole(start)}\n\n{code}" if defined(code, name) else start + code
    least = _count_asserts(source) if partial else 0
    body = f"{_counting(source) if least else source}\n\ncheck({name})\n"
    outcomes = run_tests(
        whole,
        Suite(
            sources=[body],
            setup=_definitions_used(start, source, name),
            entry=name,
            counted=least > 0,
        ),
        limits=Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unsandboxed=allow_unsandboxed,
    )
    return share_passed(outcomes, max(least, len(outcomes), 1), partial=partial)


def _cases(columns: Mapping[str, Any], tests: str = "tests") -> tuple[list[Case], str]:
    """The tests of a row of `code_stdio`."""
    return cases_of(column(columns, tests), tests, columns)


@verifier
@reads_rows(_cases)
@checked_by(Limits)
@REWARDS.register
def code_stdio(
    text: str,
    columns: Mapping[str, Any],
    *,
    tests: str = "tests",
    checker: Checker = "lines",
    tolerance: float = 1e-6,
    check_with: str = "",
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> float | None:
    """Whether a program writes the expected output for each input, as in programming contests.

    A program that ends with a status other than 0 fails. Rows that name a function (`fn_name` in
    APPS and TACO, tests of type "functional" or "function_call") call it, or that method of class
    Solution, instead.

    Value: 1 if every output is right, else 0; with `partial` the share of them.

    Args:
        text: the completion; the program is found by `extract_code`.
        columns: the data row.
        tests: column with `[{"input": …, "output": …}, …]` or `{"inputs": […], "outputs": […]}`
            (or "input", "output", as in CodeContests), or either as text.
        checker, tolerance: when an output is right: "lines", "tokens", "numbers" (with a tolerance)
            or "any_order"; see `same_output`.
        check_with: column with a program that defines `check(input, output, expected)`, for
            problems with several right outputs; it replaces `checker`.
        partial: reward the share of tests.
        seconds: processor time for each input; see `Limits`.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1, or None: there is no test.

    Raises:
        UsageError: no such column, tests of another form, or no sandbox.
        Unjudgeable: the row's own checker fails, on the expected output too.
        SandboxError: the sandbox did not start.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> row = {"tests": [{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "3"}]}
        >>> program = "a, b = map(int, input().split())\\nprint(a + b)"
        >>> if not unavailable():
        ...     assert code_stdio(program, row, partial=True) == 0.5
    """
    same_output("", "", checker=checker)
    cases, function = _cases(columns, tests)
    limits = Limits(seconds=seconds, memory_mb=memory_mb)
    if not cases:
        return None
    if function:
        outcomes = run_tests(
            extract_code(text, defines=[function, "Solution"]),
            Suite(sources=[call_source(function, case) for case in cases], stop=not partial),
            limits=limits,
            allow_unsandboxed=allow_unsandboxed,
        )
        return share_passed(outcomes, len(cases), partial=partial)
    judge = str(column(columns, check_with)) if check_with else ""
    runs = run_inputs(
        extract_code(text),
        [case.given for case in cases],
        stop=not partial,
        limits=limits,
        allow_unsandboxed=allow_unsandboxed,
    )
    right = 0
    for wrote, case in zip(runs, cases, strict=False):
        if not isinstance(wrote, str):
            passed = False
        elif judge:
            passed = _checked(judge, wrote, case, limits, allow_unsandboxed)
        else:
            passed = same_output(wrote, case.wanted, checker=checker, tolerance=tolerance)
        right += passed
        if not (passed or partial):
            runs.close()
            return 0.0
    return right / len(cases)


def _checked(judge: str, wrote: str, case: Case, limits: Limits, allow_unsandboxed: bool) -> bool:
    """What the row's own checker says of an output; one that it fails on is wrong, if it accepts
    the expected one.

    Raises:
        Unjudgeable: it fails on the expected output too.
    """

    def verdict(output: str) -> Outcome:
        [outcome] = run_tests(
            judge,
            Suite(sources=[f"assert check({case.given!r}, {output!r}, {case.wanted!r}) is True"]),
            limits=limits,
            allow_unsandboxed=allow_unsandboxed,
        )
        return outcome

    said = verdict(wrote).verdict
    if said in (Verdict.PASSED, Verdict.FAILED):
        return said is Verdict.PASSED
    expected = verdict(case.wanted)
    if expected.verdict is not Verdict.PASSED:
        raise Unjudgeable(f"the checker of the row fails: {expected.detail}")
    return False


def share_passed(outcomes: Sequence[Outcome], total: int, *, partial: bool) -> float:
    """What outcomes are worth: 1 or 0, or the share of tests that passed.

    Raises:
        Unjudgeable: a test is unfit.

    Example:
        >>> passed, failed = (Outcome(verdict=v) for v in (Verdict.PASSED, Verdict.FAILED))
        >>> share_passed([passed, failed], 4, partial=True)
        0.25
        >>> share_passed([passed, failed], 2, partial=False)
        0.0
    """
    for outcome in outcomes:
        if outcome.verdict is Verdict.UNJUDGEABLE:
            raise Unjudgeable(outcome.detail)
    passed = sum(outcome.verdict is Verdict.PASSED for outcome in outcomes)
    return passed / total if partial else float(passed == total)


def _whole(stub: str) -> str:
    """A stub that compiles by itself, so that a complete function may follow it."""
    return stub if parsed(stub) else f"{stub.rstrip()}\n    pass\n"


def _definitions_used(stub: str, tests: str, entry: str) -> str:
    """The stub, where the tests use something of it that is not the function under test."""
    tree, used = parsed(_whole(stub)), parsed(tests)
    if tree is None or used is None:
        return ""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    mentioned = {node.id for node in ast.walk(used) if isinstance(node, ast.Name)}
    return _whole(stub) if names & mentioned - {entry} else ""


def _count_asserts(source: str) -> int:
    tree = parsed(source)
    return sum(isinstance(node, ast.Assert) for node in ast.walk(tree)) if tree else 0


class _Counting(ast.NodeTransformer):
    """`assert x` becomes a report of whether it held, and the tests go on."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        report = (
            "try:\n    pass\nexcept Exception:\n    __count__(False)\nelse:\n    __count__(True)"
        )
        made = ast.parse(report).body[0]
        assert isinstance(made, ast.Try)
        made.body = [node]
        return made


def _counting(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Counting().visit(ast.parse(source))))

"""What programs do on inputs whose right output nobody knows, to compare programs by it.

A behaviour is what a program itself says, so it decides no verdict: a program that lies is put into
a cluster of its own.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.rewards.code.extraction import parsed
from groupwise.rewards.code.inside import called
from groupwise.rewards.code.rows import Case, call_source, cases_of, same_output, sources_of
from groupwise.rewards.code.sandbox import Limits, Outcome, Suite, Verdict, run_inputs, run_tests

Behaviour = tuple[str, ...]
"""For every input the output, or in angle brackets why there is none."""

_DOCTEST = re.compile(r"^[ \t]*>>>[ \t]*(?P<call>.+)\n[ \t]*(?P<wanted>\S.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests of a problem, in order.

    Attributes:
        function: that the tests call; "" where programs read standard input.
        sources: tests of a function, Python source each.
        cases: inputs and outputs of a main program.
    """

    __test__ = False  # for pytest, which takes classes of this name for test cases

    function: str = ""
    sources: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()

    def __len__(self) -> int:
        return len(self.sources) or len(self.cases)

    def __getitem__(self, part: slice) -> Tests:
        return Tests(function=self.function, sources=self.sources[part], cases=self.cases[part])


def read_tests(value: Any, *, column: str = "tests") -> Tests:
    """The tests of a data row.

    Args:
        value: a list of asserts, inputs with outputs as `code_stdio` reads them, text in which
            examples stand as in an interactive session (`>>> f(2)`), or messages with such text.
        column: its name, for messages.

    Returns:
        The tests; none for text without examples.

    Raises:
        UsageError: another form, or no call of a function in the asserts.

    Example:
        >>> read_tests(["assert area(2, 3) == 6"]).function
        'area'
        >>> read_tests('Adds one.\\n>>> inc(4)\\n5\\n').sources
        ('assert inc(4) == 5',)
        >>> len(read_tests([{"input": "1", "output": "2"}]).cases)
        1
    """
    if isinstance(value, list) and value and isinstance(value[0], dict) and "content" in value[0]:
        value = "\n".join(str(message["content"]) for message in value)
    if isinstance(value, str) and ">>>" in value:
        value = [
            f"assert {found['call'].strip()} == {found['wanted'].strip()}"
            for found in _DOCTEST.finditer(value)
            if _literal(found["wanted"]) is not None
        ]
    listed = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if value and (isinstance(value, str) or listed) and "assert" in str(value):
        sources = [each for each in sources_of(value, column) if parsed(each) is not None]
        name = _function_called(sources)
        if not name:
            raise UsageError(f"{column}: no test calls a function with literal arguments.")
        return Tests(function=name, sources=tuple(sources))
    if not value or (isinstance(value, str) and value.lstrip()[:1] not in ("[", "{")):
        return Tests()
    cases, function = cases_of(value, column)
    if not function:
        return Tests(cases=tuple(cases))
    return Tests(function=function, sources=tuple(call_source(function, case) for case in cases))


def arguments_of(tests: Tests) -> list[list[Any]]:
    """The literal arguments with which tests call their function.

    Example:
        >>> arguments_of(read_tests(["assert area(2, -3) == -6", "assert area(n, 1) == n"]))
        [[2, -3]]
    """
    found = [_literals(call) for call in _calls(tests.sources) if _name(call) == tests.function]
    return [each for each in found if each is not None]


def behaviour(
    program: str,
    inputs: Sequence[Any],
    *,
    function: str = "",
    limits: Limits | None = None,
    allow_unsandboxed: bool = False,
) -> Behaviour:
    """What a program does on inputs, in the sandbox.

    Args:
        program: Python source.
        inputs: standard inputs, or lists of arguments for `function`.
        function: to call; "" runs a main program.
        limits: see `Limits`.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        For every input the output without white space at the ends of lines, or `<error>`,
        `<timeout>`, `<flooded>`. A program that ran out of time once is not run again.

    Raises:
        UsageError: there is no sandbox.
        SandboxError: it did not start.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> if not unavailable():
        ...     assert behaviour("def f(x): return 6 / x", [[3], [0]], function="f") == (
        ...         "2", "<error>")
    """
    texts = list(inputs)
    if function:
        program = f"{inspect.getsource(called)}\nmain({program!r}, {function!r})\n"
        texts = [repr(list(each)) for each in inputs]
    said: list[str] = []
    runs = run_inputs(program, texts, limits=limits, allow_unsandboxed=allow_unsandboxed)
    with closing(runs):
        for wrote in runs:
            said.append(_shown(wrote))
            if isinstance(wrote, Outcome) and wrote.verdict is Verdict.TIMEOUT:
                break
    return tuple(said + said[-1:] * (len(texts) - len(said)))


def ended(each: str) -> bool:
    """Whether a program ended normally, by what it did on an input."""
    return not (each.startswith("<") and each[1:-1] in {v.value for v in Verdict})


def share_of_tests(
    program: str,
    tests: Tests,
    *,
    stop: bool = False,
    limits: Limits | None = None,
) -> float | None:
    """The share of tests that a program passes; None where there are none, or a test is unfit.

    Args:
        program: Python source.
        tests: of a function or a main program.
        stop: do not run the tests after the first that fails; the share is then below 1.
        limits: as in `behaviour`.

    Raises:
        UsageError: there is no sandbox.
        SandboxError: it did not start.
    """
    if not len(tests):
        return None
    if tests.cases:
        given = [case.given for case in tests.cases]
        said = behaviour(program, given, limits=limits)
        right = [
            ended(wrote) and same_output(wrote, case.wanted, checker="lines")
            for wrote, case in zip(said, tests.cases, strict=True)
        ]
        return sum(right) / len(right)
    outcomes = run_tests(program, Suite(sources=tests.sources, stop=stop), limits=limits)
    if any(outcome.verdict is Verdict.UNJUDGEABLE for outcome in outcomes):
        return None
    return sum(outcome.verdict is Verdict.PASSED for outcome in outcomes) / len(tests)


def _shown(wrote: str | Outcome) -> str:
    if isinstance(wrote, Outcome):
        return f"<{wrote.verdict.value}>"
    return "\n".join(line.rstrip() for line in wrote.rstrip().split("\n"))


def _function_called(sources: Sequence[str]) -> str:
    """The function under test: the name that most literal calls have."""
    names = Counter(_name(call) for call in _calls(sources) if _literals(call) is not None)
    return names.most_common(1)[0][0] if names else ""


def _calls(sources: Sequence[str]) -> list[ast.Call]:
    trees = [tree for source in sources if (tree := parsed(source)) is not None]
    return [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name(node) and not hasattr(builtins, _name(node))
    ]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _literals(call: ast.Call) -> list[Any] | None:
    if call.keywords:
        return None
    try:
        return [ast.literal_eval(each) for each in call.args]
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(text: str) -> str | None:
    """The text, where it is a literal."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return text

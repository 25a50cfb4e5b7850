"""Rewards for programs: they are run, in a sandbox, against the tests of the data row.

A program that fails, hangs, crashes, floods its output or attacks gets 0: that is its own doing.
Where the tests cannot be run (they do not compile, or they hand the program an object that cannot
leave their process) the value is None: nobody can judge. Where the sandbox does not start,
`SandboxError` is raised, and where there is none, `UsageError`: neither says a thing about the
program.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.rewards.base import REWARDS, verifier
from groupwise.rewards.code.sandbox import Limits, Outcome, Suite, Verdict, run_inputs, run_tests

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([\w+.-]*)")
_TAGS = ("answer", "code", "solution")
_PYTHON = {"", "python", "py", "python3", "py3"}


def extract_code(text: str, *, defines: Sequence[str] = ()) -> str:
    """The program in a completion.

    Reasoning that ends in `</think>` is left out, the last `<answer>`, `<code>` or `<solution>`
    element is taken where there is one. In what is left, the last fenced Python block that defines
    one of the wanted names wins, then the last Python block; a block that is never closed reaches
    to the end. Text without a block is the program itself.

    Args:
        text: the completion.
        defines: functions or classes that the tests use.

    Returns:
        Python source, perhaps none that compiles.

    Example:
        >>> extract_code("Try this:\\n```python\\ndef f():\\n    return 1\\n```\\nIt works.")
        'def f():\\n    return 1\\n'
        >>> extract_code("<think>`f`?</think><answer>def f(): return 1</answer>")
        'def f(): return 1'
        >>> extract_code("    return x + 1")
        '    return x + 1'
    """
    before, _, after = text.rpartition("</think>")
    text = after if after.strip() else before
    for tag in _TAGS:
        opening = text.rfind(f"<{tag}>")
        if opening >= 0:
            text = text[opening + len(tag) + 2 :].partition(f"</{tag}>")[0]
            break
    found = [code for language, code in _blocks(text) if language.lower() in _PYTHON]
    if not found:
        return text
    wanted = [code for code in found if any(_defines(code, name) for name in defines)]
    return (wanted or found)[-1]


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block, line by line: time grows with the text alone."""
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", []
    for line in text.split("\n"):
        bare = line.strip()
        if not fence:
            if opening := _FENCE.match(bare):
                fence, language, lines = opening[1], opening[2], []
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            blocks.append((language, "".join(f"{line}\n" for line in lines)))
            fence = ""
        else:
            lines.append(line)
    return [*blocks, (language, "\n".join(lines))] if fence else blocks


def _defines(code: str, name: str) -> bool:
    pattern = rf"^(?:async def|def|class)[ \t]+{re.escape(name)}\b"
    return re.search(pattern, code, re.M) is not None


@verifier
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

    Value: 1 if every test passes, else 0; with `partial` the share of tests that pass.

    Args:
        text: the completion; the program is found by `extract_code`.
        columns: the data row.
        tests: column with a list of tests, each Python source.
        setup: column with source that runs before the tests; may be missing.
        partial: reward the share of tests.
        seconds: wall-clock time for all tests; a program that needs longer fails those left.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1, or None: the tests cannot be run.

    Raises:
        UsageError: no such column, or no sandbox.
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
    sources = [str(test) for test in _column(columns, tests)]
    if not sources:
        return None
    wanted = sorted({name for source in sources for name in re.findall(r"\b(\w+)\s*\(", source)})
    outcomes = run_tests(
        extract_code(text, defines=wanted),
        Suite(sources=sources, setup=str(columns.get(setup) or ""), stop=not partial),
        limits=Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unsandboxed=allow_unsandboxed,
    )
    return share_passed(outcomes, len(sources), partial=partial)


@verifier
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

    The completion either defines the function or goes on where the stub ends. Helpers that the stub
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
        seconds: wall-clock time for all tests; a program that needs longer fails those left.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1, or None: the tests cannot be run.

    Raises:
        UsageError: no such column, or no sandbox.
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
    start, source, name = (str(_column(columns, key)) for key in (stub, tests, entry))
    code = extract_code(text, defines=[name])
    whole = f"{_whole(start)}\n\n{code}" if _defines(code, name) else start + code
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


@verifier
@REWARDS.register
def code_stdio(
    text: str,
    columns: Mapping[str, Any],
    *,
    tests: str = "tests",
    partial: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> float | None:
    """Whether a program writes the expected output for each input, as in programming contests.

    Outputs are equal if their lines are, white space at the ends of lines and empty lines at the
    end aside. A program that ends with a status other than 0 fails.

    Value: 1 if every output is right, else 0; with `partial` the share of them.

    Args:
        text: the completion; the program is found by `extract_code`.
        columns: the data row.
        tests: column with `[{"input": …, "output": …}, …]` or `{"inputs": […], "outputs": […]}`, or
            either as JSON text.
        partial: reward the share of tests.
        seconds: wall-clock time for all inputs; a program that needs longer fails those left.
        memory_mb: address space of the program, MiB.
        allow_unsandboxed: where there is no sandbox, run the program with this process's rights.

    Returns:
        0 to 1, or None: there is no test.

    Raises:
        UsageError: no such column, tests of another form, or no sandbox.
        SandboxError: the sandbox did not start.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> row = {"tests": [{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "3"}]}
        >>> program = "a, b = map(int, input().split())\\nprint(a + b)"
        >>> if not unavailable():
        ...     assert code_stdio(program, row, partial=True) == 0.5
    """
    inputs, outputs = _cases(_column(columns, tests), tests)
    if not inputs:
        return None
    runs = run_inputs(
        extract_code(text),
        inputs,
        limits=Limits(seconds=seconds, memory_mb=memory_mb),
        allow_unsandboxed=allow_unsandboxed,
    )
    right = 0
    for wrote, expected in zip(runs, outputs, strict=False):
        passed = isinstance(wrote, str) and _lines(wrote) == _lines(expected)
        right += passed
        if not passed and not partial:
            runs.close()
            break
    return right / len(inputs) if partial else float(right == len(inputs))


def share_passed(outcomes: Sequence[Outcome], total: int, *, partial: bool) -> float | None:
    """What outcomes are worth: 1 or 0, or the share of tests that passed; None if a test is unfit.

    Example:
        >>> passed, failed = (Outcome(verdict=v) for v in (Verdict.PASSED, Verdict.FAILED))
        >>> share_passed([passed, failed], 4, partial=True)
        0.25
        >>> share_passed([passed, failed], 2, partial=False)
        0.0
        >>> share_passed([passed, Outcome(verdict=Verdict.UNJUDGEABLE)], 2, partial=False)
    """
    if any(outcome.verdict is Verdict.UNJUDGEABLE for outcome in outcomes):
        return None
    passed = sum(outcome.verdict is Verdict.PASSED for outcome in outcomes)
    return passed / total if partial else float(passed == total)


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise UsageError(
            f"code reward: column = {name!r}: the data has none; {suggest(name, columns)}"
        )
    return columns[name]


def _cases(tests: Any, name: str) -> tuple[list[str], list[str]]:
    """Inputs and expected outputs, whichever way the row has them."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(tests, Mapping):
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        else:
            pairs = [(case["input"], case["output"]) for case in tests]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"code_stdio: column {name!r}: must be a list of {{input, output}} or "
            f"{{inputs: […], outputs: […]}} ({type(error).__name__}: {error})."
        ) from error
    return [_text(given) for given, _ in pairs], [_text(wanted) for _, wanted in pairs]


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _whole(stub: str) -> str:
    """A stub that compiles by itself, so that a complete function may follow it."""
    return stub if _parsed(stub) else f"{stub.rstrip()}\n    pass\n"


def _definitions_used(stub: str, tests: str, entry: str) -> str:
    """The stub, where the tests use something of it that is not the function under test."""
    tree, used = _parsed(_whole(stub)), _parsed(tests)
    if tree is None or used is None:
        return ""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    mentioned = {node.id for node in ast.walk(used) if isinstance(node, ast.Name)}
    return _whole(stub) if names & mentioned - {entry} else ""


def _count_asserts(source: str) -> int:
    tree = _parsed(source)
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

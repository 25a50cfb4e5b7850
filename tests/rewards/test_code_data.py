"""Faults of the data of code rewards: never the program's, never a pass, and the reason is kept."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.rewards import build_scorer
from groupwise.rewards.base import Unjudgeable
from groupwise.rewards.code.reward import code_asserts, code_function, code_stdio
from groupwise.rewards.code.sandbox import unavailable
from groupwise.rewards.scoring.rows import check_rows
from groupwise.settings import RewardSettings
from groupwise.types import Completion, Group, Prompt, Status

SECONDS = 30.0
PROGRAM = "def f(x):\n    return x + 1\n"

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")

IDLE = "every test passes whatever"
UNFIT = {
    "a module that is not there": (["import no_such\nassert f(1) == 2"], "", "import no_such"),
    "a name that is not there": (
        ["from math import nothing\nassert f(1)"],
        "",
        "nothing from math",
    ),
    "no package": (["from . import data\nassert f(1) == 2"], "", "no package"),
    "an import of the setup": (["assert f(1) == 2"], "import no_such", "import no_such"),
    "a file of the setup": (["assert f(1) == d"], "d = open('/no').read()", "setup.*FileNotFound"),
    "no syntax": (["assert f(1) == 2", "assert ("], "", "does not compile"),
    "a function that nobody calls": (["def test_f():\n    assert f(1) == 3"], "", IDLE),
    "no assert": (["f(1) == 3"], "", IDLE),
    "nothing of the program": (["assert True"], "", IDLE),
    "the program as a module": (["from solution import f\nassert f(1) == 2"], "", IDLE),
}


@sandboxed
@pytest.mark.parametrize("fault", UNFIT)
def test_a_fault_of_the_tests_is_not_the_program_s(fault: str) -> None:
    sources, setup, reason = UNFIT[fault]
    row = {"test_list": sources, "test_setup_code": setup}
    for program in (PROGRAM, "nonsense", "def f(x): raise SystemExit"):
        with pytest.raises(Unjudgeable, match=reason):
            code_asserts(program, row, seconds=SECONDS)


@sandboxed
def test_tests_that_pass_whatever_the_program_is_pay_nothing() -> None:
    row = {"test_list": ["import math", "assert f(1) == 2", "assert math.pi > 3"]}
    assert code_asserts(PROGRAM, row, seconds=SECONDS) == 1.0
    assert code_asserts("def f(x): return 0", row, partial=True, seconds=SECONDS) == 0.0


@sandboxed
def test_a_setup_that_needs_the_program_may_fail_by_it() -> None:
    row = {"test_list": ["assert made == 2"], "test_setup_code": "made = f(1)"}
    assert code_asserts(PROGRAM, row, seconds=SECONDS) == 1.0
    assert code_asserts("def g(x): return x", row, seconds=SECONDS) == 0.0


@sandboxed
@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"test": "def chek(candidate):\n    assert candidate(1) == 2"}, Unjudgeable, "no check"),
        ({"test": "def check(candidate)\n    assert candidate(1)"}, Unjudgeable, "not compile"),
        ({"test": "def check(candidate):\n    pass"}, Unjudgeable, "no assert"),
        ({"test": ["assert f(1) == 2"]}, UsageError, "'test': must be text, got list"),
        ({"entry_point": None}, UsageError, "'entry_point': must be text, got NoneType"),
        ({"entry_point": ""}, UsageError, "must be the name of a function"),
    ],
)
def test_rows_of_functions_are_checked(
    changed: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": test}
    assert code_function(PROGRAM, row, seconds=SECONDS) == 1.0
    with pytest.raises(kind, match=reason):
        code_function(PROGRAM, row | changed, seconds=SECONDS)


@sandboxed
@pytest.mark.parametrize(
    "tests",
    [
        {"input": ["1", "2"], "output": ["2", "3"]},  # CodeContests
        "{'inputs': ['1', '2'], 'outputs': ['2', '3']}",  # a Python literal
        [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}],
    ],
)
def test_forms_of_inputs_and_outputs(tests: Any) -> None:
    assert code_stdio("print(int(input()) + 1)", {"tests": tests}, seconds=SECONDS) == 1.0
    assert code_stdio("print(int(input()))", {"tests": tests}, seconds=SECONDS) == 0.0


@sandboxed
def test_rows_of_calls_name_their_function_in_each_test() -> None:
    tests = [{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}]
    assert code_stdio(PROGRAM, {"tests": tests}, seconds=SECONDS) == 1.0
    assert code_stdio("def f(x): return x", {"tests": tests}, seconds=SECONDS) == 0.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (["assert f(1) == 2"], "must be a list of {input, output}"),
        ([{"input": "1", "expected": "2"}], "KeyError: 'output'"),
        ({"inputs": "12", "outputs": "23"}, "inputs must be a list, got str"),
        ({"inputs": ["1"], "outputs": ["2", "3"]}, "ValueError"),
        ([{"input": None, "output": "2"}], "is null"),
        ([{"testtype": "interactive", "input": "1", "output": "2"}], "type = 'interactive'"),
        ([{"testtype": "functional", "input": "1", "output": "2"}], "need fn_name"),
        (
            [
                {"type": "functional", "fn_name": "f", "input": [1], "output": 2},
                {"type": "stdin", "input": "1", "output": "2"},
            ],
            "of one type",
        ),
        ("", "JSONDecodeError"),
        (None, "TypeError"),
    ],
)
def test_unknown_forms_are_refused(tests: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        code_stdio("print(2)", {"tests": tests}, seconds=SECONDS)


# Before and in a run ------------------------------------------------------------------------------


def prompts(*tests: Any) -> list[Prompt]:
    return [Prompt(id=f"p{n}", text="?", columns={"tests": t}) for n, t in enumerate(tests)]


@pytest.mark.parametrize(
    "settings", [{"name": "code_stdio"}, {"name": "code_asserts", "tests": "tests"}]
)
def test_data_that_no_program_can_be_judged_by_is_refused_before_the_run(
    settings: dict[str, Any],
) -> None:
    scorer = build_scorer([RewardSettings(**settings)])
    good = [{"input": "1", "output": "2"}] if "stdio" in settings["name"] else ["assert f(1)"]
    assert check_rows(scorer, prompts(good, good), where="data.train") == []
    label = settings["name"]
    with pytest.raises(UsageError, match=f"data.train: {label} can judge no row: .*'tests'"):
        check_rows(scorer, prompts({"a": 1}, {"b": 2}), where="data.train")
    with pytest.raises(UsageError, match=f"{label} can judge no row: code reward: column"):
        check_rows(scorer, [Prompt(id="p", text="?")], where="data.eval")
    [line] = check_rows(scorer, prompts(good, {"b": 2}), where="data.train")
    assert line.startswith(f"data.train: {label} cannot judge 1 of the first 2 rows, such as 'p1'")


@sandboxed
@pytest.mark.parametrize("optional", [False, True])
def test_the_reason_is_kept_with_the_completion(optional: bool) -> None:
    parts = [RewardSettings(name="code_asserts", optional=optional, seconds=SECONDS)]
    with build_scorer([*parts, RewardSettings(name="untruncated")]
                      if optional else parts) as scorer:  # fmt: skip
        made = Completion(tokens=[1], mask=[True], logprobs=[-1.0], text=PROGRAM, finish="stop")
        rows = (["assert f(1) == 2"], ["import no_such\nassert f(1) == 2"])
        groups = [
            Group(
                prompt=Prompt(id="p", text="?", columns={"test_list": tests}),
                prompt_tokens=[1],
                completions=(made,),
            )
            for tests in rows
        ]
        scores = scorer.gather([scorer.submit(group) for group in groups])
    if optional:
        assert scores.status == ((Status.OK,), (Status.OK,))
        return
    assert scores.status == ((Status.OK,), (Status.UNJUDGEABLE,))
    assert scores.errors == (
        "code_asserts: a test cannot import no_such: No module named 'no_such'",
    )

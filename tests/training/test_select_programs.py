"""Programs are chosen by what they do: clusters of equal behaviour, examples first, then size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import UsageError
from groupwise.evaluation.submissions import submission_figures
from groupwise.pipelines import read_pipeline, run_pipeline
from groupwise.rewards.code.behaviour import arguments_of, behaviour, read_tests, share_of_tests
from groupwise.rewards.code.mutation import mutated_arguments, mutated_texts
from groupwise.rewards.code.sandbox import Limits, unavailable
from groupwise.training.stages.rows import read_samples
from groupwise.training.stages.select_programs import Selection, rank_programs, select_programs
from small_runs import Quiet

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")
SECONDS = 20.0  # a loaded machine must not turn an answer into a time-out

TESTS = ["assert top([3, 1, 2]) == 3", "assert top([1, 9]) == 9", "assert top([1, 2, 5]) == 5"]
BODIES = [
    "return a[0]",
    "return a[0] if a else None",
    "raise ValueError",
    "return sorted(a)[-1]",
    "return max(a)",
    "return max(a[:2])",
    "return a[0]",
    "return max(a) * 1.0",
]
"""The first element (passes the example), the largest, and programs that fail."""


def rows(id: Any = 0) -> list[dict[str, Any]]:
    return [
        {"id": id, "completion": f"def top(a):\n    {body}", "test_list": TESTS} for body in BODIES
    ]


def selection(inputs: int = 12, **settings: Any) -> Selection:
    return Selection(seconds=SECONDS, inputs=inputs, **settings)


@sandboxed
def test_equal_behaviour_makes_a_cluster_and_hidden_tests_decide() -> None:
    ranked = rank_programs(rows(), read_tests(TESTS), selection=selection(shown=2))
    bodies = [row["completion"].split("\n    ", 1)[1] for row in ranked]
    assert bodies[0] == "return sorted(a)[-1]"  # of the largest cluster that passes both examples
    assert (ranked[0]["cluster_size"], ranked[0]["examples"], ranked[0]["correct"]) == (3, 1.0, 1.0)
    assert bodies[1] == "return max(a[:2])"
    assert (ranked[1]["cluster_size"], ranked[1]["correct"]) == (1, 0.0)
    assert bodies[2] == "return a[0]"  # half of the examples
    assert [row["correct"] for row in ranked if row["cluster"] == 0] == [1.0] * 3
    assert bodies[3] == "raise ValueError"
    assert [row["submission"] for row in ranked] == list(range(1, 9))
    assert sorted(row["majority"] for row in ranked) == list(range(1, 9))


@sandboxed
def test_main_programs_are_distinguished_by_inputs_of_a_generator() -> None:
    cases = [{"input": "1 1", "output": "2"}, {"input": "3 4", "output": "7"}]
    bodies = ("a * 2 * b", "a + b", "b + a", "a + b + 0 * (a // b)")
    programs = [f"a, b = map(int, input().split())\nprint({body})" for body in bodies]
    generator = "import random\nrandom.seed(int(input()))\nprint(random.randint(1, 9), 0)"
    given = [{"id": 1, "completion": p, "tests": cases, "generator": generator} for p in programs]
    ranked = rank_programs(given, read_tests(cases), selection=selection())
    assert [row["completion"] for row in ranked[:3]] == [programs[1], programs[0], programs[3]]
    assert [row["cluster_size"] for row in ranked] == [
        2,
        1,
        1,
        2,
    ]  # b = 0 distinguishes the last one
    assert [row["correct"] for row in ranked] == [1.0, 0.0, 1.0, 1.0]


@sandboxed
def test_a_stopped_file_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for n in range(3) for row in rows(n)[:2]))
    whole = select_programs(
        source, tmp_path / "whole.jsonl", selection=selection(2), workers=1, progress=Quiet()
    )
    part = tmp_path / "part.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:2]) + lines[2][:20])
    origin = json.loads((tmp_path / "whole.origin.json").read_text())
    unfinished = {k: v for k, v in origin.items() if k not in ("finished", "problems")}
    (tmp_path / "part.origin.json").write_text(json.dumps(unfinished))
    select_programs(source, part, selection=selection(2), workers=1, progress=Quiet())
    assert part.read_bytes() == whole.read_bytes()
    with pytest.raises(UsageError, match="made with selection"):
        select_programs(source, part, selection=selection(shown=2), progress=Quiet())
    with pytest.raises(UsageError, match="none of the 3 rows has tests"):
        select_programs(source, tmp_path / "x.jsonl", selection=selection(tests="completion"))
    with pytest.raises(UsageError, match="no such column"):
        select_programs(source, tmp_path / "x.jsonl", selection=selection(tests="asserts"))


@sandboxed
def test_a_stage_selects_programs(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    file = tmp_path / "p.toml"
    file.write_text(
        "[[stages]]\nname = 'chosen'\nstage = 'select-programs'\n"
        f"rows = '{source}'\nshown = 2\ninputs = 4\nseconds = {SECONDS}\n"
    )
    run_pipeline(read_pipeline(file, output=tmp_path / "out"), progress=Quiet())
    record = json.loads((tmp_path / "out" / "chosen" / "stage.json").read_text())
    assert record["figures"]["pass_rate"]["selected"] == 1.0
    assert record["figures"]["pass_rate"]["random"] == 0.375
    found = read_samples(tmp_path / "out" / "chosen" / "rows.jsonl")
    assert found[0]["submission"] == 1 and found[0]["correct"] == 1.0


def test_the_curve_of_submissions_is_an_exact_expectation_for_random_orders() -> None:
    given = [
        {"id": 1, "correct": c, "submission": s, "majority": m, "examples": e}
        for c, s, m, e in ((0, 3, 1, 0.0), (1, 2, 4, 1.0), (0, 1, 2, 1.0), (0, 4, 3, 0.5))
    ]
    found = submission_figures(given, submissions=(1, 2, 3))
    values = {k: {n: e.value for n, e in each.items()} for k, each in found.items()}
    assert values["submissions = 1"] == {
        "selected": 0.0, "examples": 0.5, "majority": 0.0, "random": 0.25, "gain": -0.25,
    }  # fmt: skip
    assert values["submissions = 2"]["selected"] == values["submissions = 2"]["examples"] == 1.0
    assert values["submissions = 3"]["random"] == 0.75
    assert values["submissions = 4"]["majority"] == 1.0
    with pytest.raises(UsageError, match="none was judged"):
        submission_figures([{"id": 1, "correct": None}])


@pytest.mark.parametrize(
    ("value", "function", "count"),
    [
        (["assert set(f((1, 2))) == set((2, 1))", "assert f([]) == []"], "f", 2),
        ("Sum.\n>>> add(1, 2)\n3\n>>> add(x, 2)\nNameError: x\n", "add", 1),
        ([{"role": "user", "content": '    >>> inc(1)\n    2\n    """'}], "inc", 1),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, "add", 1),
        ([{"input": "1", "output": "1"}], "", 1),
        ([], "", 0),
        ("Adds one; 1 becomes 2.", "", 0),
    ],
)
def test_tests_are_read_from_every_form(value: Any, function: str, count: int) -> None:
    found = read_tests(value)
    assert (found.function, len(found)) == (function, count)


def test_arguments_are_those_of_the_function_under_test() -> None:
    found = read_tests(["assert math.isclose(f(1.5, [2]), g(3))", "assert f(2, [0]) == len('ab')"])
    assert (found.function, arguments_of(found)) == ("f", [[1.5, [2]], [2, [0]]])
    with pytest.raises(UsageError, match="no test calls"):
        read_tests(["assert x == 1"])


def test_mutations_keep_types_and_are_reproducible() -> None:
    import random

    known = [[[3, 1], "ab", 2.5, {"k": 1}, (True, None)]]
    made = mutated_arguments(known, 40, random.Random(1))
    assert made == mutated_arguments(known, 40, random.Random(1))
    assert len({repr(each) for each in made} | {repr(known[0])}) == 41
    assert all([type(x) for x in each] == [list, str, float, dict, tuple] for each in made)
    texts = mutated_texts(["3\n1 2 3\n"], 30, random.Random(1))
    assert len(set(texts)) == 30 and all(text.startswith("3\n") for text in texts)


@sandboxed
def test_a_program_cannot_hide_behind_prints_or_run_on() -> None:
    limits = Limits(seconds=1.0)
    loud = "print('x')\ndef f(n):\n    print(n)\n    return {2, 1}"
    assert behaviour(loud, [[1]], function="f", limits=Limits(seconds=SECONDS)) == ("{1, 2}",)
    endless = "def f(n):\n    while n: pass\n    return n"
    said = behaviour(endless, [[0], [1], [0]], function="f", limits=limits)
    assert said == ("0", "<timeout>", "<timeout>")
    assert share_of_tests(endless, read_tests(["assert f(0) == 0", "assert f(1) == 1"]),
                          limits=limits) == 0.5  # fmt: skip

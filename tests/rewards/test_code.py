"""Rewards for code: finding the program, partial credit, and the published solutions."""

from __future__ import annotations

import ast
import gzip
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from data_folder import data_file
from groupwise.config import load
from groupwise.config.connect import make_scorer
from groupwise.config.data import load_eval, load_train
from groupwise.errors import UsageError
from groupwise.registry import spec
from groupwise.rewards import REWARDS
from groupwise.rewards.base import Unjudgeable
from groupwise.rewards.code.reward import code_asserts, code_function, code_stdio, extract_code
from groupwise.rewards.code.sandbox import unavailable
from groupwise.types import Completion, Group

SECONDS = 30.0  # generous: a loaded machine must not turn a right program into a wrong one

sandboxed = pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox: {unavailable()}")


# Finding the program ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(): return 1", "def f(): return 1"),
        ("```python\nA\n```", "A\n"),
        ("```\nA\n```", "A\n"),
        ("~~~py\nA\n~~~", "A\n"),
        ("```python\nA\n```\nor better\n```python\nB\n```", "B\n"),
        ("```python\nA\n```\nwhich prints\n```text\n42\n```", "A\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\nA\nB", "A\nB"),  # cut off by the token limit
        ("<think>```python\nA\n```</think>\n```python\nB\n```", "B\n"),
        ("<think>\n```python\nA\n```</think>", "A\n"),
        ("<answer>A</answer>", "A"),
        ("<answer>\n```python\nA\n```\n</answer>", "A\n"),
        ("I write <code>A</code>.", "A"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("- step:\n  ```python\n  if A:\n    B\n  ```", "if A:\n  B\n"),
        ("```python3.11\nA\n```", "A\n"),
        ("```python\nA\n```<|im_end|>", "A\n"),
        ("```python\nA\n```<|im_end|>\nB", "A\n"),
        ("```python\nA\n```<｜end▁of▁sentence｜>", "A\n"),
        ("```python\nA\n```[/INST]</s>\nB", "A\n"),
        ("A<｜end▁of▁sentence｜>", "A"),
        (
            "```\nn = int(input())\nprint(n)\n```\nOutput:\n```\n42\n```",
            "n = int(input())\nprint(n)\n",
        ),
        ("```python\nprint(1)\n```\n```\n1\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```\nx = 3\n```", "print(1)\n"),
        ("```py\nA\n```\n```python\nB =\n```", "A\n"),
        ("```python\ndef g(): pass\n```\n```\ndef f(): pass\n```", "def f(): pass\n"),
        ("```python\nf = lambda: 1\n```\nUse it:\n```python\nf()\n```", "f = lambda: 1\n"),
        ("```python\ndef f(): pass\n```\n```python\nf = f()\n```", "def f(): pass\n"),
        (
            "```python\nimport math\nfrom os import path\n```\n"
            "```python\ndef f(): return math.pi\n```",
            "import math\ndef f(): return math.pi\n",
        ),
        ("```python\nimport re\n```\n```python\nimport re\nre.A\n```", "import re\nre.A\n"),
        ("", ""),
        # what can pass comes before the label, and the label before the place
        ("```\ndef f(): pass\n```\n```python\ndef f(:\n```", "def f(): pass\n"),
        ("```\ndef f(): pass\n```\n```python\nprint(f())\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\n```\ndef f(): return\n```", "def f(): pass\n"),
        ("```python\nf = partial(g)\n```\n```python\nprint(f())\n```", "f = partial(g)\n"),
        ("```python\nfrom m import f\n```\n```python\nf()\n```", "from m import f\n"),
        (
            "```python\ntry:\n  from m import f\nexcept E:\n  f = g\n```\n```python\nf()\n```",
            "try:\n  from m import f\nexcept E:\n  f = g\n",
        ),
        # marks and tags that belong to the program
        ("```python\nx = y[INST]\nz\n```", "x = y[INST]\nz\n"),
        ("def f(y):\n    return y[INST]\n", "def f(y):\n    return y[INST]\n"),
        ('```python\nA = """<|user|>\n<|end|>\n"""\n```', 'A = """<|user|>\n<|end|>\n"""\n'),
        ("```python\nA\n```<|im_end|>user: next", "A\n"),
        ("a</think>\n```python\nx = '</think>'\n```", "x = '</think>'\n"),
        ("```python\nx = y.split('<answer>')\n```", "x = y.split('<answer>')\n"),
        (
            "<answer>\n```python\nx = '<code></code></answer>'\n```\n</answer>",
            "x = '<code></code></answer>'\n",
        ),
        ("x = '<answer>'", "x = '<answer>'"),
        ("    return '<answer>'", "    return '<answer>'"),
        (
            "```python\ndef f():\n    '\\\n    ```\n    '\n```",
            "def f():\n    '\\\n    ```\n    '\n",
        ),
    ],
)
def test_the_program_is_found(text: str, code: str) -> None:
    assert extract_code(text, defines=["f"]) == code


def test_the_program_is_found_in_long_hostile_texts_at_once() -> None:
    began = time.process_time()
    pieces = (
        "`",
        "```python\n",
        "<answer>",
        "```\n`` \n",
        "</think>",
        "~~~\n\n",
        "def f ",
        "</s>",
        "<code>",
        "</think> ",
        "```python\n'</think>'\n```\n",
        "if x:\n ",
    )
    for piece in pieces:
        assert isinstance(extract_code(piece * 50_000 + "x", defines=["f"]), str)
    assert time.process_time() - began < 60, "a search that is quadratic takes hours"


# One row of each kind -----------------------------------------------------------------------------

STUB = {
    "prompt": 'import math\n\ndef area(r):\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": (
        "def check(candidate):\n"
        "    assert abs(candidate(1) - 3.14159) < 1e-4\n"
        "    assert candidate(0) == 0\n"
        "    for r in (2, 3):\n"
        "        assert candidate(r) > 12\n"
    ),
}


@sandboxed
def test_a_function_may_be_continued_or_written_whole() -> None:
    assert code_function("    return math.pi * r * r", STUB, seconds=SECONDS) == 1.0
    whole = "```python\ndef area(r):\n    return math.pi * r * r\n```"  # uses the stub's import
    assert code_function(whole, STUB, seconds=SECONDS) == 1.0
    assert code_function("    return None", STUB, seconds=SECONDS) == 0.0
    assert code_function("The area is pi r squared.", STUB, seconds=SECONDS) == 0.0
    assert code_function("", STUB, seconds=SECONDS) == 0.0


@sandboxed
def test_partial_credit_of_a_function_counts_asserts() -> None:
    # Three asserts in the source, the last of which runs twice: four checks.
    def share(body: str) -> float | None:
        return code_function(body, STUB, partial=True, seconds=SECONDS)

    assert share("    return math.pi * r * r") == 4 / 4
    assert share("    return 13 * r") == 3 / 4  # fails only the first
    assert share("    return 0") == 1 / 4
    assert share("    return None") == 0.0  # every assert raises: > needs a number
    assert share("    if r == 3: exit()\n    return 13 * r") == pytest.approx(2 / 4)
    # Stopped in the third check: two passed, and the source has three asserts.
    slow = "    while r == 2: pass\n    return math.pi * r * r"
    assert code_function(slow, STUB, partial=True, seconds=1.0) == pytest.approx(2 / 3)


@sandboxed
def test_helpers_of_the_stub_are_the_stub_s_in_the_tests() -> None:
    row = {
        "prompt": "def norm(x):\n    return abs(x)\n\ndef neg(x):\n    return -x\n\ndef f(x):\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert norm(candidate(3) - 9) == 0\n",
    }
    assert code_function("    return x * x", row, seconds=SECONDS) == 1.0
    forged = "def norm(x):\n    return 0\n\ndef f(x):\n    return 1\n"
    assert code_function(forged, row, seconds=SECONDS) == 0.0


@sandboxed
def test_asserts_whole_and_in_part() -> None:
    row = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 1", "assert add(2, 2) == 4"]}
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    assert code_asserts(program, row, seconds=SECONDS) == 0.0
    assert code_asserts(program, row, partial=True, seconds=SECONDS) == pytest.approx(2 / 3)
    assert code_asserts(program, {"test_list": []}) is None
    with pytest.raises(Unjudgeable, match="does not compile"):
        code_asserts(program, {"test_list": ["assert ("]})
    own = {"checks": ["assert root.v == 3"], "before": "root = Node(3)"}
    node = "class Node:\n    def __init__(self, v): self.v = v"
    assert code_asserts(node, own, tests="checks", setup="before", seconds=SECONDS) == 1.0


@sandboxed
@pytest.mark.parametrize("as_text", [False, True])
def test_stdio_whole_and_in_part(as_text: bool) -> None:
    def row(tests: Any) -> dict[str, Any]:
        return {"tests": json.dumps(tests) if as_text else tests}

    pairs = row([{"input": "1 2", "output": "3\n"}, {"input": "2 2", "output": "5"}])
    program = "print(sum(map(int, input().split())), ' \\n')"
    assert code_stdio(program, pairs, seconds=SECONDS) == 0.0
    assert code_stdio(program, pairs, partial=True, seconds=SECONDS) == 0.5
    lists = row({"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]})
    assert code_stdio(program, lists, seconds=SECONDS) == 1.0
    assert code_stdio("print(3)\nprint(4)", lists, partial=True, seconds=SECONDS) == 0.0
    assert code_stdio(program, row([]), seconds=SECONDS) is None


@sandboxed
def test_outputs_may_be_compared_in_other_ways() -> None:
    def score(wrote: str, wanted: str, **settings: Any) -> float | None:
        row = {"tests": [{"input": "7", "output": wanted}], **settings.pop("row", {})}
        return code_stdio(f"print({wrote!r})", row, seconds=SECONDS, **settings)

    assert score("1  2", "1\n2") == 0.0 and score("1  2", "1\n2", checker="tokens") == 1.0
    assert score("0.33333333", "0.3333333") == 0.0
    assert score("0.33333333", "0.3333333", checker="numbers") == 1.0
    assert score("0.34", "0.3333333", checker="numbers") == 0.0
    assert score("0.34", "0.3333333", checker="numbers", tolerance=0.1) == 1.0
    assert score("nan", "0.3", checker="numbers") == 0.0
    assert score("b\na", "a\nb") == 0.0 and score("b\na", "a\nb", checker="any_order") == 1.0
    judge = "def check(input, output, expected): return int(output) % int(input) == 0"
    own: dict[str, Any] = {"check_with": "judge", "row": {"judge": judge}}
    assert score("14", "7", **own) == 1.0
    own["row"] = {"judge": judge}
    assert score("15", "7", **own) == 0.0
    own["row"] = {"judge": judge}
    assert score("fifteen", "7", **own) == 0.0  # an output that the checker cannot read
    own["row"] = {"judge": "def check(*a): return missing"}
    with pytest.raises(Unjudgeable, match="checker of the row fails: NameError.*missing"):
        score("15", "7", **own)
    with pytest.raises(UsageError, match="checker = 'token'.*did you mean tokens"):
        score("1", "1", checker="token")


@sandboxed
def test_rows_that_name_a_function_call_it() -> None:
    apps = {"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [3, [[3, 4]]]}
    live = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    for program in (
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ):
        assert code_stdio(program, {"tests": apps}, seconds=SECONDS) == 1.0
        row = {"tests": json.dumps(live), "metadata": '{"func_name": "add"}'}
        assert code_stdio(program, row, seconds=SECONDS) == 1.0
    wrong = "def add(a, b): return 3"
    assert code_stdio(wrong, {"tests": apps}, partial=True, seconds=SECONDS) == 0.5
    with pytest.raises(UsageError, match="func_name"):
        code_stdio(wrong, {"tests": live})
    with pytest.raises(UsageError, match="fn_name"):
        code_stdio(wrong, {"tests": {**apps, "fn_name": "f()"}})


@sandboxed
@pytest.mark.parametrize("tests", ["assert f() == 1", "['assert f() == 1']", ("assert f() == 1",)])
def test_asserts_may_be_one_source_or_a_list_as_text(tests: Any) -> None:
    assert code_asserts("def f(): return 1", {"test_list": tests}, seconds=SECONDS) == 1.0
    assert code_asserts("def f(): return 2", {"test_list": tests}, seconds=SECONDS) == 0.0


@pytest.mark.parametrize("tests", [3, {"input": "1"}, [{"input": "1"}], [1], None])
def test_asserts_of_another_form_are_refused(tests: Any) -> None:
    with pytest.raises(UsageError, match="'test_list': must be a list of test sources"):
        code_asserts("def f(): return 1", {"test_list": tests})


@pytest.mark.parametrize("tests", [[{"input": "1"}], {"inputs": ["1"]}, "no json", 3, [1]])
def test_tests_of_another_form_are_refused(tests: Any) -> None:
    with pytest.raises(UsageError, match="tests"):
        code_stdio("print(1)", {"tests": tests})


def test_a_missing_column_is_named() -> None:
    with pytest.raises(UsageError, match=r"'test_list'.*did you mean tests_list"):
        code_asserts("x", {"tests_list": []})


@sandboxed
def test_a_recipe_finds_them_by_name() -> None:
    reward = REWARDS.bind(spec("code_asserts", partial=True, seconds=SECONDS))
    row = {"test_list": ["assert f() == 1", "assert f() == 2"]}
    assert reward({"text": "def f(): return 1", "columns": row}) == 0.5


# The published data -------------------------------------------------------------------------------


def scores(
    function: Callable[..., float | None], cases: list[tuple[str, dict[str, Any]]]
) -> list[float | None]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda case: function(*case, seconds=SECONDS), cases))


def humaneval() -> list[dict[str, Any]]:
    with gzip.open(data_file("humaneval/HumanEval.jsonl.gz"), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def mbpp() -> list[dict[str, Any]]:
    lines = data_file("mbpp/mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def nothing(code: str) -> str:
    """A program with the same functions, which all return None."""
    names = {n.name for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef)}
    return "".join(f"def {name}(*a, **k):\n    return None\n" for name in sorted(names))


EVERY = pytest.mark.parametrize(
    "step", [8, pytest.param(1, marks=pytest.mark.verify)], ids=["sample", "all"]
)


@sandboxed
@EVERY
def test_published_solutions_of_humaneval_pass_and_doing_nothing_does_not(step: int) -> None:
    rows = humaneval()
    assert len(rows) == 164
    rows, none = rows[::step], "    return None\n"
    right = scores(code_function, [(row["canonical_solution"], row) for row in rows])
    assert right == [1.0] * len(rows)
    assert scores(code_function, [(none, row) for row in rows]) == [0.0] * len(rows)


@sandboxed
@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in the published programs
@EVERY
def test_published_solutions_of_mbpp_pass_and_doing_nothing_does_not(step: int) -> None:
    rows = mbpp()
    assert len(rows) == 974
    rows = rows[::step]
    assert scores(code_asserts, [(row["code"], row) for row in rows]) == [1.0] * len(rows)
    assert scores(code_asserts, [(nothing(row["code"]), row) for row in rows]) == [0.0] * len(rows)


# The recipes --------------------------------------------------------------------------------------


@sandboxed
@pytest.mark.parametrize("recipe", ["humaneval", "mbpp"])
def test_the_recipes_read_the_published_files_and_pay_right_programs(
    recipe: str, tmp_path: Path
) -> None:
    rows = humaneval() if recipe == "humaneval" else mbpp()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    config = load(recipe, [f"data.train={path}", f"data.eval={path}", "data.limit=40"])
    prompts = load_train(config)
    assert len(prompts) == 40 and load_eval(config)
    with make_scorer(config) as scorer:
        for prompt, row in list(zip(prompts, rows, strict=False))[::13]:
            code = (
                row["prompt"] + row["canonical_solution"] if recipe == "humaneval" else row["code"]
            )
            right = f"Here it is:\n```python\n{code}\n```"
            texts = [right, "", "```python\nx = 1\n```", right[:-40], "Lorem ipsum"]
            completions = tuple(
                Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
                for text in texts
            )
            group = Group(prompt=prompt, prompt_tokens=[1], completions=completions)
            score = scorer.submit(group).result()
            assert [s.value for s in score.status] == ["ok"] * 5, score.errors
            assert score.correct[0] == score.total[0] == 1.0, (str(prompt), score)
            assert list(score.correct[1:3]) == [0.0, 0.0] and score.correct[4] == 0.0
    shown = str(prompts[0])
    assert (rows[0]["prompt"] if recipe == "humaneval" else rows[0]["test_list"][0]) in shown


def test_the_pool_s_clock_is_longer_than_the_program_s() -> None:
    for recipe in ("humaneval", "mbpp"):
        config = load(recipe)
        assert config.reward_pool.workers > 0
        assert config.reward_pool.timeout_s >= 2 * config.rewards[0].settings["seconds"]

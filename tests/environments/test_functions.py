"""Functions as tools: calls are checked, mistakes are told, failures are failures."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import load
from groupwise.config.data import rendered
from groupwise.environments import ENVIRONMENTS, FunctionEnvironment, Reply
from groupwise.errors import UsageError
from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt, Status, Stream
from small_runs import noisy
from tool_callers import TEMPLATE


def multiply(a: float, b: float = 2) -> float:
    return a * b


def lookup(key: str) -> dict[str, int]:
    return {key: {"x": 1}[key]}


def broken() -> None:
    raise ConnectionError("gone")


@pytest.fixture(scope="module")
def environment() -> FunctionEnvironment:
    return FunctionEnvironment([multiply, lookup, broken])


def answered(environment: FunctionEnvironment, call: Any) -> Reply:
    state = environment.begin(Prompt(id="a"), stream=Stream())
    text = call if isinstance(call, str) else json.dumps(call)
    return environment.reply(state, f"<tool_call>{text}</tool_call>")


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ({"name": "multiply", "arguments": {"a": 6, "b": 7}}, "42"),
        ({"name": "multiply", "arguments": {"a": 6}}, "12"),
        ({"name": "lookup", "arguments": {"key": "x"}}, '{"x": 1}'),
        ({"name": "lookup", "arguments": {"key": "y"}}, "error: 'y'"),
        ({"name": "multipli", "arguments": {}}, "error: no tool 'multipli'; did you mean multiply"),
        ({"name": "multiply", "arguments": {"c": 1}}, "error: multiply: missing"),
        ({"name": "multiply", "arguments": [1]}, "error: arguments must be a JSON object"),
        ({"name": ["multiply"]}, "error: no tool"),
        ("multiply(6, 7)", "error: a call must be JSON"),
        ("[" * 5000, "error: a call must be JSON"),
    ],
)
def test_calls_are_answered(environment: FunctionEnvironment, call: Any, reply: str) -> None:
    assert answered(environment, call).text.startswith(f"<tool_response>{reply}")


def test_a_function_that_fails_is_a_failed_tool(environment: FunctionEnvironment) -> None:
    found = answered(environment, {"name": "broken"})
    assert (found.status, found.text) == (Status.ERROR, "ConnectionError: gone")


def test_functions_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="different names"):
        FunctionEnvironment([multiply, multiply])
    with pytest.raises(UsageError, match="one or more"):
        FunctionEnvironment([])
    with pytest.raises(UsageError, match=r"seconds = 0: must be greater than 0\."):
        FunctionEnvironment([multiply], seconds=0)


def ends_the_process(how: str) -> str:
    if how == "exit":
        os._exit(3)
    if how == "system exit":
        sys.exit("enough")
    if how == "segmentation fault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(60)
    if how == "timeout":
        raise TimeoutError("the world is slow")
    return f"process {os.getpid()}"


@pytest.fixture(scope="module")
def deadly() -> FunctionEnvironment:
    return FunctionEnvironment([ends_the_process], seconds=1.0)


def asked(environment: FunctionEnvironment, **arguments: str) -> Reply:
    (name,) = environment.functions
    return answered(environment, {"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("exit", Status.ERROR, "ends_the_process: its process died (exit code 3)"),
        ("system exit", Status.ERROR, "SystemExit: enough"),
        ("segmentation fault", Status.ERROR, "ends_the_process: its process died (SIGSEGV)"),
        ("kill", Status.ERROR, "ends_the_process: its process died (SIGKILL)"),
        ("hang", Status.TIMEOUT, "ends_the_process: no result within 1 s"),
        ("timeout", Status.TIMEOUT, "TimeoutError: the world is slow"),
    ],
)
def test_a_function_that_ends_its_process_is_a_failed_call(
    deadly: FunctionEnvironment, how: str, status: Status, said: str
) -> None:
    start = time.monotonic()
    found = asked(deadly, how=how)
    assert (found.status, found.text) == (status, said)
    assert time.monotonic() - start < 50, "the limit is 1 s, and what hangs does so for 60"
    alive = asked(deadly, how="not at all")
    assert alive.status is Status.OK and f"process {os.getpid()}" not in alive.text


def test_calls_at_the_same_time_have_a_process_each(deadly: FunctionEnvironment) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda how: asked(deadly, how=how), ["fine", "kill"] * 4))
    assert [reply.status for reply in found] == [Status.OK, Status.ERROR] * 4


def test_a_closure_runs_in_this_process() -> None:
    own = os.getpid()

    def here() -> bool:
        return os.getpid() == own

    assert asked(FunctionEnvironment([here])).text == "<tool_response>true</tool_response>"


class Shelf:
    def __init__(self) -> None:
        self.kept: list[str] = []

    def put(self, what: str) -> str:
        self.kept.append(what)
        return "kept"


def test_a_method_changes_its_own_object_and_no_copy() -> None:
    shelf = Shelf()
    assert asked(FunctionEnvironment([shelf.put]), what="salt").status is Status.OK
    assert shelf.kept == ["salt"]


def ends_later() -> str:
    threading.Timer(0.1, os._exit, [3]).start()
    return "soon"


def process() -> int:
    return os.getpid()


@pytest.mark.parametrize("dies", ["worker", "all workers"])
def test_a_worker_that_died_between_two_calls_costs_none(dies: str) -> None:
    environment = FunctionEnvironment([ends_later, process])
    assert answered(environment, {"name": "process"}).status is Status.OK
    workers = environment.processes.workers
    (_, connection), server = workers._idle[0], workers._server
    assert server is not None
    if dies == "worker":
        assert answered(environment, {"name": "ends_later"}).status is Status.OK
    else:
        server.process.kill()
    assert select.select([connection], [], [], 30)[0], "the worker has not died"
    assert answered(environment, {"name": "process"}).status is Status.OK


def test_functions_that_no_process_can_load_fail_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise ImportError('not here')\n"
        "def tool() -> str: return 'ok'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = asked(FunctionEnvironment([importlib.import_module("only_here").tool]))
    assert found.status is Status.ERROR
    assert "tool workers could not load the tool: ImportError: not here" in found.text


def described(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


def shown(
    monkeypatch: pytest.MonkeyPatch, function: Any, *overrides: str, lazy: bool = False
) -> list[str]:
    """What a model reads of two prompts, in a run with a function."""
    monkeypatch.setitem(ENVIRONMENTS._functions, "mine", lambda: FunctionEnvironment([function]))
    policy = noisy(ends=())
    policy.tokenizer.chat_template = TEMPLATE
    columns = [{"environment": "sums"}, {"environment": "own"}]
    prompts = [
        Prompt(id=str(n), messages=({"role": "user", "content": "Hello"},), columns=each)
        for n, each in enumerate(columns)
    ]
    given: Any = LazySequence(2, lambda index: prompts[index]) if lazy else prompts
    config = load("word-problems", list(overrides))
    return [policy.tokenizer.decode(t) for t in rendered(config, policy, given).tokens]


BY_COLUMN = (
    "environment={name='by_column', environments={sums={name='calculator'}, own={name='mine'}}}"
)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_chat_template_shows_the_functions_of_an_environment(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "described: Multiplies two integers."
    found = shown(monkeypatch, described, "environment.name=mine", lazy=lazy)
    assert all(told in text for text in found)
    found = shown(monkeypatch, described, BY_COLUMN, lazy=lazy)
    assert told not in found[0] and told in found[1]


def test_a_function_that_cannot_be_shown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="multiply: cannot be described to the model"):
        shown(monkeypatch, multiply, "environment.name=mine")
    assert "Hello" in shown(monkeypatch, multiply)[0], "without the environment"

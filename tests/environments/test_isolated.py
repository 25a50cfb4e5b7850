"""Environments of users in processes that can be killed: what ends one fails one call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import deadly
from groupwise.environments import (
    ENVIRONMENTS,
    Environment,
    FunctionEnvironment,
    Reply,
    build_environment,
)
from groupwise.environments.isolated import IsolatedEnvironment, State
from groupwise.errors import UsageError
from groupwise.registry import spec
from groupwise.types import Prompt, Status, Stream
from small_runs import prepared, timeless


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (
        deadly.deadly,
        deadly.trusted,
        deadly.closure,
        deadly.functions,
        deadly.undescribed,
        deadly.impossible,
    ):
        monkeypatch.setitem(ENVIRONMENTS._functions, function.__name__, function)


def made(name: str, **settings: Any) -> Any:
    return build_environment(spec(name, **settings), where="environment")


@pytest.fixture(scope="module")
def isolated() -> IsolatedEnvironment:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENTS._functions, "deadly", deadly.deadly)
        return made("deadly")


def begun(environment: Environment, name: str = "a") -> Any:
    return environment.begin(Prompt(id=name, text="?"), stream=Stream())


@pytest.mark.parametrize(
    ("way", "status", "said"),
    [
        ("exit", Status.ERROR, "environment: its process died (exit code 3)"),
        ("segmentation fault", Status.ERROR, "environment: its process died (SIGSEGV)"),
        ("system exit", Status.ERROR, "SystemExit: enough"),
        ("timeout", Status.TIMEOUT, "TimeoutError: the world is slow"),
        ("too much", Status.ERROR, "ValueError: the reply has more than 64 MiB"),
    ],
)
def test_what_ends_a_process_fails_one_call(
    isolated: IsolatedEnvironment, way: str, status: Status, said: str
) -> None:
    other, victim = begun(isolated, "other"), begun(isolated, "victim")
    assert isolated.reply(other, "first!").text.endswith("['other', 'first!']")
    found = isolated.reply(victim, f"{way}!")
    assert (found.status, found.text) == (status, said)
    reply = isolated.reply(other, "second!")
    assert reply.text.endswith("['other', 'first!', 'second!']"), "its state was kept"
    assert not reply.text.startswith(f"{os.getpid()} ")
    isolated.end(victim)
    isolated.end(other)


def test_a_call_that_hangs_is_killed_when_it_is_given_up(isolated: IsolatedEnvironment) -> None:
    state, said = begun(isolated), []
    thread = threading.Thread(target=lambda: said.append(isolated.reply(state, "hang!")))
    thread.start()
    until(lambda: state.asked)
    worker = state.worker
    isolated.end(state)
    thread.join(10)
    assert not thread.is_alive() and said[0].status is Status.ERROR
    assert not Path(f"/proc/{worker.process}").exists(), "the worker still runs"


def until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_workers_serve_one_completion_after_another_each_from_its_beginning(
    isolated: IsolatedEnvironment,
) -> None:
    processes = set()
    for name in "abc":
        state = begun(isolated, name)
        assert isolated.reply(state, "x!").text.endswith(f"['{name}', 'x!']")
        processes.add(state.worker.process)
        isolated.end(state)
        isolated.end(state)
    assert len(processes) == 1
    open_ones = [begun(isolated, name) for name in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda s: isolated.reply(s, "x!"), open_ones))
    assert [r.text.split()[1] for r in replies] == ["['a',", "['b',", "['c',", "['d',"]
    assert len({state.worker.process for state in open_ones}) == 4
    for state in open_ones:
        isolated.end(state)


def test_a_call_that_begins_after_the_completion_has_ended_takes_no_worker(
    isolated: IsolatedEnvironment,
) -> None:
    state: State = begun(isolated)
    isolated.end(state)
    found = isolated.reply(state, "x!")
    assert (found.status, found.text) == (Status.ERROR, "environment: the completion has ended")
    assert state.worker is None


def test_earlier_calls_are_handed_to_the_environment(isolated: IsolatedEnvironment) -> None:
    state = begun(isolated)
    isolated.resume(state, ["one!", "two!"])
    assert isolated.reply(state, "three!").text.endswith("['a', 'one!', 'two!', 'three!']")
    isolated.end(state)


def test_which_environments_run_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> deadly.Deadly:
        return deadly.deadly()

    monkeypatch.setitem(ENVIRONMENTS._functions, "local", local)
    assert isinstance(made("closure"), IsolatedEnvironment)
    assert isinstance(made("trusted"), deadly.Deadly), "marked"
    assert isinstance(made("local"), deadly.Deadly), "no other process can import it"
    assert isinstance(made("functions"), FunctionEnvironment), "has processes of its own"
    assert not isinstance(made("calculator"), IsolatedEnvironment), "of this package"


def test_a_tool_that_cannot_be_pickled_answers() -> None:
    environment = made("closure")
    assert environment.reply(begun(environment), "<call>42</call>").text == "<result>42</result>"


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(UsageError, match="environment.name = 'impossible': ValueError: no such ci"):
        made("impossible", how="not at all")
    with pytest.raises(UsageError, match="environment.name = 'impossible': .* did not start"):
        made("impossible", how="exit")
    environment = made("undescribed")
    with pytest.raises(UsageError, match="environment: ValueError: no docstring"):
        _ = environment.schemas


def test_a_column_chooses_among_isolated_environments(isolated: IsolatedEnvironment) -> None:
    tables = {"a": {"name": "deadly"}, "b": {"name": "calculator"}}
    environment = made("by_column", environments=tables)
    state = environment.begin(
        Prompt(id="a", text="", columns={"environment": "a"}), stream=Stream()
    )
    assert environment.reply(state, "exit!").status is Status.ERROR
    environment.end(state)
    state = environment.begin(
        Prompt(id="a", text="", columns={"environment": "a"}), stream=Stream()
    )
    assert environment.reply(state, "fine!").status is Status.OK
    worker = state[1].worker
    environment.end(state)
    assert worker in environment.environments["a"].workers._idle


SETTINGS = (
    "environment.name=deadly",
    "environment.stop=e",
    "environment.by_letter=true",
    "environment.timeout_s=0.5",
    "environment.max_result_tokens=16",
    "environment.max_injected_tokens=48",
    "guards.silent_rewards=say",
    "group_size=8",
)


def test_a_run_goes_on_and_is_resumed_without_asking_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, *SETTINGS)
    failed: set[Any] = set()
    answered = 0
    for step in range(3):
        scored = run.trainer.advance().scored
        for group in scored.groups:
            failed |= {completion.failure for completion in group.completions}
            answered += sum(c.values["calls"] > 1 for c in group.completions if not c.failure)
        assert scored.scores.valid.flatten().tolist() == [
            c.failure is None for group in scored.groups for c in group.completions
        ]
        if step == 1:
            run.trainer.save(wait=True)
    assert failed == {
        None,
        (Status.ERROR, "environment: its process died (exit code 3)"),
        (Status.ERROR, "environment: its process died (SIGSEGV)"),
        (Status.TIMEOUT, "environment: no reply within 0.5 s"),
    }
    assert answered
    workers = run.engine.environment.workers
    left = psutil.Process(workers._server.process.pid).children()
    assert {child.pid for child in left} == {idle.process for idle in workers._idle}
    exact = run.engine.exact_continuation
    wanted = {name: one.clone() for name, one in run.trainer.policy.trained().items()}
    rows = timeless(tmp_path)
    run.close()
    if not exact:
        pytest.skip("needs the compiled kernels: which rows share a step depends on the replies")

    def gone(*_: Any) -> Reply:
        raise AssertionError("asked again")

    monkeypatch.setattr(IsolatedEnvironment, "reply", gone)
    again = prepared(tmp_path, *SETTINGS, resume=True)
    again.trainer.advance()
    again.close()
    assert timeless(tmp_path) == rows
    found = again.trainer.policy.trained()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())

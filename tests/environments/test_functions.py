"""Functions as tools: calls are checked, mistakes are told, failures are failures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from groupwise.environments import FunctionEnvironment
from groupwise.errors import UsageError
from groupwise.types import Prompt, Stream


def multiply(a: float, b: float = 2) -> float:
    return a * b


def lookup(key: str) -> dict[str, int]:
    return {key: {"x": 1}[key]}


def broken() -> None:
    raise ConnectionError("gone")


def said(call: Any) -> str:
    environment = FunctionEnvironment([multiply, lookup, broken])
    state = environment.begin(Prompt(id="a"), stream=Stream())
    text = call if isinstance(call, str) else json.dumps(call)
    reply = environment.reply(state, f"<tool_call>{text}</tool_call>")
    return reply.text.removeprefix("<tool_response>").removesuffix("</tool_response>")


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
def test_calls_are_answered(call: Any, reply: str) -> None:
    assert said(call).startswith(reply)


def test_a_function_that_fails_is_a_failed_tool() -> None:
    with pytest.raises(ConnectionError):
        said({"name": "broken"})


def test_functions_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="different names"):
        FunctionEnvironment([multiply, multiply])
    with pytest.raises(UsageError, match="one or more"):
        FunctionEnvironment([])

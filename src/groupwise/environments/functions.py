"""Functions of your own as tools: the model writes a call as JSON, and reads what is returned."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.environments.base import Reply, TagEnvironment, Tags
from groupwise.environments.processes import CallFailed, FunctionProcesses, call, sendable
from groupwise.errors import UsageError, first_line, suggest

CALL_TAGS = Tags(
    call=("<tool_call>", "</tool_call>"), result=("<tool_response>", "</tool_response>")
)
"""Tags of Qwen's and Hermes' templates."""


def schema_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """A function as chat templates show it: name, description and JSON schema of its parameters.

    Raises:
        UsageError: a parameter without type or description.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of several kinds that transformers does not export
        raise UsageError(
            f"tools: {function.__name__}: cannot be described to the model "
            f"({first_line(error)}); give every parameter a type and a line under 'Args:' in a "
            "docstring of Google's style."
        ) from error


class FunctionEnvironment(TagEnvironment):
    """Calls functions that the model names, with arguments checked against their signatures.

        <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>

    A call that names no function, or whose arguments do not fit, is answered in words; so is a
    ValueError, TypeError, ArithmeticError or LookupError that a function raises. Any other
    exception is a failed tool, which takes the completion out of its group's statistics. So is a
    call that takes too long, or whose process dies.

    Functions at the top level of a module run in worker processes, which are killed if they take
    too long; each has its own copy of the module's variables. Closures, methods of an object and
    functions of the script itself run in this process: what ends it ends the run.

    A chat template that shows tools shows these functions, whose docstrings must then describe
    every parameter.

    Args:
        functions: with names that differ; they must not take positional-only arguments.
        tags: where calls and results stand.
        seconds: wall-clock time of a call in a worker process.
        max_result_chars, max_calls: of a result, and of a completion.

    Raises:
        UsageError: no functions, two of one name, or a time that is not greater than 0.

    Example:
        >>> def multiply(a: int, b: int) -> int: return a * b
        >>> tools = FunctionEnvironment([multiply])
        >>> call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
        >>> tools.reply(tools.begin(None, stream=None), call).text
        '<tool_response>42</tool_response>'
    """

    has_processes = True

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        tags: Tags = CALL_TAGS,
        seconds: float = 30.0,
        max_result_chars: int = 2000,
        max_calls: int = 8,
    ) -> None:
        super().__init__(
            self._called, tags=tags, max_result_chars=max_result_chars, max_calls=max_calls
        )
        self.functions = {function.__name__: function for function in functions}
        if not functions or len(self.functions) < len(functions):
            names = [function.__name__ for function in functions]
            raise UsageError(f"functions = {names}: must be one or more, with different names.")
        if not seconds > 0:
            raise UsageError(f"seconds = {seconds!r}: must be greater than 0.")
        sent = {name: each for name, each in self.functions.items() if sendable(each)}
        self.processes = FunctionProcesses(sent, seconds=seconds)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The functions as chat templates show them.

        Raises:
            UsageError: a parameter without type or description.
        """
        return tuple(map(schema_of, self.functions.values()))

    def _called(self, said: str) -> Reply:
        try:
            name, arguments = self._parsed(said)
        except ValueError as error:
            return Reply(text=f"error: {error}", values={"malformed": 1.0})
        try:
            if name in self.processes.functions:
                found = self.processes.call(name, arguments)
            else:
                found = call(self.functions[name], arguments)
        except CallFailed as error:
            return Reply(text=str(error), status=error.status)
        if found.mistaken:
            return Reply(text=f"error: {found.text}", values={"malformed": 1.0})
        return Reply(text=found.text)

    def _parsed(self, said: str) -> tuple[str, Mapping[str, Any]]:
        """The name of the function of a call, and its arguments.

        Raises:
            ValueError: no such call is possible; the message is for the model.
        """
        try:
            asked = json.loads(said)
            name, arguments = asked["name"], asked.get("arguments") or {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError('a call must be JSON with "name" and "arguments"') from None
        if not isinstance(name, str) or name not in self.functions:
            raise ValueError(f"no tool {name!r}; {suggest(str(name), self.functions)}")
        if not isinstance(arguments, Mapping):
            raise ValueError("arguments must be a JSON object")
        try:
            inspect.signature(self.functions[name]).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        return name, arguments

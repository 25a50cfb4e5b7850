"""Functions of your own as tools: the model writes a call as JSON, and reads what is returned."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.environments.base import Reply, TagEnvironment, Tags
from groupwise.errors import UsageError, suggest

CALL_TAGS = Tags(
    call=("<tool_call>", "</tool_call>"), result=("<tool_response>", "</tool_response>")
)
"""Tags of Qwen's and Hermes' templates."""


class FunctionEnvironment(TagEnvironment):
    """Calls functions that the model names, with arguments checked against their signatures.

        <tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>

    A call that names no function, or whose arguments do not fit, is answered in words; so is a
    ValueError, TypeError, ArithmeticError or LookupError that a function raises. Any other
    exception is a failed tool, which takes the completion out of its group's statistics.

    Args:
        functions: with names that differ; they must not take positional-only arguments.
        tags: where calls and results stand.
        max_result_chars, max_calls: of a result, and of a completion.

    Raises:
        UsageError: no functions, or two of one name.

    Example:
        >>> def multiply(a: int, b: int) -> int: return a * b
        >>> tools = FunctionEnvironment([multiply])
        >>> call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
        >>> tools.reply(tools.begin(None, stream=None), call).text
        '<tool_response>42</tool_response>'
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        tags: Tags = CALL_TAGS,
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

    def _called(self, call: str) -> Reply:
        try:
            function, arguments = self._parsed(call)
            returned = function(**arguments)
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            return Reply(text=f"error: {error}", values={"malformed": 1.0})
        return Reply(text=returned if isinstance(returned, str) else _written(returned))

    def _parsed(self, call: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        """The function of a call and its arguments.

        Raises:
            ValueError: no such call is possible; the message is for the model.
        """
        try:
            asked = json.loads(call)
            name, arguments = asked["name"], asked.get("arguments") or {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError('a call must be JSON with "name" and "arguments"') from None
        if not isinstance(name, str) or name not in self.functions:
            raise ValueError(f"no tool {name!r}; {suggest(str(name), self.functions)}")
        if not isinstance(arguments, Mapping):
            raise ValueError("arguments must be a JSON object")
        function = self.functions[name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        return function, arguments


def _written(value: Any) -> str:
    """A value as JSON where it has that form, else as text."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)

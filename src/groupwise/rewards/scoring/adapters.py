"""Converts functions of every accepted form to one: called with data by name, here or in a worker.

Accepted are rewards of the registry; functions of a group; functions of one completion whose
parameters name data or columns of the row; and TRL's form, which gets lists and keyword arguments.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from groupwise.errors import UsageError, suggest
from groupwise.extensions import names_code
from groupwise.registry import FunctionSpec
from groupwise.rewards.base import GROUP_DATA, REWARDS, SAMPLE_DATA, Trait, traits

PER_COMPLETION = frozenset(
    {"text", "whole", "tokens", "finish", "length", "correct", "tool_values"}
)
VALUE = "answer as a value"
"""The answer as the data has it; no name of a parameter."""

UNIONS = (None, typing.Union, types.UnionType)
"""Origins of an annotation that is a type or a choice of types."""

Place = Literal["anywhere", "in_process", "own_worker", "in_thread", "async"]


class MissingData(Exception):
    """The row lacks data that the reward needs."""


class RewardFn(Protocol):
    """A reward in the one form that is run: `names` of data in, a value or a list of values out."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def whole_group(self) -> bool: ...

    @property
    def place(self) -> Place: ...

    def __call__(self, data: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class SampleReward:
    """A function whose positional parameters are names of data; the rest are fixed settings.

    Attributes:
        answer_type: what `VALUE` among the names is converted to and given as `answer`.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    required: frozenset[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    answer_type: Any = None

    @property
    def whole_group(self) -> bool:
        return any(name in GROUP_DATA for name in self.names)

    @property
    def place(self) -> Place:
        return place_of(self.function)

    def __call__(self, data: Mapping[str, Any]) -> Any:
        """Call with the data asked for; a sample without a required one cannot be judged."""
        if data.get(VALUE) is not None:
            data = {**data, "answer": typed_answer(data[VALUE], self.answer_type)}
        for name in self.required:
            if data.get(name) is None:
                if name in ("answer", "solution", "correct"):
                    return None if not self.whole_group else [None] * _count(data)
                known = (*SAMPLE_DATA, *GROUP_DATA, "completions")
                raise MissingData(
                    f"the row has no {name!r}, and no data that a reward receives has this name; "
                    + suggest(name, known)
                )
        given = {name: data[name] for name in self.names if name in data and name != VALUE}
        return self.function(**given, **self.settings)


def answer_type(function: Callable[..., Any]) -> Any:
    """The type in which a function wants its answer, `Any` where it does not say; None for text."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError, SyntaxError, AttributeError):
        parameters = inspect.signature(function).parameters
    if "answer" not in parameters:
        return None
    kind = parameters["answer"].annotation
    texts = str in (kind, *typing.get_args(kind)) and typing.get_origin(kind) in UNIONS
    return None if texts else Any if kind is inspect.Parameter.empty else kind


def typed_answer(value: Any, kind: Any) -> Any:
    """An answer in a type; text that is not of the type is read as JSON.

    Raises:
        MissingData: it is of another type.

    Example:
        >>> typed_answer([1, 2], list[int]), typed_answer("[1, 2]", list[int])
        ([1, 2], [1, 2])
    """
    from pydantic import ValidationError

    if kind is Any or isinstance(kind, str):
        return value
    adapter = _reader(kind)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        if isinstance(value, str):
            with suppress(ValidationError):
                return adapter.validate_json(value)
        said = error.errors()[0]["msg"]
        raise MissingData(f"the answer {str(value)[:40]!r} is not {kind} ({said})") from None


@functools.lru_cache
def _reader(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@dataclass(frozen=True, kw_only=True)
class GroupReward:
    """A function of a `Group`."""

    function: Callable[..., Any]
    names: tuple[str, ...] = ("group",)
    whole_group: bool = True

    @property
    def place(self) -> Place:
        return place_of(self.function)

    def __call__(self, data: Mapping[str, Any]) -> Any:
        return self.function(data["group"])


@dataclass(frozen=True, kw_only=True)
class TrlReward:
    """A function of TRL's form: lists of prompts, completions, token ids and columns."""

    function: Callable[..., Any]
    names: tuple[str, ...] = ("group",)
    whole_group: bool = True

    @property
    def place(self) -> Place:
        return place_of(self.function)

    def __call__(self, data: Mapping[str, Any]) -> Any:
        group = data["group"]
        count, prompt = len(group), group.prompt
        chat = bool(prompt.messages)
        texts = [completion.text for completion in group.completions]
        given: dict[str, Any] = {
            "prompts": [list(prompt.messages) if chat else str(prompt)] * count,
            "completions": (
                [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
            ),
            "completion_ids": [list(completion.tokens) for completion in group.completions],
            "answer": [prompt.answer] * count,
            "solution": [prompt.answer] * count,
            "trainer_state": None,
            "log_extra": _ignore,
            "log_metric": _ignore,
        }
        given.update({name: [value] * count for name, value in prompt.columns.items()})
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            named = {p.name for p in parameters}
            unasked = {"log_extra", "log_metric"} - named
            return self.function(**{n: v for n, v in given.items() if n not in unasked})
        asked = [p for p in parameters if p.name in given]
        missing = [p.name for p in parameters if p.name not in given and p.default is p.empty]
        if missing:
            known = ", ".join(sorted(prompt.columns)) or "none"
            raise MissingData(f"the row has no {missing[0]!r}; columns: {known}")
        return self.function(**{p.name: given[p.name] for p in asked})


def _ignore(*_: Any, **__: Any) -> None:
    """Takes the place of TRL's logging callbacks: parts are logged by name here."""


def _count(data: Mapping[str, Any]) -> int:
    for name in ("texts", "lengths", "corrects", "group"):
        if name in data:
            return len(data[name])
    return 0


def inner(reward: Any) -> Callable[..., Any]:
    """The function itself, without what wraps it."""
    function = getattr(reward, "function", reward)
    while isinstance(function, functools.partial):
        function = function.func
    return function


def place_of(function: Callable[..., Any]) -> Place:
    """Where a function may run: async ones on the event loop, others as they are marked."""
    own = inner(function)
    if inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(
        getattr(own, "__call__", None)  # noqa: B004
    ):
        return "async"
    marked = traits(own)
    if Trait.OWN_WORKER in marked:
        return "own_worker"
    if Trait.IN_THREAD in marked:
        return "in_thread"
    return "in_process" if Trait.IN_PROCESS in marked else "anywhere"


def make_ready(reward: RewardFn) -> None:
    """Call what `own_worker` names for a reward, with the settings that it has parameters for."""
    prepare = getattr(inner(reward), "prepare", None)
    if prepare is None:
        return
    prepare(**settings_for(prepare, reward))


def settings_for(function: Callable[..., object], reward: RewardFn) -> dict[str, Any]:
    """The settings of a reward that a function has parameters for."""
    wrapped = getattr(getattr(reward, "function", None), "keywords", {})
    settings = {**wrapped, **getattr(reward, "settings", {})}
    known = inspect.signature(function).parameters
    return {name: value for name, value in settings.items() if name in known}


def registered(chosen: FunctionSpec, *, where: str = "reward") -> RewardFn:
    """A reward of the registry with its settings checked, or a function of any accepted form that
    `path.py:function` names.

    Raises:
        UsageError: unknown name or setting, or data of single completions in a group reward.
    """
    bound = REWARDS.bind(chosen, where=where)
    if names_code(chosen.name):
        settings = dict(chosen.settings)
        return adapted(
            functools.partial(bound.function, **settings) if settings else bound.function
        )
    reward = SampleReward(
        function=bound.function,
        names=bound.inputs,
        required=bound.required,
        settings=dict(chosen.settings),
    )
    return _checked(reward, chosen.name)


def adapted(function: Callable[..., Any]) -> RewardFn:
    """A Python function of any accepted form.

    Raises:
        UsageError: its parameters fit no form.
    """
    name = function_name(function)
    if not callable(function):
        raise UsageError(f"reward = {function!r}: must be a function or the name of a reward.")
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p for p in parameters if p.default is p.empty and p.name in names]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "completions" in names or "prompts" in names or (open_ended and not names):
        return TrlReward(function=function)
    if names[:1] == ["group"] and len(needed) == 1:
        return GroupReward(function=function)
    data = [p for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name in names]
    if not any(p.name in SAMPLE_DATA + GROUP_DATA for p in data):
        raise UsageError(
            f"reward {name}({', '.join(names)}): must take `group`, or TRL's `completions`, or at "
            f"least one of {', '.join(SAMPLE_DATA + GROUP_DATA)}; other names are columns."
        )
    kind = answer_type(function) if any(p.name == "answer" for p in data) else None
    reward = SampleReward(
        function=function,
        names=(*(p.name for p in data), *((VALUE,) if kind is not None else ())),
        required=frozenset(p.name for p in data if p.default is p.empty),
        answer_type=kind,
    )
    return _checked(reward, name)


def _checked(reward: SampleReward, name: str) -> SampleReward:
    single = sorted(PER_COMPLETION.intersection(reward.names))
    if reward.whole_group and single:
        raise UsageError(
            f"reward {name}: combines {single[0]!r} of one completion with data of the group; "
            f"use {', '.join(GROUP_DATA)}."
        )
    return reward


def function_name(function: Any) -> str:
    """A name for the log: of the function, of what a partial wraps, or of the class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)

"""TRL's `tools` and `environment_factory`: functions that the model may call, and their state."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from groupwise.environments.functions import schema_of
from groupwise.errors import UsageError, suggest
from groupwise.types import Group, Prompt, Request, Stream

COLUMN = "environment"
"""Names the environment of a row where there are several."""
NO_PROMPT = ({"role": "user", "content": ""},)
"""The prompt of a row whose environment alone says what to do."""
Factory = Callable[[], Any]
Key = tuple[Stream, str, int]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is known of one completion.

    Attributes:
        instance: of its environment; None without one.
        functions: that may be called, by name.
        results: of its calls, as messages.
        stream: names its random numbers.
    """

    stream: tuple[Any, ...]
    name: str | None
    instance: Any
    functions: Mapping[str, Callable[..., Any]]
    results: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What `reset` is called with for a prompt, under which random numbers, and what it said."""

    values: Mapping[str, Any]
    stream: tuple[Any, ...]
    observation: str


class Toolset:
    """The functions of a run, and the environments of its completions.

    An environment is an object with a method `reset`; its other public methods are functions that
    the model may call. Objects are used again, each for one completion at a time.

    While they run, the random numbers of Python and NumPy follow from the row and, in a call, from
    step, prompt and number of the call: the completions of a group begin alike, and the same calls
    get the same results.

    Args:
        functions: that every completion may call.
        factories: make environments, by the name in the column `environment`; the name None is that
            of a single one.
        seed: of the run.

    Attributes:
        known: every function that some completion may call.
        rewards: a reward function for each class of environments that has `get_reward`.

    Raises:
        UsageError: a function without type hints or docstring, two of one name, or an environment
            without `reset`.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        factories: Mapping[str | None, Factory],
        *,
        seed: int,
    ) -> None:
        self.seed = seed
        self.functions, self.factories = list(functions), dict(factories)
        self._free = {name: [factory()] for name, factory in self.factories.items()}
        for (instance,) in self._free.values():
            if not callable(getattr(instance, "reset", None)):
                raise UsageError(
                    f"environment_factory: {_kind(instance)} has no method reset; TRL calls it "
                    "before each completion with the columns of the row."
                )
        self.schemas = {
            name: self._schemas(name, instance) for name, (instance,) in self._free.items()
        } or {None: self._schemas(None, None)}
        owned = [_methods(instance) for (instance,) in self._free.values()]
        self.known = [*self.functions, *itertools.chain.from_iterable(owned)]
        kinds = {type(instance): None for (instance,) in self._free.values()}
        self.rewards = [self._reward(kind) for kind in kinds if hasattr(kind, "get_reward")]
        self._rows: dict[str, _Row] = {}
        self._ended: dict[Key, Conversation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _reward(self, kind: type) -> Callable[..., Any]:
        def get_reward(environments: Sequence[Any]) -> list[Any]:
            return [
                self.awaited(one.get_reward()) if type(one) is kind else None
                for one in environments
            ]

        get_reward.__name__ = kind.__name__
        return get_reward

    def prompts(self, found: Sequence[Prompt], *, where: str) -> list[Prompt]:
        """Prompts with the schemas of their functions, and with what `reset` says of their rows.

        Args:
            where: the data set; rows of another one have other random numbers.

        Raises:
            UsageError: a prompt that is text, or a row that names no environment.
        """
        return [self._prompt(prompt, where) for prompt in found]

    def _prompt(self, prompt: Prompt, where: str) -> Prompt:
        if not prompt.messages:
            raise UsageError(
                f"prompt {prompt.id}: is plain text; the model sees its tools through the chat "
                "template, so prompts must be messages with a role and a content."
            )
        name = self._name(prompt)
        prompt = replace(prompt, tools=self.schemas[name])
        if not self.factories:
            return prompt
        values = {key: value for key, value in prompt.columns.items() if not self._chooses(key)}
        if prompt.messages != NO_PROMPT:
            values["prompt"] = [dict(turn) for turn in prompt.messages]
        stream = (self.seed, where, prompt.id)
        said = _observed(self._free[name][0], values, stream)
        *before, last = prompt.messages
        last = {**last, "content": last["content"] + said}
        prompt = replace(prompt, id=f"{where}-{prompt.id}", messages=(*before, last))
        self._rows[prompt.id] = _Row(values=values, stream=stream, observation=said)
        return prompt

    def _chooses(self, column: str) -> bool:
        return column == COLUMN and None not in self.factories

    def _name(self, prompt: Prompt) -> str | None:
        if not self.factories or None in self.factories:
            return None
        name = prompt.columns.get(COLUMN)
        if name not in self.factories:
            raise UsageError(
                f"prompt {prompt.id}: {COLUMN} = {name!r}: is not among the names of "
                f"environment_factory; {suggest(str(name), map(str, self.factories))}"
            )
        return name

    def _schemas(self, name: str | None, instance: Any) -> tuple[Mapping[str, Any], ...]:
        functions = [*self.functions, *_methods(instance)]
        names = [function.__name__ for function in functions]
        if len(set(names)) < len(names):
            where = "tools" if name is None else f"environment_factory[{name!r}]"
            raise UsageError(f"{where}: functions = {names}: must have different names.")
        return tuple(map(schema_of, functions))

    def begin(self, prompt: Prompt, *, stream: Stream) -> Conversation:
        """A completion without calls, with an environment of its own.

        Raises:
            UsageError: its environment begins otherwise than that of the prompt.
        """
        name, key, instance = self._name(prompt), (*stream, prompt.id), None
        if self.factories:
            free, row = self._free[name], self._rows[prompt.id]
            instance = free.pop() if free else self.factories[name]()
            if (observed := _observed(instance, row.values, row.stream)) != row.observation:
                raise UsageError(
                    f"prompt {prompt.id}: {_kind(instance)}.reset() says {observed[:60]!r}, and "
                    f"said {row.observation[:60]!r} when the prompt was made; the completions of a "
                    "group share their prompt, so what it says must follow from the columns of the "
                    "row, or from the random numbers of Python's random and numpy.random."
                )
        functions = _named([*self.functions, *_methods(instance)])
        return Conversation(name=name, instance=instance, functions=functions, stream=key)

    def call(self, state: Conversation, name: str, arguments: Mapping[str, Any]) -> Any:
        """What a function returns, or raises."""
        if name not in state.functions:
            raise LookupError(f"there is no tool {name!r}")
        with seeded(*state.stream, len(state.results)):
            return self.awaited(state.functions[name](**arguments))

    def awaited(self, value: Any) -> Any:
        """A value, or what a coroutine returns; all of them run on one event loop."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()

        async def result() -> Any:
            return await value

        running = asyncio.run_coroutine_threadsafe(result(), self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # it may have exceeded its time
            raise

    def ended(self, request: Request, sample: int, state: Conversation | None) -> None:
        """Keep what is known of a completion for its rewards."""
        if state is not None:
            self._ended[request.stream, request.prompt.id, sample] = state

    def conversations(self, group: Group) -> list[Conversation]:
        """Those of the completions of a group; one that called nothing begins now."""
        for key in _keys(group):
            if key not in self._ended:
                self._ended[key] = self.begin(group.prompt, stream=group.stream)
        return [self._ended[key] for key in _keys(group)]

    def release(self, group: Group) -> None:
        """Release the environments of a scored group for other completions."""
        for key in _keys(group):
            known = self._ended.pop(key, None)
            if known is not None and known.instance is not None:
                self._free[known.name].append(known.instance)


def toolset(tools: Any, environment_factory: Any, *, seed: int) -> Toolset | None:
    """What TRL's two arguments say; None where neither is given.

    Raises:
        UsageError: something else than functions and factories, or functions that cannot be shown.
    """
    listed = list(tools or ())
    if not listed and not environment_factory:
        return None
    for function in listed:
        if not callable(function):
            raise UsageError(f"tools: {function!r} is not a function.")
    if environment_factory is None or isinstance(environment_factory, Mapping):
        factories: dict[Any, Any] = dict(environment_factory or {})
    else:
        factories = {None: environment_factory}
    for name, factory in factories.items():
        if not callable(factory):
            where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
            raise UsageError(f"{where} = {factory!r}: must be a class, or a function without "
                             "parameters that returns an environment.")  # fmt: skip
    return Toolset(listed, factories, seed=seed)


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The methods of an environment that the model may call."""
    found = inspect.getmembers(type(instance), inspect.isfunction)
    return [
        getattr(instance, name)
        for name, _ in found
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]


def _named(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


@contextmanager
def seeded(*key: Any) -> Iterator[None]:
    """Inside, the random numbers of Python and NumPy follow from a key."""
    python, numpy = random.getstate(), np.random.get_state()
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big")
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _observed(instance: Any, values: Mapping[str, Any], stream: tuple[Any, ...]) -> str:
    with seeded(*stream):
        said = instance.reset(**values)
    if said is not None and not isinstance(said, str):
        raise UsageError(
            f"{_kind(instance)}.reset() returned {type(said).__name__}: must return text that is "
            "put behind the prompt, or None."
        )
    return said or ""


def _keys(group: Group) -> list[Key]:
    return [(group.stream, group.prompt.id, sample) for sample in group.samples]


def _kind(instance: Any) -> str:
    return type(instance).__name__

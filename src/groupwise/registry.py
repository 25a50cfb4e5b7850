"""A registry of functions whose signatures are their schema.

A registered function takes data first and settings after the star:

    @ADVANTAGES.register
    def zscore(rewards, valid=None, *, ddof: int = 0): ...

Its positional parameters name the data it needs, from a vocabulary that the registry defines. Its
keyword-only parameters are its settings, with types and defaults. Recipes, the command line, the
tables in the docs and the error messages are all generated from the signature.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from groupwise import extensions
from groupwise.errors import UsageError, suggest

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """A registered function with some of its settings given: one slot of an algorithm, or one
    reward of a recipe."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}({inside})" if inside else self.name


def spec(name: str, **settings: Any) -> FunctionSpec:
    """Shorthand: `spec("softrank", tau=0.5)`."""
    return FunctionSpec(name=name, settings=settings)


def parse_spec(text: str, *, where: str) -> FunctionSpec:
    """A function with settings, parsed from one line: `name` or `name(key=value, …)`.

    Args:
        where: origin of the text, for messages.

    Raises:
        UsageError: any other form; values are numbers, strings, lists, True, False, None.

    Example:
        >>> str(parse_spec("softrank(tau=0.5)", where="advantage"))
        'softrank(tau=0.5)'
    """
    try:
        found = ast.parse(text.strip(), mode="eval").body
        if isinstance(found, ast.Name):
            return FunctionSpec(name=found.id)
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name) and not found.args:
            settings = {str(k.arg): ast.literal_eval(k.value) for k in found.keywords if k.arg}
            if len(settings) == len(found.keywords):
                return FunctionSpec(name=found.func.id, settings=settings)
    except (SyntaxError, ValueError, RecursionError):
        pass
    raise UsageError(f"{where} = {text!r}: must have the form name or name(key=value, …).")


@dataclass(frozen=True, kw_only=True)
class BoundFunction:
    """A registered function with every setting fixed; called with a mapping of the data it may ask
    for."""

    spec: FunctionSpec
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    required: frozenset[str]

    def __call__(self, data: Mapping[str, Any]) -> Any:
        missing = [name for name in self.required if data.get(name) is None]
        if missing:
            raise UsageError(
                f"{self.spec}: needs {', '.join(missing)}, which this run does not compute."
            )
        given = {name: data[name] for name in self.inputs if name in data}
        return self.function(**given, **self.spec.settings)


def checked_by(check: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator: `check` is called with those settings of a registered function that it has
    parameters for when they are fixed, and raises a UsageError that begins with a setting's name
    if the value is out of range."""

    def marked(function: F) -> F:
        function.check_settings = check  # type: ignore[attr-defined]
        return function

    return marked


class Registry:
    """Names of functions of one kind.

    Args:
        kind: what is registered, in the singular, for messages ("advantage").
        data: the vocabulary of positional parameters that functions of this kind may ask for.

    Raises:
        UsageError: a name registered twice, a parameter outside the vocabulary, an unknown name or
            setting.
    """

    def __init__(self, kind: str, data: tuple[str, ...]) -> None:
        self.kind = kind
        self.data = data
        self._functions: dict[str, Callable[..., Any]] = {}
        self._by_path: dict[str, Callable[..., Any]] = {}

    def register(self, function: F) -> F:
        """Register a function under its own name; usable as a decorator."""
        name = function.__name__
        if name in self._functions:
            raise UsageError(f"{self.kind} {name!r} is already registered; choose another name.")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.name in self.data:
                continue
            raise UsageError(
                f"{self.kind} {name!r}: parameter {parameter.name!r} is neither a setting (after "
                f"*) nor data; " + suggest(parameter.name, self.data)
            )
        self._functions[name] = function
        return function

    def names(self) -> list[str]:
        """Every registered name, in alphabetical order."""
        return sorted(self._functions)

    def get(self, name: str) -> Callable[..., Any]:
        """The function registered under a name, or the one that `path.py:function` names."""
        if name not in self:
            raise UsageError(
                f"{self.kind} = {name!r}: not registered; " + suggest(name, self._functions)
            )
        return self._functions.get(name) or self._by_path[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._functions and isinstance(name, str):
            if extensions.names_code(name):
                self._by_path[name] = extensions.resolve(name, kind=self.kind)
            else:
                extensions.discover()
        return name in self._functions or name in self._by_path

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def settings(self, name: str) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of a function: its settings, with their types resolved. One
        without an annotation takes any value."""
        function = self.get(name)
        parameters = inspect.signature(function).parameters
        found = {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        hints = _hints(function, found)
        return {key: p.replace(annotation=hints[key]) for key, p in found.items()}

    def bind(self, chosen: FunctionSpec, *, where: str | None = None) -> BoundFunction:
        """Check a part's settings against the function's signature and fix them.

        Raises:
            UsageError: unknown setting, wrong type, a value out of range (`checked_by`), or a
                setting without default that was not given.
        """
        where = where or self.kind
        function = self.get(chosen.name)
        known = self.settings(chosen.name)
        for key, value in chosen.settings.items():
            if key not in known:
                raise UsageError(
                    f"{where}.{key} = {value!r}: {chosen.name} has no such setting; "
                    f"{suggest(key, known)}"
                )
            if not _accepts(known[key].annotation, value):
                wanted = inspect.formatannotation(known[key].annotation)
                raise UsageError(f"{where}.{key} = {value!r}: must be of type {wanted}.")
        unset = [k for k, p in known.items() if p.default is p.empty and k not in chosen.settings]
        if unset:
            raise UsageError(
                f"{where}.{unset[0]}: {chosen.name} needs this setting and it has no default."
            )
        _check(function, chosen, where)
        parameters = inspect.signature(function).parameters.values()
        data = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        return BoundFunction(
            spec=chosen,
            function=function,
            inputs=tuple(p.name for p in data),
            required=frozenset(p.name for p in data if p.default is p.empty),
        )


def _check(function: Callable[..., Any], chosen: FunctionSpec, where: str) -> None:
    """Call the check of a function's settings, if it has one."""
    check = getattr(function, "check_settings", None)
    if check is None:
        return
    known = inspect.signature(check).parameters
    try:
        check(**{key: value for key, value in chosen.settings.items() if key in known})
    except UsageError as error:
        raise UsageError(f"{where}.{error}") from None


def _hints(
    function: Callable[..., Any], settings: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Types of the settings; types of the data are not resolved, because only type checkers need
    them."""
    annotations = {
        key: Any if parameter.annotation is parameter.empty else parameter.annotation
        for key, parameter in settings.items()
    }
    holder = types.SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(holder, globalns=inspect.unwrap(function).__globals__)


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a value that came from TOML or Python fits an annotation (int is accepted for float,
    bool is not)."""
    origin = typing.get_origin(annotation)
    if annotation is Any or isinstance(annotation, str):
        return True
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if origin is typing.Union or origin is type(int | str):
        return any(_accepts(option, value) for option in typing.get_args(annotation))
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is not None:
        return isinstance(value, list | tuple | dict) or callable(value)
    return isinstance(value, annotation) if isinstance(annotation, type) else True

"""Several environments in one run, each for its own prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from groupwise.environments.base import ENVIRONMENTS, Environment, Reply, resume
from groupwise.environments.isolated import Ending, build_environment
from groupwise.errors import UsageError, suggest
from groupwise.registry import FunctionSpec
from groupwise.types import Prompt, Stream


@ENVIRONMENTS.register
def by_column(*, environments: dict[str, Any], column: str = "environment") -> ByColumn:
    """The environment that a column of the data names.

    A call in the tags of another prompt's environment goes to the prompt's own environment, which
    answers that there is no such call.

    Args:
        environments: by the name that stands in the column, each a table with `name` (of a
            registered environment) and its settings.
        column: of the data.

    Raises:
        UsageError: no environments, or one that is not registered or cannot be made.

    Example:
        >>> tools = by_column(column="tool", environments={"sums": {"name": "calculator"}})
        >>> prompt = Prompt(id="a", text="", columns={"tool": "sums"})
        >>> state = tools.begin(prompt, stream=Stream())
        >>> tools.reply(state, "<calculate>6 * 7</calculate>").text
        '<result>42</result>'
    """
    if not environments:
        raise UsageError("environment.environments = {}: must name at least one environment.")
    made = {}
    for label, table in environments.items():
        where = f"environment.environments.{label}"
        settings = dict(table) if isinstance(table, Mapping) else {}
        name = settings.pop("name", None)
        if name not in ENVIRONMENTS:
            raise UsageError(
                f"{where}.name = {name!r}: no such environment; {suggest(str(name), ENVIRONMENTS)}"
            )
        made[label] = build_environment(FunctionSpec(name=name, settings=settings), where=where)
    return ByColumn(made, column=column)


class ByColumn:
    """Passes every call to the environment of its prompt.

    Args:
        environments: by their names in the column.
        column: of the data.
    """

    def __init__(self, environments: Mapping[str, Environment], *, column: str) -> None:
        self.environments, self.column = dict(environments), column

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings of all environments."""
        every = (stop for environment in self.environments.values() for stop in environment.stops)
        return tuple(dict.fromkeys(every))

    def choice(self, prompt: Prompt) -> str:
        """The name in the prompt's column."""
        return str(prompt.columns.get(self.column))

    def stops_of(self, prompt: Prompt) -> tuple[str, ...]:
        """The stop strings of the prompt's environment."""
        return self.environments[self.choice(prompt)].stops

    def begin(self, prompt: Prompt, *, stream: Stream) -> tuple[Environment, Any]:
        """The environment of the prompt, and its state."""
        check_column([prompt], environments=self.environments, column=self.column)
        environment = self.environments[self.choice(prompt)]
        return environment, environment.begin(prompt, stream=stream)

    def reply(self, state: tuple[Environment, Any], text: str) -> Reply:
        """What the prompt's environment replies."""
        environment, inner = state
        return environment.reply(inner, text)

    def resume(self, state: tuple[Environment, Any], texts: Sequence[str]) -> None:
        """Have the prompt's environment resume."""
        environment, inner = state
        resume(environment, inner, texts)

    def end(self, state: tuple[Environment, Any]) -> None:
        """Free what the prompt's environment holds."""
        environment, inner = state
        if isinstance(environment, Ending):
            environment.end(inner)


def check_column(
    prompts: Iterable[Prompt], *, environments: Collection[str], column: str = "environment"
) -> None:
    """Refuse prompts without an environment.

    Raises:
        UsageError: with the prompt and what its column holds.
    """
    for prompt in prompts:
        label = prompt.columns.get(column)
        if label not in environments:
            raise UsageError(
                f"prompt {prompt.id}: {column} = {label!r}: names no environment; "
                + suggest(str(label), environments)
            )

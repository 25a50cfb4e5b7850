"""The protocol and the registry of environments, and the one that answers calls between tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from groupwise.errors import RunError, UsageError
from groupwise.registry import Registry
from groupwise.types import Prompt, Status, Stream

ENVIRONMENTS = Registry("environment", ())
END_OF_TURN = "\N{SYMBOL FOR END OF TRANSMISSION}"
"""Stands for the model's end of a turn among `Environment.stops`."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The reply of an environment to a call.

    Attributes:
        text: injected into the completion, tags included; if the tool failed, the message for the
            log.
        done: the completion ends with this reply.
        status: `ok`; anything else (the tool timed out, its server is gone) takes the completion
            out of its group's statistics. A tool that found nothing is ok and says so in `text`.
        values: numbers for rewards and metrics, added up over the completion.
        frame: characters at the start and at the end of `text` that are the environment's own, such
            as tags. What is between them comes from outside: it alone is cut where it is too long,
            and special tokens in it are broken up.
    """

    text: str
    done: bool = False
    status: Status = Status.OK
    values: Mapping[str, float] = field(default_factory=dict)
    frame: tuple[int, int] = (0, 0)


@runtime_checkable
class Environment(Protocol):
    """Replies to a model that stops in the middle of a completion to call a tool."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings after which the environment replies. With `END_OF_TURN` among them, it also
        replies to turns that the model ends, which needs `environment.layout = "turns"`."""
        ...

    def begin(self, prompt: Prompt, *, stream: Stream) -> Any:
        """The state of one completion; random numbers are derived from `stream`."""
        ...

    def reply(self, state: Any, text: str) -> Reply:
        """The answer to `text`, which the model wrote since the last reply, without the end token
        of a turn.

        Called in threads, at most one at a time for each state; an exception is a failed tool.
        """
        ...


@runtime_checkable
class Resuming(Protocol):
    """An environment whose state can be restored without repeating calls."""

    def resume(self, state: Any, texts: Sequence[str]) -> None:
        """Bring a new state to where earlier calls left it.

        Args:
            state: as `begin` returned it.
            texts: what `reply` was asked, in order; all of these calls succeeded.
        """
        ...


def resume(environment: Environment, state: Any, texts: Sequence[str]) -> None:
    """Bring a new state to where earlier calls left it. The calls are repeated unless the
    environment is `Resuming`.

    Raises:
        RunError: a repeated call failed.
    """
    if isinstance(environment, Resuming):
        environment.resume(state, texts)
    else:
        _repeat(environment, state, texts)


def _repeat(environment: Environment, state: Any, texts: Sequence[str]) -> None:
    for text in texts:
        reply = environment.reply(state, text)
        if reply.status is not Status.OK:
            raise RunError(f"environment: an earlier call failed when repeated: {reply.text}")


@runtime_checkable
class Choosing(Protocol):
    """An environment that hands each prompt to one of several."""

    def choice(self, prompt: Prompt) -> str:
        """The name of the environment that replies to the completions of a prompt."""
        ...

    def stops_of(self, prompt: Prompt) -> tuple[str, ...]:
        """The stop strings of that environment."""
        ...


@runtime_checkable
class Showing(Protocol):
    """An environment whose functions are shown to the model by the chat template."""

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The functions, as `apply_chat_template` takes them."""
        ...


Tool = Callable[[str], Reply]
"""From the text of a call to the reply, whose text is the bare result."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Where a call and its result stand in the text.

    Attributes:
        call: opening and closing tag of a call; the closing tag is the stop string.
        result: what is put before and after a result.
    """

    call: tuple[str, str]
    result: tuple[str, str]


SEARCH_TAGS: dict[str, Tags] = {
    "search-r1": Tags(
        call=("<search>", "</search>"),
        result=("\n\n<information>", "</information>\n\n"),
    ),
    "research": Tags(call=("<search>", "</search>"), result=(" <result>\n", "\n</result>")),
    "r1-searcher": Tags(
        call=("<|begin_of_query|>", "<|end_of_query|>"),
        result=("\n\n<|begin_of_documents|>\n", "<|end_of_documents|>\n\n"),
    ),
}
"""Tags of calls and results, by the system that uses them: Search-R1 (2503.09516), ReSearch
(2503.19470), R1-Searcher (2503.05592)."""


class TagState:
    """The state that an environment keeps of one completion.

    Attributes:
        calls: the text of every call so far, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []


class TagEnvironment:
    """Answers calls that a model writes between tags, inside one turn.

    Only what the model wrote since the last reply is searched for a call, so tags in the prompt or
    in a result are never taken for one. A result cannot close its own tags or open a call: tags in
    it are broken up.

    Args:
        tool: answers one call.
        tags: where calls and results stand.
        max_result_chars: characters of a result; the rest is cut, inside the tags.
        max_calls: calls of one completion; later calls are answered with an error.

    Raises:
        UsageError: an empty tag, or a limit below 1.
    """

    def __init__(
        self, tool: Tool, *, tags: Tags, max_result_chars: int = 2000, max_calls: int = 8
    ) -> None:
        for name, value in (("max_result_chars", max_result_chars), ("max_calls", max_calls)):
            if value < 1:
                raise UsageError(f"{name} = {value!r}: must be at least 1.")
        if not all(tag.strip() for tag in (*tags.call, *tags.result)):
            raise UsageError(f"environment: tags = {tags}: none may be empty.")
        self.tool, self.tags = tool, tags
        self.max_result_chars, self.max_calls = max_result_chars, max_calls

    @property
    def stops(self) -> tuple[str, ...]:
        """The closing tag of a call."""
        return (self.tags.call[1],)

    def begin(self, prompt: Prompt, *, stream: Stream) -> TagState:
        """A completion without calls."""
        return TagState()

    def reply(self, state: TagState, text: str) -> Reply:
        """The result of the call that ends `text`, between its tags."""
        call = self._call(text)
        if call is None:
            problem = f"no {self.tags.call[0]} before {self.tags.call[1]}"
            return self._wrapped(Reply(text=f"error: {problem}", values={"malformed": 1.0}))
        state.calls.append(call)
        if len(state.calls) > self.max_calls:
            return self._wrapped(Reply(text="error: no calls left", values={"refused": 1.0}))
        reply = self.answer(state, call)
        return self._wrapped(reply) if reply.status is Status.OK else reply

    def resume(self, state: TagState, texts: Sequence[str]) -> None:
        """Note earlier calls. They are repeated only in a subclass that overrides `begin`, `reply`
        or `answer`, because its state may depend on them."""
        own = type(self)
        keeps_more = any(
            getattr(own, name) is not getattr(TagEnvironment, name)
            for name in ("begin", "reply", "answer")
        )
        if keeps_more:
            _repeat(self, state, texts)
            return
        calls = map(self._call, texts)
        state.calls += [call for call in calls if call is not None]

    def answer(self, state: TagState, call: str) -> Reply:
        """The bare result of a call; overridden by environments that keep more of a completion."""
        return self.tool(call)

    def _call(self, text: str) -> str | None:
        """The text between the last pair of tags; None where no call was opened."""
        opening, closing = self.tags.call
        before, found, _ = text.rpartition(closing)
        start = before.rfind(opening)
        if not found or start < 0:
            return None
        return before[start + len(opening) :].strip()

    def _wrapped(self, reply: Reply) -> Reply:
        before, after = self.tags.result
        inside = self._harmless(reply.text)[: self.max_result_chars]
        values = {"calls": 1.0, **reply.values}
        return Reply(
            text=f"{before}{inside}{after}",
            done=reply.done,
            status=reply.status,
            values=values,
            frame=(len(before), len(after)),
        )

    def _harmless(self, text: str) -> str:
        """The text with every tag broken up, so that it can neither close its block nor call."""
        tags = {tag.strip() for tag in (*self.tags.call, *self.tags.result)}
        for tag in sorted(tags, key=len, reverse=True):
            text = text.replace(tag, f"{tag[0]} {tag[1:]}")
        return text

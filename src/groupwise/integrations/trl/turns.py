"""Calls and results as turns of a chat template: parsing, injection of results, conversion for
rewards.

A call is JSON between `<tool_call>` and `</tool_call>`, as templates of Qwen, Hermes and SmolLM
have it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from groupwise.config.connect import Connected, connect
from groupwise.environments import Reply
from groupwise.environments.functions import CALL_TAGS
from groupwise.errors import UsageError
from groupwise.integrations.trl.tools import Conversation, Toolset
from groupwise.models import Policy
from groupwise.models.foreign_code import time_limit
from groupwise.prompts.templates import template_text
from groupwise.rollouts.text import decode_all
from groupwise.rollouts.tools import InlineCalls, ToolEngine
from groupwise.settings import EnvironmentSettings
from groupwise.types import Completion, Engine, Group, Prompt, Stream

OPENING, CLOSING = CALL_TAGS.call
QUESTION, RESULT = "A question.", "A result."
THOUGHT = "</think>"
CALL_SECONDS = 120.0
"""Time limit of a call."""


class Call(NamedTuple):
    """What the model asked for."""

    name: str
    arguments: Mapping[str, Any]


class ToolTurns:
    """Answers calls as TRL does: in order, in the trainer's thread, with errors told to the model.

    A call that takes longer than `CALL_SECONDS` is such an error. A turn ends with its first call.
    One that is not JSON ends the completion, and so does one beyond `max_calls`. Without functions,
    environments make prompts and rewards alone.

    Args:
        tools: the functions.
        policy: whose chat template puts results into the conversation.
        max_tokens: of a completion; results may add as many.
        max_calls: of a completion; None for any number.

    Raises:
        UsageError: the chat template shows no tools, or writes calls in another form.
    """

    stops = (CLOSING,)

    def __init__(
        self, tools: Toolset, policy: Policy, *, max_tokens: int, max_calls: int | None
    ) -> None:
        self.tools, self.policy = tools, policy
        self.max_calls = max_calls
        self.frame = call_frame(policy.tokenizer) if tools.known else ("", "")
        framing = len(policy.tokenizer("".join(self.frame), add_special_tokens=False).input_ids)
        if framing >= max_tokens:
            raise UsageError(
                f"GRPOConfig.max_completion_length = {max_tokens}: the chat template alone puts "
                f"{framing} tokens around a result."
            )
        self.settings = EnvironmentSettings(
            name="tools", max_result_tokens=max_tokens, max_injected_tokens=max_tokens
        )
        self.splits_thoughts = THOUGHT in str(policy.tokenizer.chat_template)
        known = policy.tokenizer.get_vocab()
        tags = {known[tag] for tag in (OPENING, CLOSING) if tag in known}
        self.unsaid = frozenset(policy.tokenizer.all_special_ids) - tags

    def connect(self, *given: Any, **more: Any) -> Connected:
        """Engine and learner of a run, the engine with these tools."""
        found = connect(*given, **more)
        return replace(found, engine=self.around(found.engine))

    def around(self, engine: Engine) -> ToolEngine:
        """An engine whose completions call these tools."""
        return ToolEngine(
            engine,
            self,
            policy=self.policy,
            settings=self.settings,
            calls=InlineCalls(),
            ended=self.tools.ended,
        )

    def begin(self, prompt: Prompt, *, stream: Stream) -> Conversation:
        """A completion without calls."""
        return self.tools.begin(prompt, stream=stream)

    def reply(self, state: Conversation, text: str) -> Reply:
        """The result of the call that ends `text`, as the next turn of the conversation."""
        call = _call(text) if self.tools.known else None
        most = math.inf if self.max_calls is None else self.max_calls
        if call is None or len(state.results) >= most:
            return Reply(text="", done=True)
        failed = 0.0
        try:
            with time_limit(CALL_SECONDS):
                result = self.tools.call(state, call.name, call.arguments)
        except Exception as error:  # told to the model, whatever it is
            result, failed = {"error": str(error)}, 1.0
        content = result if isinstance(result, list) else str(result)
        state.results.append({"role": "tool", "name": call.name, "content": content})
        before, after = self.frame
        return Reply(
            text=f"{before}{_harmless(str(result))}{after}",
            values={"executed": 1.0, "failed": failed},
            frame=(len(before), len(after)),
        )

    def completions(self, group: Group) -> list[list[dict[str, Any]]]:
        """The completions of a group as TRL hands them to rewards: turns with `tool_calls`, and
        turns of the role "tool"."""
        known = self.tools.conversations(group)
        return [
            self._turns(completion, conversation)
            for completion, conversation in zip(group.completions, known, strict=True)
        ]

    def _turns(self, completion: Completion, known: Conversation) -> list[dict[str, Any]]:
        turns, results = [], iter(known.results)
        marked = groupby(zip(completion.tokens, completion.mask, strict=True), lambda one: one[1])
        for own, run in marked:
            tokens = [token for token, _ in run]
            turns.append(self._assistant(tokens) if own else dict(next(results)))
        return turns or [self._assistant([])]

    def _assistant(self, tokens: list[int]) -> dict[str, Any]:
        said = [token for token in tokens if token not in self.unsaid]
        content = decode_all(self.policy.tokenizer, [said])[0]
        turn: dict[str, Any] = {"role": "assistant"}
        if (call := _call(content)) is not None:
            asked = {"name": call.name, "arguments": dict(call.arguments)}
            turn["tool_calls"] = [{"type": "function", "function": asked}]
            content = content[: content.rfind(OPENING)].strip()
        if self.splits_thoughts and THOUGHT in content:
            thought, _, content = content.partition(THOUGHT)
            turn["reasoning_content"] = thought.replace("<think>", "").strip()
            content = content.strip()
        return {**turn, "content": content}


def call_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What a chat template puts between a call and its result, and between the result and the
    assistant's next turn.

    Raises:
        UsageError: no chat template, or one that shows no tools or writes calls in another form.
    """
    asked: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    function = {"name": "look_up", "arguments": {"word": "one"}}
    calls = [{"type": "function", "function": function}]
    turns = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "look_up", "content": RESULT},
    ]
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    described = {"name": "look_up", "description": "Looks up.", "parameters": parameters}
    schema = {"type": "function", "function": described}
    if not tokenizer.chat_template:
        raise _refused("there is none")
    try:
        shown, whole = _rendered(tokenizer, asked, [schema]), _rendered(tokenizer, turns, None)
    except Exception as error:  # templates raise what they like
        raise _refused(f"it refuses a conversation with a tool ({error})") from error
    if "look_up" not in shown:
        raise _refused("it does not show the model its tools")
    before, found, after = whole.partition(RESULT)
    said, closed, between = before.rpartition(CLOSING)
    if not found or not closed or _call(said + closed) != (function["name"], function["arguments"]):
        raise _refused(
            f"it does not write a call as {OPENING}{{JSON}}{CLOSING} with its result behind, but "
            f"as {whole!r}"
        )
    return between, after


def _refused(problem: str) -> UsageError:
    return UsageError(
        f"tools: not possible with this chat template: {problem}; use a model whose template has "
        f"{OPENING}, such as Qwen3."
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: Any, tools: Any) -> str:
    return template_text(
        turns, tokenizer, where="conversation", tools=tools, add_generation_prompt=True
    )


def _call(text: str) -> Call | None:
    """The call that ends a text; None where there is none, or it is not one."""
    before, closed, _ = text.rpartition(CLOSING)
    start = before.rfind(OPENING)
    if not closed or start < 0:
        return None
    try:
        asked = json.loads(before[start + len(OPENING) :])
        name, arguments = asked["name"], asked.get("arguments") or {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, arguments)


def _harmless(text: str) -> str:
    """The text with the template's tags broken up, so that it can neither close its turn nor
    call."""
    for tag in (*CALL_TAGS.call, *CALL_TAGS.result):
        text = text.replace(tag, f"{tag[0]} {tag[1:]}")
    return text

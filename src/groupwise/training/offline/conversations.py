"""Conversations as tokens, with a mask for what the assistant wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.prompts.examples import Example
from groupwise.prompts.preferences import are_messages
from groupwise.prompts.rows import Row, read_rows
from groupwise.prompts.templates import render, template_text
from groupwise.settings import SftSettings
from groupwise.training.offline.encoding import answer_tokens
from groupwise.training.stages.sft import learned_batch
from groupwise.types import Batch, Prompt


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Tokens of a conversation.

    Attributes:
        prompt: up to where the assistant first writes.
        tokens: all that follows.
        mask: True for what the assistant wrote, the tokens that end its turns included.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations of a data set, and how many were left out or cut, by reason."""

    items: tuple[Conversation, ...]
    dropped: Mapping[str, int]

    def __str__(self) -> str:
        """One line: what is there, and what was left out or cut."""
        learned = sum(sum(item.mask) for item in self.items)
        size = sum(len(item.prompt) + len(item.tokens) for item in self.items)
        said = [f"{len(self.items)} conversations, {size:,} tokens, {learned:,} of them learned"]
        return "; ".join(said + [f"{count} × {reason}" for reason, count in self.dropped.items()])


def read_conversations(settings: SftSettings) -> list[Row]:
    """The rows of the data set of a section, checked.

    Raises:
        UsageError: a row that cannot be used, with its number.
    """
    source = str(settings.data)
    rows = list(read_rows(source, split=settings.split, revision=settings.revision))
    for number, row in enumerate(rows, start=1):
        problem = _problem(row)
        if problem:
            raise UsageError(f"{os.path.basename(source)}, row {number}: {problem}")
    return rows


def _problem(row: Row) -> str | None:
    """What is wrong with a row, or None."""
    if row.get("messages") is not None:
        turns = row["messages"]
        if not are_messages(turns):
            return "messages: must be messages with role and content."
        roles = [turn["role"] for turn in turns]
        if "assistant" not in roles:
            return "messages: needs at least one turn of the assistant."
        if roles[0] == "assistant":
            return (
                "messages: must begin with a turn of the user or the system, not of the assistant."
            )
        return None
    if row.get("completion") is not None:
        if row.get("prompt") is None:
            return "prompt: is missing."
        for name in ("prompt", "completion"):
            text = isinstance(row[name], str) and row[name].strip()
            if not text and not are_messages(row[name]):
                return f"{name}: must be non-empty text, or messages."
        if isinstance(row["completion"], str):
            return None
        roles = [turn["role"] for turn in row["completion"]]
        if isinstance(row["prompt"], str) and roles != ["assistant"]:
            return "completion: after a prompt of text, must be text or one turn of the assistant."
        return None if "assistant" in roles else "completion: needs a turn of the assistant."
    if isinstance(row.get("text"), str):
        return None if row["text"].strip() else "text: is empty."
    return (
        "must have the column messages, or prompt and completion, or text; it has "
        f"{', '.join(map(str, row))}."
    )


def encode_conversations(
    rows: Sequence[Row], policy: Policy, settings: SftSettings
) -> Conversations:
    """Tokenize rows; those that are too long are refused, dropped or cut at their end, as set.

    Raises:
        UsageError: one is too long and is not to be dropped or cut, or nothing is left.
    """
    limit = min(settings.max_tokens or policy.context, policy.context)
    items, counts = [], dict[str, int]()
    for number, row in enumerate(rows, start=1):
        found = conversation_of(row, policy)
        size, cut = len(found.prompt) + len(found.tokens), found
        if size > limit:
            if settings.too_long == "refuse":
                raise UsageError(
                    f"sft: row {number} has {size} tokens and at most {limit} are allowed; set "
                    "sft.too_long = 'drop' or 'cut', or raise sft.max_tokens."
                )
            room = max(0, limit - len(found.prompt))
            cut = Conversation(
                prompt=found.prompt, tokens=found.tokens[:room], mask=found.mask[:room]
            )
        drops = cut is not found and (settings.too_long == "drop" or not any(cut.mask))
        if cut is not found:
            reason = f"conversations {'left out' if drops else 'cut'} at {limit} tokens"
            counts[reason] = counts.get(reason, 0) + 1
        if not drops:
            items.append(cut)
    if not items:
        raise UsageError(f"sft.max_tokens = {limit}: leaves no data; raise it.")
    return Conversations(items=tuple(items), dropped=counts)


def conversation_of(row: Row | Example, policy: Policy) -> Conversation:
    """A row, or a worked example, as tokens.

    Every turn of the assistant is what the chat template adds for it to what came before, its
    generation prompt included; so the policy learns to write exactly what it will be asked for.

    Raises:
        UsageError: the template rewrites earlier turns once later ones follow.
    """
    if isinstance(row, Example):
        prompt = tuple(render(row.prompt, policy.tokenizer))
        answer = answer_tokens(row.prompt, row.completion, policy)
        return Conversation(prompt=prompt, tokens=answer, mask=(True,) * len(answer))
    if row.get("messages") is not None:
        return _turns([dict(turn) for turn in row["messages"]], policy)
    if row.get("completion") is not None:
        return _completion(row["prompt"], row["completion"], policy)
    first, *rest = answer_tokens(Prompt(id="text", text=""), row["text"], policy)
    return Conversation(prompt=(first,), tokens=tuple(rest), mask=(True,) * len(rest))


def _completion(prompt: Any, completion: Any, policy: Policy) -> Conversation:
    if isinstance(prompt, str):
        said = completion if isinstance(completion, str) else completion[-1]["content"]
        given = Prompt(id="row", text=prompt)
        return conversation_of(Example(prompt=given, completion=said), policy)
    turns = [{"role": "assistant", "content": completion}]
    turns = turns if isinstance(completion, str) else [dict(turn) for turn in completion]
    return _turns([*map(dict, prompt), *turns], policy)


def _turns(messages: Sequence[dict[str, Any]], policy: Policy) -> Conversation:
    """A conversation by the chat template, piece by piece."""
    tokenizer: Any = policy.tokenizer
    if not tokenizer.chat_template:
        return _without_template(messages, policy)
    text, pieces = "", list[tuple[str, bool]]()
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = template_text(
            messages[:place], tokenizer, where="messages", add_generation_prompt=True
        )
        whole = template_text(messages[: place + 1], tokenizer, where="messages")
        if not (head.startswith(text) and whole.startswith(head)):
            raise UsageError(
                f"messages: the chat template rewrites what comes before turn {place + 1} once "
                "it follows, so the policy would never see a prefix of this conversation; use "
                "rows of prompt and completion."
            )
        pieces += [(head[len(text) :], False), (whole[len(head) :], True)]
        text = whole
    return _joined(pieces, policy)


def _without_template(messages: Sequence[dict[str, Any]], policy: Policy) -> Conversation:
    if [m["role"] for m in messages][-2:] != ["user", "assistant"] or len(messages) > 3:
        raise UsageError(
            "messages: a conversation of several turns needs a chat template; set "
            "tokenizer.chat_template."
        )
    prompt = Prompt(id="row", messages=tuple(messages[:-1]))
    return conversation_of(Example(prompt=prompt, completion=messages[-1]["content"]), policy)


def _joined(pieces: Sequence[tuple[str, bool]], policy: Policy) -> Conversation:
    """Pieces of text with whether they are learned; what a template writes after the token that
    ends a turn is not."""
    tokenizer: Any = policy.tokenizer
    prompt = tuple(tokenizer(pieces[0][0], add_special_tokens=False).input_ids)
    tokens, mask = list[int](), list[bool]()
    for text, learned in pieces[1:]:
        own = tokenizer(text, add_special_tokens=False).input_ids
        ends = [i for i, token in enumerate(own) if token in policy.end_tokens]
        last = ends[-1] if learned and ends else len(own) - 1
        tokens += own
        mask += [learned and i <= last for i in range(len(own))]
    size = len(mask) - mask[::-1].index(True)
    return Conversation(prompt=prompt, tokens=tuple(tokens[:size]), mask=tuple(mask[:size]))


def conversation_batch(items: Sequence[Conversation]) -> Batch:
    """Conversations as a batch whose token losses sum to the mean over all learned tokens."""
    return learned_batch(
        [item.prompt for item in items],
        [item.tokens for item in items],
        [item.mask for item in items],
    )

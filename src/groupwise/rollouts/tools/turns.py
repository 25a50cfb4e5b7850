"""Replies as turns of a conversation, between what the chat template puts around them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.prompts.templates import template_text
from groupwise.rollouts.text import decode_all

QUESTION, CALL, RESULT = "A question.", "A call.", "A result."
REPLIES_TO_CALLS, REPLIES_TO_TURNS = ("tool", "user"), ("user", "tool")
"""Who replies: the first role that the template knows."""


def turn_frame(
    tokenizer: PreTrainedTokenizerBase, roles: Sequence[str] = REPLIES_TO_CALLS
) -> tuple[str, str]:
    """What a chat template puts between an assistant's turn that calls and the reply, and between
    the reply and the assistant's next turn.

    Both are read off a made-up conversation. Its text must begin with that of the conversation up
    to the call: a template that changes earlier turns, such as one that drops reasoning, would show
    the model in training what it never saw when it wrote.

    Raises:
        UsageError: no chat template, or one that has no place for a reply or changes earlier turns.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "environment.layout = 'turns': the tokenizer has no chat template; set "
            "environment.layout = 'inline'."
        )
    asked: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
    problem = ""
    for role in roles:
        turns = [*asked, {"role": "assistant", "content": CALL}, {"role": role, "content": RESULT}]
        try:
            whole, start = _rendered(tokenizer, turns), _rendered(tokenizer, asked)
        except Exception as error:  # templates raise what they like
            problem = f"it refuses a turn of the role {role!r} ({error})"
            continue
        _, found, rest = whole.partition(CALL)
        before, there, after = rest.partition(RESULT)
        if not found or not there:
            problem = f"it leaves out a call, or a reply of the role {role!r}"
        elif not whole.startswith(start + CALL):
            shown = whole[: whole.find(CALL) + len(CALL)]
            problem = f"it changes earlier turns: {start + CALL!r} becomes {shown!r}"
        else:
            return before, after
    raise UsageError(
        f"environment.layout = 'turns': not possible with this chat template: {problem}."
    )


def turn_end(policy: Policy) -> tuple[int, tuple[str, str]]:
    """The end token with which the chat template ends a turn of the assistant, and what it puts
    between that token and the reply of a user, and between the reply and the assistant's next turn.

    Raises:
        UsageError: as `turn_frame`, or the template does not end turns with an end token.
    """
    before, after = turn_frame(policy.tokenizer, REPLIES_TO_TURNS)
    for token in sorted(policy.end_tokens):
        (text,) = decode_all(policy.tokenizer, [[token]])
        if text and before.startswith(text):
            return token, (before.removeprefix(text), after)
    raise UsageError(
        "environment.layout = 'turns': the environment replies to turns that the model ends, but "
        f"the chat template does not end them with an end token: it continues with {before!r}."
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> str:
    return template_text(turns, tokenizer, where="conversation", add_generation_prompt=True)

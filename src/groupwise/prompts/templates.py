"""Prompts as token ids, by chat template or as plain text, and checks that text survives a
tokenizer.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from groupwise.errors import ModelError, UsageError, first_line
from groupwise.models.foreign_code import memory_limit, time_limit
from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Prompts with their token ids, in order, and the number of dropped ones.

    Prompts of a large data set are rendered on access; one that is dropped has no tokens.
    """

    prompts: Sequence[Prompt]
    tokens: Sequence[tuple[int, ...]]
    dropped: int = 0


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt, up to where generation starts.

    Messages go through the chat template with its generation prompt; a last message of the
    assistant is continued. Plain text is tokenized unchanged. Without a chat template (a base
    model), an optional system message and one user message become plain text, each followed by an
    empty line.

    Raises:
        ModelError: the template rejects the messages or takes too long, or there is no template and
            the messages are a longer conversation.
        UsageError: the prompt is empty.
    """
    if prompt.text is None and tokenizer.chat_template:
        tokens = _by_template(prompt, tokenizer)
    else:
        text = prompt.text if prompt.text is not None else _without_template(prompt)
        tokens = list(tokenizer(text).input_ids)
    if not tokens:
        raise UsageError(f"prompt {prompt.id}: is empty; every prompt needs at least one token.")
    return tokens


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template reads schemas of functions."""
    return re.search(r"\btools\b", str(tokenizer.chat_template)) is not None


def render_all(
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int,
    too_long: Literal["refuse", "drop"] = "refuse",
) -> Rendered:
    """Render every prompt.

    Args:
        limit: most tokens of a prompt, usually the context minus the completion budget.
        too_long: "refuse" raises on the first longer prompt, "drop" removes and counts them.

    Raises:
        UsageError: a prompt is too long and not dropped, or none is left.
    """

    def fitting(prompt: Prompt) -> tuple[int, ...]:
        ids = render(prompt, tokenizer)
        if len(ids) <= limit:
            return tuple(ids)
        if too_long == "drop":
            return ()
        raise UsageError(
            f"prompt {prompt.id}: has {len(ids)} tokens and at most {limit} leave room for a "
            "completion; shorten it, lower the completion's budget, or drop long prompts "
            "(data.too_long = 'drop')."
        )

    if isinstance(prompts, LazySequence):
        drawn = LazySequence(len(prompts), lambda index: fitting(prompts[index]))
        return Rendered(prompts=prompts, tokens=drawn)
    kept: list[Prompt] = []
    tokens: list[tuple[int, ...]] = []
    dropped = 0
    for prompt in prompts:
        ids = fitting(prompt)
        if ids:
            kept.append(prompt)
            tokens.append(ids)
        else:
            dropped += 1
    if not kept:
        raise UsageError(f"prompts: all {dropped} have more than {limit} tokens, so none is left.")
    return Rendered(prompts=tuple(kept), tokens=tuple(tokens), dropped=dropped)


RENDER_SECONDS = 10.0
"""Longest time that a chat template may take for one prompt."""
RENDER_BYTES = 1 << 30
"""Most memory that it may take in addition."""
RENDER_CHARACTERS = 1 << 23
"""Longest text that it may write. A tokenizer takes about 300 bytes for each character."""

_FIXED = re.compile(r"""(?:\{%- set \w+ = (?:true|false|[\d.e+-]+|"[^"%]*") -%\})*""")
"""The prefix that `fix_variables` adds to a template."""


def fix_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, bool | int | float | str]
) -> None:
    """Set variables of the chat template inside the template itself.

    A model saved with this tokenizer is then prompted in the same mode by `eval`, `chat` or a
    server. Setting a variable again replaces its value.

    Args:
        tokenizer: its template is changed.
        variables: values by name, such as {"enable_thinking": False}.

    Raises:
        UsageError: there is no chat template, or it does not read a variable of that name.
    """
    for name, value in variables.items():
        where = f"data.chat_template_kwargs.{name} = {value!r}"
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise UsageError(f"{where}: the tokenizer has no chat template.")
        fixed = _FIXED.match(template)
        own = template[fixed.end() if fixed else 0 :]
        words = set(re.findall(r"\b[A-Za-z_]\w*", own))
        if name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UsageError(f"{where}: the chat template does not read it{hint}")
        before = template.removesuffix(own)
        tokenizer.chat_template = f"{before}{{%- set {name} = {json.dumps(value)} -%}}{own}"


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, else the end token, else 0; padding is masked and never trained on."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def check_round_trip(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[str]:
    """Check that texts survive encoding and decoding.

    A tag that is a special token vanishes wherever completions are decoded without special tokens,
    and every reward that looks for it is silently 0. Leading and trailing white space is ignored,
    as some tokenizers add or drop it.

    Returns:
        One line per text that does not survive, with the special tokens that decoding drops.
    """
    problems = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        whole = _decode(tokenizer, ids, skip=False)
        shown = _decode(tokenizer, ids, skip=True)
        special = sorted(
            {str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i in tokenizer.all_special_ids}
        )
        if whole.strip() != text.strip():
            problems.append(
                f"{text!r}: comes back from the tokenizer as {whole!r}, so no reward can find it."
            )
        elif shown.strip() != text.strip():
            problems.append(
                f"{text!r}: decoding drops {', '.join(special)}, special tokens of this "
                f"tokenizer, and leaves {shown!r}; add such tags as ordinary tokens "
                "(special=False), or use others."
            )
    return problems


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip: bool) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def _by_template(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [dict(message) for message in prompt.messages]
    continued = bool(messages) and messages[-1]["role"] == "assistant"
    text = template_text(
        messages,
        tokenizer,
        where=f"prompt {prompt.id}",
        tools=[dict(tool) for tool in prompt.tools] or None,
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def template_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    where: str,
    **settings: Any,
) -> str:
    """What the chat template makes of messages, within limits of time, memory and length.

    Args:
        where: names the messages in errors.
        settings: of `apply_chat_template`.

    Raises:
        ModelError: the template rejects the messages or exceeds a limit.
    """
    try:
        # In this order: an alarm must not come before the limit of the process is lifted.
        with memory_limit(RENDER_BYTES), time_limit(RENDER_SECONDS):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, **settings
            )
    except MemoryError:
        raise ModelError(
            f"{where}: its chat template needs more than {RENDER_BYTES >> 20} MiB."
        ) from None
    except Exception as error:  # a template is a program and may raise anything
        reason = first_line(error)
        raise ModelError(f"{where}: the chat template rejects its messages ({reason}).") from error
    if len(text) > RENDER_CHARACTERS:
        raise ModelError(
            f"{where}: its chat template writes {len(text)} characters; {RENDER_CHARACTERS} are "
            "allowed."
        )
    return str(text)


def _without_template(prompt: Prompt) -> str:
    roles = [message["role"] for message in prompt.messages]
    if roles not in (["user"], ["system", "user"]):
        raise ModelError(
            f"prompt {prompt.id}: is a conversation ({', '.join(roles)}) and the tokenizer has no "
            "chat template; set tokenizer.chat_template, or give plain prompts."
        )
    return "".join(f"{message['content']}\n\n" for message in prompt.messages)

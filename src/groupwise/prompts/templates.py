"""How a model sees a prompt: token ids by its chat template, or plain text; and whether text
survives the tokenizer."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from groupwise.errors import ModelError, UsageError
from groupwise.prompts.lazy import LazySequence
from groupwise.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Prompts with their token ids, in the order given, and how many were dropped as too long.

    Of a data set too large to hold, prompts are rendered when they are drawn, and one that is too
    long and to be dropped has no tokens.
    """

    prompts: Sequence[Prompt]
    tokens: Sequence[tuple[int, ...]]
    dropped: int = 0


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt, up to where the model is to go on writing.

    Messages go through the chat template, with its generation prompt, or going on with the last
    message when that is the assistant's. Plain text goes through the tokenizer as it is. A
    tokenizer without chat template is a base model's: there a system message and one user message
    become plain text, joined by an empty line and ended by one.

    Raises:
        ModelError: the template refuses the messages, or there is none and the messages are a
            longer conversation.
        UsageError: nothing is left to put before the model.
    """
    if prompt.text is None and tokenizer.chat_template:
        tokens = _by_template(prompt, tokenizer)
    else:
        text = prompt.text if prompt.text is not None else _without_template(prompt)
        tokens = list(tokenizer(text).input_ids)
    if not tokens:
        raise UsageError(f"prompt {prompt.id}: is empty; every prompt needs at least one token.")
    return tokens


def render_all(
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int,
    too_long: Literal["refuse", "drop"] = "refuse",
) -> Rendered:
    """Render every prompt and see to those of more than `limit` tokens.

    Args:
        limit: most tokens a prompt may have, usually the context less the completion's budget.
        too_long: "refuse" raises on the first one, "drop" leaves them out and counts them.

    Raises:
        UsageError: a prompt is too long and is to be refused, or none is left.
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
        drawn = LazySequence(len(prompts), lambda place: fitting(prompts[place]))
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


_FIXED = re.compile(r"""(?:\{%- set \w+ = (?:true|false|[\d.e+-]+|"[^"%]*") -%\})*""")
"""What `fix_variables` puts before a template."""


def fix_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, bool | int | float | str]
) -> None:
    """Give variables of the chat template their values, in the template itself.

    A model that is saved with this tokenizer is asked in the same mode by whoever loads it: `eval`,
    `chat` or a server. A value that is given again replaces the earlier one.

    Args:
        tokenizer: its template is changed.
        variables: name → value, such as {"enable_thinking": False}.

    Raises:
        UsageError: there is no chat template, or it does not read a variable of that name.
    """
    for name, value in variables.items():
        where = f"data.chat_template_kwargs.{name} = {value!r}"
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise UsageError(f"{where}: the tokenizer has no chat template that could read it.")
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
    """An id to pad with: the tokenizer's own, else its end token, else 0. Padding is masked, so it
    is never trained on."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def check_round_trip(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[str]:
    """What is wrong with how texts come back from the tokenizer; an empty list when nothing is.

    A tag that is a special token vanishes wherever completions are decoded with special tokens
    skipped, and then every reward that looks for it is 0 in silence. White space at either end is
    not compared, as some tokenizers add or drop it there.

    Returns:
        One line per text that does not survive, naming the special tokens that decoding drops.
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
    going_on = bool(messages) and messages[-1]["role"] == "assistant"
    try:
        tokens = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not going_on,
            continue_final_message=going_on,
        )
    except (
        Exception
    ) as error:  # A template is a program of the model's makers and raises what it likes.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"prompt {prompt.id}: the chat template refuses its messages ({reason})."
        ) from error
    return [int(token) for token in tokens]  # pyright: ignore[reportArgumentType]


def _without_template(prompt: Prompt) -> str:
    roles = [message["role"] for message in prompt.messages]
    if roles not in (["user"], ["system", "user"]):
        raise ModelError(
            f"prompt {prompt.id}: is a conversation ({', '.join(roles)}) and the tokenizer has no "
            "chat template; set tokenizer.chat_template, or give plain prompts."
        )
    return "".join(f"{message['content']}\n\n" for message in prompt.messages)

"""The tokenizer of the embedded model: whole words where it knows them, bytes everywhere else.

It is a Qwen2 tokenizer with a vocabulary of its own, because `transformers` rebuilds the tokenizer
of every Qwen2 model by that class's rules, whatever the files in the folder say. Digits are always
single tokens, and the tags are ordinary tokens, so they survive decoding with special tokens
skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.prompts.generators.word_problems import (
    HELD_OUT_TEMPLATES,
    NAMES,
    THINGS,
    TRAIN_TEMPLATES,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_ENDS: dict[str, Any] = {"eos_token": END, "pad_token": PAD, "unk_token": None}
SIZE = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_OTHER_WORDS = """
the a of to and in is for on at by with from as it he she they his her their how many much each
every if does do did was were will would can that this than more less all only other both who what
when which there one two three four five six seven eight nine ten half twice times day days week
weeks month year years hour hours minute minutes old total number money cost costs dollars pay paid
price buy bought sell sold make made get got give gave take took eat need left first second then
after before same per another people friends school house car water pounds feet miles be not or so
up out but had have has him new
"""
"""What word problems in general are made of; the merges left over are learned from these."""


def small_tokenizer() -> PreTrainedTokenizerBase:
    """Build the tokenizer.

    Returns:
        A tokenizer of 512 tokens for which `decode(encode(text)) == text` for every text in Unicode
        normal form C, the form every Qwen2 tokenizer brings text into. It has a chat template, a
        padding token, and an end token that also ends every turn. Every word of the word problems
        is one token.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    blank = Qwen2Tokenizer(vocab={}, merges=[], **_ENDS)
    special = [PAD, END, *ROLES]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(TAGS) - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Repeated, so that every merge of these words comes before the first one of any other word.
    learned.train_from_iterator([*_texts()] * 100 + _OTHER_WORDS.split("\n"), trainer)
    model = json.loads(learned.to_str())["model"]
    return made_tokenizer(model["vocab"], model["merges"], tags=TAGS)


def made_tokenizer(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], *, tags: Sequence[str]
) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with the turns and ends of the small models; tags are ordinary
    tokens."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=dict(vocab),
        merges=[tuple(pair) for pair in merges],  # pyright: ignore[reportArgumentType]
        **_ENDS,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    for tag in tags:
        token: Any = AddedToken(tag, special=False, normalized=False)
        tokenizer.add_tokens(token)
    return tokenizer


def _texts() -> list[str]:
    """Every sentence form with every word that can fill it."""
    fields = {"name": "", "he": "he", "He": "He", "things": "", "n": ""}
    forms = []
    for template in (*TRAIN_TEMPLATES, *HELD_OUT_TEMPLATES):
        for form in (
            template.start,
            template.add,
            template.subtract,
            template.multiply,
            template.question,
        ):
            forms += [
                f"{form} {form}".format(**fields | {"he": he, "He": he.title()})
                for he in ("he", "she")
            ]
    return [*forms, *(f"{word} {word}" for word in (*NAMES, *THINGS))]

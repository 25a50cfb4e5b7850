"""Prompts' rewards and tokenizers that every side of a benchmark shares; no side's own code.

Needs only `transformers` beside the standard library, so that it runs in every environment.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def checksum(completions: list[str], **_: Any) -> list[float]:
    """A reward for text without meaning: cheap, the same everywhere, and rarely equal in a
    group."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]


def tagged_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the text between the answer tags is the reference answer."""
    found = [ANSWER.search(text) for text in completions]
    return [
        float(match is not None and match.group(1) == right)
        for match, right in zip(found, answer, strict=True)
    ]


REWARDS = {"checksum": checksum, "tagged_answer": tagged_answer}


def tokenizer_of(folder: str, *, endless: bool) -> Any:
    """The tokenizer of a model folder.

    Args:
        endless: the model is a random one whose completions must all have the same length: the end
            token gets an id one beyond its vocabulary, which it cannot produce.
    """
    if not endless:
        return AutoTokenizer.from_pretrained(folder)
    file = str(Path(folder) / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>")
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    return tokenizer

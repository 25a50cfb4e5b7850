"""Items of the Korean orthography task: choose the right form in a sentence and say why.

The package ships items of its own writing for the public norms, in the competition's schema; the
competition's own are not free to pass on.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any, Literal

from groupwise.types import Prompt

KOREAN_PROMPT = (
    "{question}\n\n답은 다음 꼴로 쓰십시오. 고른 문장을 큰따옴표로 묶고 "
    "'이 옳다.'나 '가 옳다.'를 붙인 뒤 까닭을 적습니다.\n"
    '예: "맑은 하늘"이 옳다. 까닭은 이러이러하다.'
)
_HELD_OUT_EVERY = 5


def korean_norms(
    count: int, *, split: Literal["train", "held_out"] = "train", seed: int = 0
) -> list[Prompt]:
    """The items that ship with the package: 74, of which every fifth is held out.

    Args:
        count: at most this many; fewer if the split has fewer.
        split: "train" or "held_out".
        seed: ignored: the items are fixed.

    Example:
        >>> len(korean_norms(100)), len(korean_norms(100, split="held_out"))
        (60, 14)
    """
    file = importlib.resources.files("groupwise") / "rewards" / "data" / "korean_norms.jsonl"
    chosen = [
        _prompt(json.loads(line))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1)
        if (number % _HELD_OUT_EVERY == 0) == (split == "held_out")
    ]
    return chosen[:count]


def _prompt(item: Mapping[str, Any]) -> Prompt:
    question = item["input"]["question"]
    return Prompt(
        id=item["id"],
        messages=({"role": "user", "content": KOREAN_PROMPT.replace("{question}", question)},),
        answer=item["output"]["answer"],
        columns={
            "question": question,
            "question_type": item["input"]["question_type"],
            "category": item["category"],
        },
    )

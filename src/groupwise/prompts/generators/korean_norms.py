"""Items of the Korean orthography task: choose the right form in a sentence and say why.

A file has one object per item: {"id", "input": {"question_type", "question"}, "output":
{"answer"}}, as a JSON list or one per line. The package ships items of its own writing for the
public norms; the competition's own are not free to pass on.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import UsageError
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
    prompts = _prompts(file.read_text("utf-8"), "korean_norms")
    chosen = [
        prompt
        for number, prompt in enumerate(prompts, start=1)
        if (number % _HELD_OUT_EVERY == 0) == (split == "held_out")
    ]
    return chosen[:count]


def read_korean_norms(path: str | Path) -> list[Prompt]:
    """The items of a file, as prompts; columns question_type, category where given.

    Raises:
        UsageError: no such file, or an item without question.
    """
    try:
        text = Path(path).expanduser().read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data = {str(path)!r}: cannot be read ({error}).") from error
    return _prompts(text, str(path))


def _prompts(text: str, where: str) -> list[Prompt]:
    try:
        if text.lstrip().startswith("["):
            items = json.loads(text)
        else:
            items = [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: is not JSON ({error.msg}).") from error
    return [_prompt(item, f"{where}, item {number}") for number, item in enumerate(items, start=1)]


def _prompt(item: Any, where: str) -> Prompt:
    given = item.get("input") if isinstance(item, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("question"), str):
        raise UsageError(f'{where}: must be an object with "input": {{"question": …}}.')
    output = item.get("output")
    return Prompt(
        id=str(item.get("id", where)),
        messages=(
            {"role": "user", "content": KOREAN_PROMPT.replace("{question}", given["question"])},
        ),
        answer=output.get("answer") if isinstance(output, Mapping) else None,
        columns={
            "question": given["question"],
            "question_type": given.get("question_type"),
            "category": item.get("category"),
        },
    )

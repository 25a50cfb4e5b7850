"""Oddities of training prompts are said once, before the first step."""

from __future__ import annotations

from types import SimpleNamespace

from groupwise.prompts.lazy import LazySequence
from groupwise.prompts.remarks import remarks
from groupwise.prompts.sources import load_prompts

PLAIN, CHAT = SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="{{ messages }}")


def test_missing_answers_repeated_rows_and_a_missing_template_are_said() -> None:
    rows = [{"prompt": "1+1?", "answer": "2"}] * 3 + [{"prompt": "1+2?", "answer": None}]
    prompts = load_prompts(rows)
    assert remarks(prompts, CHAT, per_step=4) == [
        "data.train: 1 of 4 rows have no answer; rewards that need one cannot judge them",
        "data.train: 2 of 4 rows are duplicates",
    ]
    first, second, *_ = remarks(prompts, PLAIN, per_step=5)
    assert "has 4 prompts and a step draws 5 (prompts_per_step)" in first
    assert "has no chat template" in second


def test_ordinary_data_gets_no_remark_and_lazy_rows_are_not_read() -> None:
    prompts = load_prompts([{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)])
    assert remarks(prompts, CHAT, per_step=4) == []
    read: list[int] = []

    def one(index: int):  # type: ignore[no-untyped-def]
        read.append(index)
        return prompts[index % 4]

    assert remarks(LazySequence(1000, one), CHAT, per_step=4) == [] and read == [0]

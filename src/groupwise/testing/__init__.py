"""Checks that users run on what they write themselves, before a run depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.errors import UsageError
from groupwise.rewards.builtin.text import references
from groupwise.types import Completion, Finish, Group, Prompt

WRITINGS: Mapping[str, str] = {
    "plain": "{answer}",
    "boxed": "The answer is \\boxed{{{answer}}}.",
    "answer tag": "<answer>{answer}</answer>",
    "reasoning and answer": "<reasoning>\nIt follows from the question.\n</reasoning>\n"
    "<answer>\n{answer}\n</answer>\n",
    "think and answer": "<think>\nIt follows from the question.\n</think>\n"
    "<answer>\n{answer}\n</answer>",
    "think and box": "<think>\nIt follows from the question.\n</think>\n\\boxed{{{answer}}}",
    "gsm8k": "It follows from the question.\n#### {answer}",
}
"""Ways to write down an answer; the one that earns most is taken for the reference answers."""

GARBAGE = "Lorem ipsum dolor sit amet, qwzx 17 vbnm; the of and to."
"""A text that earns nothing from a sound reward."""
LONG_WORDS = 20_000
"""Words of the longest text that is judged."""


class JudgesGroups(Protocol):
    """The part of a scorer that `check_reward` uses."""

    def submit(self, group: Group) -> Future[Any]: ...


@dataclass(frozen=True, kw_only=True)
class JudgedText:
    """What one text earned.

    Attributes:
        prompt: id of the prompt.
        kind: gold, wrong, garbage, empty, truncated, long, or sample.
        text: what was judged.
        total, correct: NaN where not judged.
        parts: by name, before weighting.
        status, error: what became of judging it.
    """

    prompt: str
    kind: str
    text: str
    total: float
    correct: float
    parts: Mapping[str, float]
    status: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RewardCheck:
    """What `check_reward` found; printing it shows a table.

    Attributes:
        rows: every text that was judged.
        problems: sentences; empty where the reward did what it should.
        writing: how the reference answers were written.
        seconds: per part, for one completion on average.
    """

    rows: Sequence[JudgedText]
    problems: Sequence[str]
    writing: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def table(self) -> list[dict[str, Any]]:
        """One row of plain values per text, for tables and JSON."""
        return [
            {
                "prompt": row.prompt,
                "kind": row.kind,
                "total": row.total,
                "correct": row.correct,
                **row.parts,
                "status": row.status,
                "error": row.error,
                "text": row.text if len(row.text) <= 60 else row.text[:57] + "...",
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        parts = list(self.rows[0].parts) if self.rows else []
        correct = ["correct"] if any(row.correct == row.correct for row in self.rows) else []
        head = ["prompt", "kind", "total", *correct, *parts, "status"]
        lines = [head]
        for row in self.rows:
            numbers = [row.total, *([row.correct] if correct else []), *row.parts.values()]
            lines.append([row.prompt, row.kind, *map(_figure, numbers), row.status])
        times = [f"{1000 * self.seconds.get(part, 0.0):.2f} ms" for part in parts]
        lines.append(["", "time", "", *("" for _ in correct), *times, ""])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        shown = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        verdict = [f"problem: {text}" for text in self.problems] or ["no problem found"]
        return "\n".join([*shown, f"style of the reference answers: {self.writing}", *verdict])


def check_reward(
    scorer: JudgesGroups,
    prompts: Sequence[Prompt],
    samples: Mapping[str, Sequence[str]] | None = None,
    *,
    gold: Callable[[Prompt], str] | None = None,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> RewardCheck:
    """Check a reward before training: reference answers must earn the most, garbage the least.

    Every prompt is judged as one group of: its reference answer, the answer of another prompt,
    garbage, the empty text, the reference answer cut off in the middle, and a very long text, and
    the user's own samples.

    Args:
        scorer: of `groupwise.rewards.build_scorer` or `from_functions`.
        prompts: some rows of the data, with reference answers.
        samples: further texts by prompt id.
        gold: writes the ideal completion of a prompt; by default the writing of `WRITINGS` that
            earns most.
        tokenize: ids of a text; by default every word counts as one token.

    Raises:
        UsageError: no prompt has a reference answer and `gold` is not given.
    """
    usable = [prompt for prompt in prompts if gold or prompt.answer is not None]
    if not usable:
        raise UsageError("prompts: none has a reference answer; give `gold`.")
    ids = tokenize or _words
    writing, write = ("given", gold) if gold else _best_writing(scorer, usable, ids)
    rows: list[JudgedText] = []
    seconds: dict[str, float] = {}
    for number, prompt in enumerate(usable):
        other = usable[(number + 1) % len(usable)]
        texts: list[tuple[str, str, Finish]] = [("gold", write(prompt), "stop")]
        if other.answer is not None and str(other.answer) != str(prompt.answer):
            texts.append(("wrong", write(other), "stop"))
        texts.append(("garbage", GARBAGE, "stop"))
        texts.append(("empty", "", "stop"))
        texts.append(("truncated", write(prompt)[: len(write(prompt)) // 2], "length"))
        texts.append(("long", "and then " * (LONG_WORDS // 2), "length"))
        texts.extend(("sample", text, "stop") for text in (samples or {}).get(prompt.id, ()))
        score = scorer.submit(_group(prompt, [(t, f) for _, t, f in texts], ids)).result()
        for part, spent in score.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + spent
        rows += [_row(prompt, kind, text, score, i) for i, (kind, text, _) in enumerate(texts)]
    seconds = {part: spent / len(rows) for part, spent in seconds.items()}
    return RewardCheck(rows=rows, problems=_problems(rows), writing=writing, seconds=seconds)


def _words(text: str) -> list[int]:
    return [hash(word) % 50_000 for word in text.split()]


def _group(
    prompt: Prompt, texts: Sequence[tuple[str, Finish]], ids: Callable[[str], Sequence[int]]
) -> Group:
    completions = []
    for text, finish in texts:
        tokens = list(ids(text))
        completions.append(
            Completion(
                tokens=tokens,
                mask=[True] * len(tokens),
                logprobs=[0.0] * len(tokens),
                text=text,
                finish=finish,
            )
        )
    asked = list(ids(str(prompt)))
    return Group(prompt=prompt, prompt_tokens=asked, completions=tuple(completions))


def _best_writing(
    scorer: JudgesGroups, prompts: Sequence[Prompt], ids: Callable[[str], Sequence[int]]
) -> tuple[str, Callable[[Prompt], str]]:
    """The way to write the reference answers that earns most, each judged in a group of its own. Of
    several references, the first alone is tried too."""
    listed = any(len(references(prompt.answer)) > 1 for prompt in prompts)
    earned = {}
    for name, form in WRITINGS.items():
        for first in (False, True) if listed else (False,):
            totals = []
            for prompt in prompts[:4]:
                asked = _group(prompt, [(_written(form, prompt, first=first), "stop")], ids)
                total = float(scorer.submit(asked).result().total[0])
                totals.append(total if total == total else float("-inf"))
            earned[name, first] = sum(totals)
    name, first = max(earned, key=lambda way: earned[way])
    return name, lambda prompt: _written(WRITINGS[name], prompt, first=first)


def _written(form: str, prompt: Prompt, *, first: bool) -> str:
    answer = references(prompt.answer)[0] if first else str(prompt.answer)
    return form.format(answer=answer.rpartition("####")[2].strip())


def _figure(number: float) -> str:
    """A number of the table; a dash where nothing was judged."""
    return f"{number:.3f}" if number == number else "–"


def _row(prompt: Prompt, kind: str, text: str, score: Any, place: int) -> JudgedText:
    return JudgedText(
        prompt=prompt.id,
        kind=kind,
        text=text,
        total=score.total[place],
        correct=score.correct[place],
        parts={name: values[place] for name, values in score.parts.items()},
        status=score.status[place].value,
        error=score.errors[place],
    )


def _problems(rows: Sequence[JudgedText]) -> list[str]:
    found = []
    for row in rows:
        if row.kind != "gold":
            continue
        where = f"prompt {row.prompt}"
        if row.status != "ok":
            found.append(f"{where}: the reference answer is {row.status} ({row.error})")
            continue
        if row.correct == row.correct and row.correct < 1:
            found.append(f"{where}: the reference answer counts as {row.correct:g} correct")
        for other in rows:
            if other.prompt == row.prompt and other.kind not in ("gold", "sample"):
                if other.status == "ok" and other.total >= row.total:
                    found.append(
                        f"{where}: {other.kind} earns {other.total:g}, "
                        f"the reference answer {row.total:g}"
                    )
    failed = [row for row in rows if row.status in ("error", "timeout")]
    if failed:
        found.append(
            f"{len(failed)} of {len(rows)} texts ended in {failed[0].status}: {failed[0].error}"
        )
    return found

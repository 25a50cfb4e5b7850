"""Sampled answers as a file: n scored completions of every prompt, for later stages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config import Config
from groupwise.config.connect import configured_engine, load_to_answer, make_scorer
from groupwise.config.data import load_eval, load_train, rendered
from groupwise.errors import UsageError
from groupwise.prompts.templates import Rendered
from groupwise.rewards import Scorer
from groupwise.rewards.scoring.rows import check_rows
from groupwise.rundir.files import append_text
from groupwise.rundir.provenance import digest, fingerprint, write_origin
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.stages.blocks import begun, data_hashes, whole_blocks
from groupwise.training.stages.rows import line
from groupwise.types import Engine, Group, Prompt, Request, Scores, Stream

STREAM = -2
"""Step of the random streams of samples, which share none with training or evaluation."""

BLOCK = 32
"""Prompts that are scored and written together; a killed command loses at most one such block."""

OF_SAMPLES = ("model", "data", "environment", "sampling", "combine", "rewards")
"""Sections of a recipe that decide what is sampled and how it is scored."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A finished file of samples.

    Attributes:
        path: the file, one row per answer.
        prompts: number of prompts.
        rows: number of answers.
        judged: answers that could be judged.
        correct: right ones among them; None where no reward defines that.
        solved: prompts with at least one right answer.
    """

    path: Path
    prompts: int
    rows: int
    judged: int
    correct: int | None
    solved: int

    def __str__(self) -> str:
        right = "" if self.correct is None else f", {self.correct} right"
        solved = "" if self.correct is None else f"; {self.solved} prompts solved at least once"
        return f"{self.rows} answers to {self.prompts} prompts{right}{solved}"


def sample(
    config: Config,
    model: str | Path,
    output: str | Path,
    *,
    count: int = 8,
    split: str = "train",
    prompts: int | None = None,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> Sampled:
    """Sample and score answers to the prompts of a recipe, and write them as JSON lines.

    A row has the columns of its prompt, and `id`, `prompt` (messages or text), `answer`, `sample`,
    `completion`, `tokens`, `finish`, `reward`, `correct` and `parts`; rows are ordered by prompt
    and sample. An interrupted call continues after its last complete block of prompts; the finished
    file equals that of an uninterrupted call. The random numbers of a prompt depend on its place in
    the data alone, so shards sample what one call samples.

    Args:
        config: of the recipe: data, sampling, rewards and engine.
        model: folder, hub name or "bundled".
        output: the file; its provenance is written to `NAME.origin.json` next to it.
        count: answers per prompt.
        split: "train" or "eval", the prompts of `data.train` or the held-out ones.
        prompts: use only this many prompts; None takes all.
        shard: (i, n) samples every n-th prompt from the i-th on, counted from 0.
        progress: shows the blocks under the name "sample", and is closed; None shows them on
            standard error.

    Raises:
        UsageError: a count below 1, no such split, no prompts, or a file that other settings made.
    """
    _check(count, split, shard)
    settings = _settings(config, model, count=count, split=split, prompts=prompts, shard=shard)
    path = Path(output)
    finished = begun(path, settings)
    policy = load_to_answer(config, model)
    data = load_train(config) if split == "train" else load_eval(config)
    if not data:
        raise UsageError(f"data.eval: must be set, as {config.data.train} has no split to sample.")
    ready = rendered(config, policy, data[:prompts])
    places = range(shard[0], len(ready.prompts), shard[1])
    if not places:
        raise UsageError(f"--shard = {shard[0] + 1}/{shard[1]}: has none of {len(data)} prompts.")
    blocks = [places[start : start + BLOCK] for start in range(0, len(places), BLOCK)]
    kept = whole_blocks(path, [len(block) * count for block in blocks])
    with (
        closing(progress or show_progress({"sample": len(blocks)})) as showing,
        closing(make_scorer(config)) as scorer,
        closing(configured_engine(config, policy)) as engine,
    ):
        for said in check_rows(scorer, ready.prompts, where=f"data.{split}"):
            showing.log(said)
        made = _blocks(config, ready, blocks[kept:], count, engine=engine, scorer=scorer)
        for number, rows in enumerate(made, start=kept + 1):
            append_text(path, "".join(map(line, rows)))
            showing.step("sample", number, {"reward": _mean(rows, "reward")})
    found = summary(path)
    if not finished:
        write_origin(path, settings | {"finished": True, "rows": found.rows})
    return found


def summary(path: str | Path) -> Sampled:
    """What a file of samples holds."""
    rows = [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines()]
    known = [row for row in rows if row["correct"] is not None]
    right = [row for row in known if row["correct"] >= 1]
    return Sampled(
        path=Path(path),
        prompts=len({row["id"] for row in rows}),
        rows=len(rows),
        judged=sum(row["reward"] is not None for row in rows),
        correct=len(right) if known else None,
        solved=len({row["id"] for row in right}),
    )


def _check(count: int, split: str, shard: tuple[int, int]) -> None:
    if count < 1:
        raise UsageError(f"count = {count}: must be at least 1.")
    if split not in ("train", "eval"):
        raise UsageError(f"split = {split!r}: must be 'train' or 'eval'.")
    if not 0 <= shard[0] < shard[1]:
        raise UsageError(f"shard = {shard}: must be (i, n) with 0 ≤ i < n.")


def _settings(config: Config, model: str | Path, **more: Any) -> dict[str, Any]:
    """Everything that determines the content of the file."""
    values = config.model_dump(mode="json", exclude_defaults=True, include=set(OF_SAMPLES))
    values.get("model", {}).pop("path", None)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in more.items()}
    settings = {"recipe": values, "seed": config.seed, **plain}
    if settings["split"] == "eval":
        settings["evaluation.prompts"] = config.evaluation.prompts
    data = data_hashes(config)
    return {
        "made_by": "sample",
        "model": str(model),
        "model_hash": fingerprint(model),
        "data_hash": data,
        "settings": settings,
        "digest": digest(settings | {"model": fingerprint(model), "data": data}),
    }


def _blocks(
    config: Config,
    ready: Rendered,
    blocks: Sequence[Sequence[int]],
    count: int,
    *,
    engine: Engine,
    scorer: Scorer,
) -> Iterator[list[dict[str, Any]]]:
    """The rows of every block, in order; the engine samples the next block meanwhile.

    A block is scored as one batch, because a combination may compare the rewards of a batch.
    """
    requests = (
        Request(
            prompt=ready.prompts[place],
            tokens=ready.tokens[place],
            group=count,
            stream=Stream(config.seed, STREAM, 0, place),
        )
        for block in blocks
        for place in block
    )
    groups: dict[int, Group] = {}
    tickets: dict[int, Any] = {}
    waiting = list(blocks)
    for group in engine.generate(requests, config.sampling) if blocks else ():
        place = group.stream.place
        groups[place], tickets[place] = group, scorer.submit(group)
        while waiting and all(each in groups for each in waiting[0]):
            block = waiting.pop(0)
            scores = scorer.gather([tickets.pop(each) for each in block])
            yield [
                row
                for number, each in enumerate(block)
                for row in _rows(groups.pop(each), scores, number)
            ]


def _rows(group: Group, scores: Scores, number: int) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    columns = {k: v for k, v in prompt.columns.items() if _storable(v)}
    for sample_number, completion in enumerate(group.completions):
        yield {
            **columns,
            "id": prompt.id,
            "prompt": _question(prompt),
            "answer": prompt.answer,
            "sample": sample_number,
            "completion": completion.text,
            "tokens": completion.own_tokens,
            "finish": completion.finish,
            "reward": _known(scores.total[number, sample_number]),
            "correct": _known(scores.correct[number, sample_number]),
            "parts": {k: _known(v[number, sample_number]) for k, v in scores.parts.items()},
        }


def _question(prompt: Prompt) -> Any:
    """The prompt as the column that a recipe reads it from."""
    return [dict(message) for message in prompt.messages] if prompt.text is None else prompt.text


def _storable(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _known(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _mean(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    known = [row[column] for row in rows if row[column] is not None]
    return sum(known) / len(known) if known else math.nan

"""Tests the reward of a recipe on examples before a run depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from groupwise.config import Config
from groupwise.config.connect import make_scorer
from groupwise.config.data import load_train
from groupwise.errors import UsageError
from groupwise.prompts.rows import read_rows
from groupwise.testing import RewardCheck, check_reward
from groupwise.types import Prompt


def try_reward(config: Config, *, prompts: int = 4, samples: str | None = None) -> RewardCheck:
    """Judge reference answers, rubbish and the user's own samples with the reward of a recipe.

    Args:
        config: whose data and rewards are used; no model is loaded.
        prompts: how many of the training prompts.
        samples: a .jsonl, .json, .csv or .parquet file with columns `prompt` (its id or its text)
            and `text` (a completion of it).

    Raises:
        UsageError: no reference answers, a missing column, or a sample of an unknown prompt.
    """
    known = load_train(config)
    own = {} if samples is None else _samples(samples, known)
    chosen = [*(prompt for prompt in known if prompt.id in own), *known]
    distinct = list({prompt.id: prompt for prompt in chosen}.values())
    scorer = make_scorer(config)
    try:
        return check_reward(scorer, distinct[: max(prompts, len(own))], own)
    finally:
        scorer.close()


def _samples(path: str, prompts: Sequence[Prompt]) -> Mapping[str, Sequence[str]]:
    """The user's completions by the id of the prompt they answer."""
    ids = {key: prompt.id for prompt in prompts for key in (prompt.id, str(prompt))}
    found: dict[str, list[str]] = {}
    for number, row in enumerate(read_rows(path), start=1):
        for column in ("prompt", "text"):
            if column not in row:
                raise UsageError(f"{path}, row {number}: must have a column {column!r}.")
        if row["prompt"] not in ids:
            raise UsageError(
                f"{path}, row {number}: prompt {str(row['prompt'])[:60]!r} is neither the id nor "
                "the text of a training prompt of the recipe."
            )
        found.setdefault(ids[row["prompt"]], []).append(str(row["text"]))
    return found

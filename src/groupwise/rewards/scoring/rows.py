"""Data rows that a reward cannot judge, found before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from groupwise.errors import UsageError
from groupwise.rewards.base import Unjudgeable
from groupwise.rewards.scoring.adapters import RewardFn, inner, settings_for
from groupwise.rewards.scoring.scorer import Scorer
from groupwise.types import Prompt

ROWS_READ = 200
"""Rows that are looked at; the first ones."""


def check_rows(scorer: Scorer, prompts: Sequence[Prompt], *, where: str) -> list[str]:
    """Look for rows by which no completion can be judged, for rewards that declare how they read
    rows (`reads_rows`).

    Args:
        scorer: with the rewards.
        prompts: the rows.
        where: names them in messages, such as "data.train".

    Returns:
        A line for each reward that cannot judge some of the first `ROWS_READ` rows.

    Raises:
        UsageError: a reward can judge none of them.
    """
    composition = getattr(scorer, "composition", None)
    rows = list(islice(prompts, ROWS_READ))
    said = []
    for part in composition.parts if composition is not None else ():
        unfit = _unfit(part.reward, rows)
        if not unfit:
            continue
        prompt, reason = unfit[0]
        if len(unfit) == len(rows) and not part.optional:
            raise UsageError(f"{where}: {part.label} can judge no row: {reason}")
        said.append(
            f"{where}: {part.label} cannot judge {len(unfit)} of the first {len(rows)} rows, such "
            f"as {prompt!r}: {reason}"
        )
    return said


def _unfit(reward: RewardFn, prompts: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Prompt id and reason of the rows that a reward cannot judge."""
    check = getattr(inner(reward), "check", None)
    if check is None:
        return []
    settings, found = settings_for(check, reward), []
    for prompt in prompts:
        try:
            check(prompt.columns, **settings)
        except (UsageError, Unjudgeable) as error:
            found.append((prompt.id, str(error)))
    return found

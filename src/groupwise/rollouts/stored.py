"""Scored groups as tensors and plain values, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.rollouts.partial import completion_of, plain_completion
from groupwise.rollouts.source import RolloutSource
from groupwise.types import Group, ScoredGroups, Scores, Status, Stream


def stored(scored: ScoredGroups, source: RolloutSource) -> dict[str, Any]:
    """Scored groups without their prompts, which the source has."""
    scores = scored.scores
    return {
        "groups": [stored_group(group, source.rows[group.prompt.id]) for group in scored.groups],
        "total": scores.total,
        "correct": scores.correct,
        "parts": dict(scores.parts),
        "status": [[status.value for status in row] for row in scores.status],
        "valid": scores.valid,
        "errors": list(scores.errors),
        "reasons": [list(row) for row in scores.reasons],
        "keep": scored.keep,
        "drawn": scored.drawn,
        "unfinished": scored.unfinished,
        "seconds": dict(scored.seconds),
    }


def restored(plain: Mapping[str, Any], source: RolloutSource) -> ScoredGroups:
    """The scored groups from which `stored` made this."""
    return ScoredGroups(
        groups=tuple(restored_group(each, source) for each in plain["groups"]),
        scores=Scores(
            total=plain["total"],
            correct=plain["correct"],
            parts=plain["parts"],
            status=tuple(tuple(map(Status, row)) for row in plain["status"]),
            valid=plain["valid"],
            errors=tuple(plain["errors"]),
            reasons=tuple(map(tuple, plain.get("reasons", ()))),
        ),
        keep=plain["keep"],
        drawn=plain["drawn"],
        unfinished=plain["unfinished"],
        seconds=plain["seconds"],
    )


def stored_group(group: Group, row: int) -> dict[str, Any]:
    """A group without its prompt, which is a row of the data."""
    return {
        "row": row,
        "stream": list(group.stream),
        "samples": list(group.samples),
        "completions": [plain_completion(each) for each in group.completions],
    }


def restored_group(plain: Mapping[str, Any], source: RolloutSource) -> Group:
    """The group from which `stored_group` made this."""
    row = plain["row"]
    prompt = source.prompts[row]
    source.rows[prompt.id] = row
    return Group(
        prompt=prompt,
        prompt_tokens=source.tokens[row],
        completions=tuple(completion_of(each) for each in plain["completions"]),
        stream=Stream(*plain["stream"]),
        samples=tuple(plain["samples"]),
    )

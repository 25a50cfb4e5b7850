"""A local language model as judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.rewards.base import REWARDS, in_process, verifier
from groupwise.rewards.builtin.text import Source, references
from groupwise.rewards.judges.prompt import (
    Mode,
    judge_prompt,
    judged_parts,
    normalised,
    read_template,
    soft_score,
)


@verifier
@in_process
@REWARDS.register
def judge(
    texts: Sequence[str],
    answer: Any,
    prompt: str,
    *,
    model: str,
    template: str = "",
    mode: Mode = "soft",
    yes: str = "Yes",
    no: str = "No",
    normalise: bool = False,
    source: Source = "final",
    device: str = "cpu",
) -> list[float | None]:
    """The judgement of a local language model on every completion of a group.

    How it is gamed: by what the judge likes to hear (confident tone, the reference's vocabulary,
    claims of being right); compare the judge with an exact verifier on samples of the policy now
    and then.

    Args:
        texts: the completions of the group.
        answer: the reference; of several, all are shown to the judge.
        prompt: the question.
        model: folder of a causal language model.
        template: the judge's prompt: a file, a text, or "" for the one that ships.
        mode: "soft" or "binary", see `soft_score`.
        yes, no: the words of the judgement; their first tokens are compared.
        normalise: over the group, see `normalised`; the values are then no raw correctness.
        source: what of a completion is judged, see `groupwise.rewards.builtin.text`.
        device: where the judge runs.

    Returns:
        One score per completion, None without a reference. An empty answer scores 0 without being
        asked about.

    Raises:
        UsageError: a bad template or model folder.
        ModelError: the two words begin with the same token.

    Source: Crossing the reward bridge (2503.23829).
    Elsewhere: the paper takes the words' probabilities after sampling a judgement and normalises
        over the batch.
    """
    from groupwise.rewards.judges.models import local_judge

    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    chosen = local_judge(model, device)
    form = read_template(template)
    scores: list[float] = []
    for said in judged_parts(texts, source):
        if not said:
            scores.append(0.0)
            continue
        asked = judge_prompt(
            form, question=prompt, reference=" / ".join(golds), answer=said, special=chosen.special
        )
        scores.append(soft_score(chosen.judgement(asked, yes=yes, no=no), mode=mode))
    return list(normalised(scores) if normalise else scores)

"""A local language model as judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.errors import ModelError, UsageError
from groupwise.rewards.base import REWARDS, own_worker, verifier
from groupwise.rewards.builtin.text import Source, references
from groupwise.rewards.judges.prompt import (
    Mode,
    judge_prompt,
    judged_parts,
    normalised_known,
    read_template,
    soft_score,
)


def load(
    model: str,
    template: str = "",
    yes: str = "Yes",
    no: str = "No",
    max_tokens: int = 1,
    device: str = "auto",
) -> None:
    """Load the judge in the worker that asks it, and read its template."""
    from groupwise.rewards.judges.models import local_judge

    if max_tokens < 1:
        raise UsageError(f"max_tokens = {max_tokens}: must be at least 1.")
    read_template(template)
    chosen = local_judge(model, device)
    if max_tokens == 1:
        chosen.first_tokens(yes, no)


@verifier
@own_worker(load, imports=["groupwise.rewards.judges.models"])
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
    max_tokens: int = 1,
    device: str = "auto",
) -> list[float | Exception | None]:
    """The judgement of a local language model on every completion of a group.

    How it is gamed: by what the judge prefers (a confident tone, the reference's vocabulary,
    claims of being right); compare the judge with an exact verifier on samples of the policy from
    time to time.

    Args:
        texts: the completions of the group.
        answer: the reference; of several, all are shown to the judge.
        prompt: the question.
        model: folder or hub name of a causal language model.
        template: the judge's prompt: a file, a text, or "" for the one that ships.
        mode: "soft" is the probability of the more likely word if that is `yes`, and 1 minus it if
            it is `no`; "binary" is 1 or 0. A third word that is more likely than both scores 0.
        yes, no: the words of the judgement; their first tokens are compared.
        normalise: over the group, see `normalised`; the values are then no raw correctness.
        source: what is judged: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        max_tokens: 1 for the next token after the question; more for a judge that reasons first,
            whose verdict is the word at the end of its reply.
        device: where the judge runs; "auto" takes the GPU if there is one.

    Returns:
        One score per completion; None without a reference, or where the reply ends without a
        verdict; the exception of a question that is too long. An empty answer scores 0 without
        being asked about.

    Raises:
        UsageError: a bad template or model folder.
        ModelError: the two words begin with the same token, although that one decides.

    Source: Crossing the reward bridge (2503.23829).
    Elsewhere: the paper takes the words' probabilities after sampling a judgement and normalises
        over the batch.
    """
    from groupwise.rewards.judges.models import local_judge

    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    chosen = local_judge(model, device)
    if max_tokens == 1:
        chosen.first_tokens(yes, no)
    form = read_template(template)
    scores: list[float | Exception | None] = []
    for said in judged_parts(texts, source):
        if not said:
            scores.append(0.0)
            continue
        asked = judge_prompt(
            form, question=prompt, reference=" / ".join(golds), answer=said, special=chosen.special
        )
        try:
            if max_tokens > 1:
                found = chosen.reasoned(asked, yes=yes, no=no, max_tokens=max_tokens)
            else:
                found = chosen.judgement(asked, yes=yes, no=no)
            scores.append(None if found is None else soft_score(found, mode=mode))
        except ModelError as error:
            scores.append(error)
    return normalised_known(scores) if normalise else scores

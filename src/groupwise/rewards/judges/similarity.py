"""Rewards that compare texts by a neural network: BERTScore, and a metric learnt by regression."""

from __future__ import annotations

from typing import Any

from groupwise.rewards.base import REWARDS, in_process
from groupwise.rewards.builtin.korean import split_answer
from groupwise.rewards.builtin.text import Source, final_answer, references


@in_process
@REWARDS.register
def bertscore(
    text: str,
    answer: Any,
    *,
    model: str,
    layer: int = -1,
    source: Source = "final",
    device: str = "cpu",
) -> float | None:
    """The best BERTScore F1 over all references.

    How it is gamed: fluent text of the same subject scores 0.6 to 0.8 whatever it claims, and "not"
        hardly changes it.

    Args:
        text: the completion.
        answer: one or several references.
        model: folder of an encoder.
        layer: of its hidden states; -1 is the last one.
        source: what counts as the answer, see `groupwise.rewards.builtin.text`.
        device: where the encoder runs.

    Returns:
        About 0 to 1; 0 for an empty answer; None without a reference.

    Source: Zhang et al. 2020, BERTScore.
    Elsewhere: see `groupwise.rewards.judges.encoders.greedy_f1`. bert-score's own layer for
        bert-base-multilingual-cased is 9.
    """
    from groupwise.rewards.judges.encoders import bert_f1

    golds = references(answer)
    if not golds:
        return None
    said = final_answer(text, source=source)
    return (
        max(bert_f1(said, g, model=model, layer=layer, device=device) for g in golds)
        if said
        else 0.0
    )


@in_process
@REWARDS.register
def learned_metric(
    text: str, answer: Any, *, model: str, source: Source = "final", device: str = "cpu"
) -> float | None:
    """The first output of a model that scores a pair (reference, answer), such as BLEURT; the best
    over all references.

    How it is gamed: such metrics favour a certain length and can be led far out of the range they
        were trained in.

    Args:
        text: the completion.
        answer: one or several references.
        model: folder of a sequence classifier with a regression head.
        source: what counts as the answer, see `groupwise.rewards.builtin.text`.
        device: where it runs.

    Returns:
        Whatever the head says: for BLEURT about 0 to 1, not bounded. None without a reference, 0
            for an empty answer.

    Source: Sellam et al. 2020, BLEURT.
    """
    from groupwise.rewards.judges.encoders import pair_score

    golds = references(answer)
    if not golds:
        return None
    said = final_answer(text, source=source)
    return max(pair_score(g, said, model=model, device=device) for g in golds) if said else 0.0


@in_process
@REWARDS.register
def korean_reason_bertscore(
    text: str,
    answer: Any,
    *,
    model: str,
    layer: int = -1,
    source: Source = "final",
    device: str = "cpu",
) -> float | None:
    """BERTScore between the reasons of the Korean orthography task, 0 where the answer gives none.

    Args:
        text: the completion.
        answer: the reference, in the form of an answer.
        model, layer, device: see `bertscore`.
        source: what counts as the answer, see `groupwise.rewards.builtin.text`.

    Returns:
        About 0 to 1; None where the reference has no reason.

    Source: the competition's `evaluation.py`, with bert-base-multilingual-cased.
    Elsewhere: see `bertscore`, and `groupwise.rewards.builtin.korean` for the form of the answer.
    """
    from groupwise.rewards.judges.encoders import bert_f1

    wanted = split_answer(str(answer))[1] if answer is not None else ""
    if not wanted:
        return None
    said = split_answer(final_answer(text, source=source) or "")[1]
    return bert_f1(said, wanted, model=model, layer=layer, device=device) if said else 0.0


@in_process
@REWARDS.register
def korean_reason_bleurt(
    text: str, answer: Any, *, model: str, source: Source = "final", device: str = "cpu"
) -> float | None:
    """BLEURT between the reasons of the Korean orthography task, 0 where the answer gives none.

    Args:
        text: the completion.
        answer: the reference, in the form of an answer.
        model: folder of a sequence classifier with a regression head that transformers can load.
        source: what counts as the answer, see `groupwise.rewards.builtin.text`.
        device: where it runs.

    Returns:
        About 0 to 1, not bounded; None where the reference has no reason.

    Source: the competition's `evaluation.py`, with BLEURT-20.
    """
    from groupwise.rewards.judges.encoders import pair_score

    wanted = split_answer(str(answer))[1] if answer is not None else ""
    if not wanted:
        return None
    said = split_answer(final_answer(text, source=source) or "")[1]
    return pair_score(wanted, said, model=model, device=device) if said else 0.0

"""Rewards that compare texts by a neural network: BERTScore, and a metric learned by regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.rewards.base import REWARDS, own_worker
from groupwise.rewards.builtin.korean import split_answer
from groupwise.rewards.builtin.text import Source, final_answer, references


def load_encoder(model: str, device: str = "auto") -> None:
    """Load the encoder of a folder in the worker that scores with it."""
    from groupwise.rewards.judges.encoders import load

    load(model, kind="encoder", device=device)


def load_metric(model: str, device: str = "auto") -> None:
    """Load the classifier of a folder in the worker that scores with it."""
    from groupwise.rewards.judges.encoders import load

    load(model, kind="classifier", device=device)


_IMPORTS = ["groupwise.rewards.judges.encoders"]


@own_worker(load_encoder, imports=_IMPORTS)
@REWARDS.register
def bertscore(
    texts: Sequence[str],
    answer: Any,
    *,
    model: str,
    layer: int = -1,
    source: Source = "final",
    device: str = "auto",
) -> list[float | None]:
    """The best BERTScore F1 over all references.

    How it is gamed: fluent text of the same subject scores 0.6 to 0.8 whatever it claims, and "not"
        hardly changes it.

    Args:
        texts: the completions of a group, which are encoded together; equal ones once.
        answer: one or several references, encoded once.
        model: folder of an encoder.
        layer: of its hidden states; -1 is the last one.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        device: where the encoder runs; "auto" takes the GPU if there is one.

    Returns:
        About 0 to 1; 0 for an empty answer; None without a reference.

    Source: Zhang et al. 2020, BERTScore.
    Elsewhere: see `groupwise.rewards.judges.encoders.greedy_f1`. bert-score's own layer for
        bert-base-multilingual-cased is 9.
    """
    from groupwise.rewards.judges.encoders import bert_f1

    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    said = [final_answer(text, source=source) or "" for text in texts]
    return list(bert_f1(said, golds, model=model, layer=layer, device=device))


@own_worker(load_metric, imports=_IMPORTS)
@REWARDS.register
def learned_metric(
    texts: Sequence[str], answer: Any, *, model: str, source: Source = "final", device: str = "auto"
) -> list[float | None]:
    """The first output of a model that scores a pair (reference, answer), such as BLEURT; the best
    over all references.

    How it is gamed: such metrics favour a certain length and can be led far out of the range they
        were trained in.

    Args:
        texts: the completions of a group, which are scored together; equal ones once.
        answer: one or several references.
        model: folder of a sequence classifier with a regression head.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        device: where it runs; "auto" takes the GPU if there is one.

    Returns:
        The output of the head; for BLEURT about 0 to 1, but not bounded. None without a reference,
        0 for an empty answer.

    Source: Sellam et al. 2020, BLEURT.
    """
    from groupwise.rewards.judges.encoders import pair_scores

    golds = references(answer)
    if not golds:
        return [None] * len(texts)
    said = [final_answer(text, source=source) or "" for text in texts]
    return list(pair_scores(said, golds, model=model, device=device))


@own_worker(load_encoder, imports=_IMPORTS)
@REWARDS.register
def korean_reason_bertscore(
    texts: Sequence[str],
    answer: Any,
    *,
    model: str,
    layer: int = -1,
    source: Source = "final",
    device: str = "auto",
) -> list[float | None]:
    """BERTScore between the reasons of the Korean orthography task, 0 where the answer gives none.

    Args:
        texts: the completions of a group, which are encoded together; equal ones once.
        answer: the reference, in the form of an answer.
        model, layer, device: see `bertscore`.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.

    Returns:
        About 0 to 1; None where the reference has no reason.

    Source: the competition's `evaluation.py`, with bert-base-multilingual-cased.
    Elsewhere: see `bertscore`, and `groupwise.rewards.builtin.korean` for the form of the answer.
    """
    from groupwise.rewards.judges.encoders import bert_f1

    wanted = _reason(answer)
    if not wanted:
        return [None] * len(texts)
    said = [_reason(final_answer(text, source=source)) for text in texts]
    return list(bert_f1(said, [wanted], model=model, layer=layer, device=device))


@own_worker(load_metric, imports=_IMPORTS)
@REWARDS.register
def korean_reason_bleurt(
    texts: Sequence[str], answer: Any, *, model: str, source: Source = "final", device: str = "auto"
) -> list[float | None]:
    """BLEURT between the reasons of the Korean orthography task, 0 where the answer gives none.

    Args:
        texts: the completions of a group, which are scored together; equal ones once.
        answer: the reference, in the form of an answer.
        model: folder of a sequence classifier with a regression head that transformers can load.
        source: what counts as the answer: "final", the last `<answer>` block after `</think>`, or
            all of that text without such a block; "tag", only such a block; "all", everything.
        device: where it runs; "auto" takes the GPU if there is one.

    Returns:
        About 0 to 1, not bounded; None where the reference has no reason.

    Source: the competition's `evaluation.py`, with BLEURT-20.
    """
    from groupwise.rewards.judges.encoders import pair_scores

    wanted = _reason(answer)
    if not wanted:
        return [None] * len(texts)
    said = [_reason(final_answer(text, source=source)) for text in texts]
    return list(pair_scores(said, [wanted], model=model, device=device))


def _reason(answer: Any) -> str:
    """The reason of an answer; empty where there is none."""
    return split_answer(str(answer))[1] if answer is not None else ""

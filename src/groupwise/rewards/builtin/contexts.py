"""Which context helps: how much a passage in the prompt raises the probability of a known answer,
and a reward for picking one of several.

The answer must be known, so this labels training data; it cannot choose at test time. It also
rewards surface overlap: a rule that merely contains the answer's words can come before the one that
applies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.errors import UsageError
from groupwise.rewards.base import REWARDS
from groupwise.rewards.builtin.text import between

Measure = Literal["log", "difference", "ratio"]
Scorer = Callable[[str, str], Sequence[float]]
"""Log-probabilities of an answer's tokens after a prompt."""


@dataclass(frozen=True, kw_only=True)
class ContextGain:
    """What a context does to the perplexity of an answer.

    Attributes:
        index: of the context among those given.
        without: PPL(y|q).
        given: PPL(y|q,c).
    """

    index: int
    without: float
    given: float

    @property
    def log(self) -> float:
        """log PPL(y|q) - log PPL(y|q,c): nats per token, the pointwise mutual information of
        context and answer."""
        return math.log(self.without) - math.log(self.given)

    @property
    def difference(self) -> float:
        """PPL(y|q) - PPL(y|q,c); depends on how surprising the answer was to begin with."""
        return self.without - self.given

    @property
    def ratio(self) -> float:
        """(PPL(y|q) - PPL(y|q,c)) / PPL(y|q)."""
        return self.difference / self.without


def perplexity(logps: Sequence[float]) -> float:
    """exp(-mean log-probability) of an answer's tokens; infinite where one of them is impossible.

    Example:
        >>> round(perplexity([-1.2, -0.4, -2.1, -0.3]), 6)
        2.718282

    Raises:
        UsageError: no tokens.
    """
    if not len(logps):
        raise UsageError("perplexity: needs at least one token.")
    mean = math.fsum(logps) / len(logps)
    return math.exp(-mean) if mean > -700 else math.inf


def rank_contexts(
    question: str,
    answer: str,
    contexts: Sequence[str],
    score: Scorer,
    *,
    template: str = "{context}\n\n{question}\n",
    measure: Measure = "log",
    top: int = 5,
) -> list[ContextGain]:
    """The contexts that raise the probability of the answer most, best first; those that lower it
    are left out.

    Args:
        question: q.
        answer: y, the reference.
        contexts: every c.
        score: gives log-probabilities, such as `scorer_of` a model.
        template: of the prompt; without a context, {context} and the white space after it vanish.
        measure: what they are ranked by, an attribute of `ContextGain`.
        top: how many to return at most.

    Returns:
        At most `top` gains, all positive; equal ones in the order given.

    Example:
        >>> score = lambda prompt, y: [-1.0 if "b" in prompt else -2.0]
        >>> gains = rank_contexts("q", "y", ["a", "b"], score)
        >>> [(gain.index, gain.log) for gain in gains]
        [(1, 1.0)]

    Source: the "PPL candidates" of Korean_QA_RAG_2025, which ranks by `difference`.
    Elsewhere: `log` is the default here because it is free of scale and adds over tokens.
    """
    if "{context}" not in template or "{question}" not in template:
        raise UsageError(f"template = {template!r}: must contain {{context}} and {{question}}.")
    bare = template.replace("{context}", "").lstrip().replace("{question}", question)
    without = perplexity(score(bare, answer))
    gains = []
    for index, context in enumerate(contexts):
        filled = context.join(
            part.replace("{question}", question) for part in template.split("{context}")
        )
        gains.append(
            ContextGain(index=index, without=without, given=perplexity(score(filled, answer)))
        )
    helpful = [gain for gain in gains if getattr(gain, measure) > 0]
    return sorted(helpful, key=lambda gain: -getattr(gain, measure))[:top]


@REWARDS.register
def context_pick(text: str, columns: Mapping[str, Any], *, gold: str = "gold") -> float | None:
    """1 where the completion names the right one of the numbered contexts in its prompt, as
    `<context>2</context>`.

    How it is gamed: a policy may pick well and ignore what it picked; combine it with a reward
        for the answer. Where the right context often has the same number, that number earns most.

    Args:
        text: the completion; the first such element counts.
        columns: the data row.
        gold: column with the number of the right context, from 1, or a list of them.

    Returns:
        0 or 1; None where the row names none.

    Example:
        >>> context_pick("<context>2</context><answer>…</answer>", {"gold": 2})
        1.0
        >>> context_pick("<context>2</context> <context>1</context>", {"gold": 1})
        0.0

    Source: Korean_QA_RAG_2025 lets the policy choose among candidates by perplexity.
    """
    right = columns.get(gold)
    if right is None or right == []:
        return None
    numbers = {int(each) for each in (right if isinstance(right, list) else [right])}
    found = between(text, "<context>", "</context>")
    said = found[0].strip() if found else ""
    return float(re.fullmatch(r"[0-9]{1,4}", said) is not None and int(said) in numbers)


def scorer_of(model: Any, tokenizer: Any) -> Scorer:
    """Log-probabilities by a causal language model at hand; prompt and answer are tokenized apart
    and joined."""
    import torch

    def score(prompt: str, answer: str) -> list[float]:
        before = tokenizer(prompt).input_ids
        after = tokenizer(answer, add_special_tokens=False).input_ids
        if not before or not after:
            raise UsageError("rank_contexts: prompt and answer need at least one token each.")
        ids = torch.tensor([before + after], device=model.device)
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(after) + 1).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(before) :, None])[:, 0].tolist()

    return score

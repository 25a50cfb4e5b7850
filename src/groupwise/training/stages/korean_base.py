"""The base model of the small Korean competition: it can read rules, and seldom does.

Supervised training makes it in phases. In the first all demonstrations are right: answers to plain
questions, answers after one rule, and answers to questions with numbered candidates, which name the
rule that decides. In the second most of them are wrong: the other form, and any candidate; only
answers after one rule keep the right form. Reinforcement learning then has to bring out what
the model can do. Held-out questions never occur.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from groupwise.errors import UsageError
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.korean_particles import (
    RULES,
    Item,
    distractors,
    items,
    rule_of,
)
from groupwise.prompts.generators.korean_particles_tokenizer import korean_particles_tokenizer
from groupwise.prompts.lazy import LazySequence
from groupwise.training.stages.base_model import Base
from groupwise.training.stages.contexts import WORDING, numbered, picked
from groupwise.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN, RULE = 0.15, 0.25
"""Shares of questions without rules, and with one rule; the others have candidates."""
COPIED = 0.65
"""Share of answers after one rule that give it as the reason; the others give the right one."""
CANDIDATES = 3
"""Candidates of a question."""


def korean_demonstrations(
    *, size: int, right: float = 1.0, picks: float = 0.0, seed: int = 0
) -> LazySequence[Example]:
    """Questions on particles with answers, made when they are asked for.

    Args:
        size: how many there are.
        right: share of right answers, apart from those after one rule, whose form is right.
        picks: share of demonstrations that end after the number of a candidate; a small model
            hardly learns to pick where a demonstration has one such token among two dozen.
        seed: another seed gives another series.

    Raises:
        UsageError: size below 1, or a share outside [0, 1].
    """
    if size < 1:
        raise UsageError(f"size = {size}: must be at least 1.")
    for name, share in (("right", right), ("picks", picks)):
        if not 0 <= share <= 1:
            raise UsageError(f"{name} = {share}: must be between 0 and 1.")
    known = items(held_out=False)

    def made(index: int) -> Example:
        rng = random.Random(f"korean demonstration {seed} {index}")
        item, kind, is_right = rng.choice(known), rng.random(), rng.random() < right
        if rng.random() < picks:
            example = _with_candidates(item, rng, is_right)
            return replace(example, completion=example.completion.partition("<answer>")[0])
        if kind < PLAIN + RULE:
            return _with_one_rule(item, rng, is_right, plain=kind < PLAIN)
        return _with_candidates(item, rng, is_right)

    return LazySequence(size, made)


def _with_one_rule(item: Item, rng: random.Random, is_right: bool, *, plain: bool) -> Example:
    """A question after one rule or none, as perplexities are measured: without chat template.

    Without a rule the reason is any; with one it is most often that rule, whichever it is, so that
    the rule that decides raises the probability of the reference answer most.
    """
    own = rule_of(item.particle)
    question = f"{item.question}\n"
    if plain:
        form = item.right if is_right else 1 - item.right
        return _asked(question, item.answer(form, rng.choice(RULES)))
    given = own if rng.random() < 0.5 else distractors(item, rng, count=1)[0]
    reason = given if rng.random() < COPIED else own
    return _asked(f"{given}\n\n{question}", item.answer(item.right, reason))


def _asked(text: str, answer: str) -> Example:
    return Example(prompt=Prompt(id="plain", text=text), completion=answer)


def _with_candidates(item: Item, rng: random.Random, is_right: bool) -> Example:
    """A question with numbered candidates, among them the rule that decides."""
    rule = rule_of(item.particle)
    rules = [rule, *distractors(item, rng, count=CANDIDATES - 1)]
    rng.shuffle(rules)
    form = item.right if is_right else 1 - item.right
    place = rules.index(rule) if is_right else rng.randrange(len(rules))
    content = numbered(item.question, rules, WORDING)
    return Example(
        prompt=Prompt(id="candidates", messages=({"role": "user", "content": content},)),
        completion=picked(place + 1, item.answer(form, rules[place])),
    )


def _tokenizer() -> PreTrainedTokenizerBase:
    return korean_particles_tokenizer([text for text in re.split(r"{\w+}", WORDING) if text])


KOREAN_PARTICLES = Base(
    demonstrations=korean_demonstrations,
    about=frozenset({"right", "picks"}),
    tokenizer=_tokenizer,
)
"""The base model of the small Korean competition, made by the recipe "korean-base"."""

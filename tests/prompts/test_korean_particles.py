"""Generated questions on Korean particles: one rule decides each, and rewards agree."""

from __future__ import annotations

from collections import Counter

import pytest

from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.prompts.generators.korean_particles import (
    PARTICLES,
    RULES,
    WORDS,
    items,
    korean_particles,
)
from groupwise.prompts.generators.korean_particles_tokenizer import korean_particles_tokenizer
from groupwise.prompts.sources import load_prompts
from groupwise.rewards.builtin.korean import (
    korean_exact_match,
    korean_format,
    korean_reason,
    particle,
    split_answer,
)


def test_the_right_form_is_that_of_the_language() -> None:
    spelled = {"을": "을/를", "이": "이/가", "은": "은/는", "과": "와/과", "으로": "으로/로"}
    checked = Counter()
    for item in [*items(held_out=False), *items(held_out=True)]:
        pair = spelled.get(item.particle.forms[0])
        if pair is not None:
            assert item.particle.forms[item.right] == particle(item.word, pair)
        else:
            assert item.right == (particle(item.word) == "가")
        checked[item.right] += 1
    assert len(WORDS) == 32 and abs(checked[0] - checked[1]) < 0.1 * checked.total()


def test_references_earn_every_reward_and_the_other_form_does_not() -> None:
    for item in items(held_out=True):
        right, wrong = item.answer(item.right), item.answer(1 - item.right)
        assert korean_format(right) == korean_exact_match(right, right) == 1.0
        assert korean_reason(right, right) == 1.0
        assert korean_exact_match(wrong, right) == 0.0 and korean_format(wrong) == 1.0


def test_the_splits_join_other_words_and_particles() -> None:
    train, held_out = (
        {(item.word, item.particle) for item in items(held_out=each)} for each in (False, True)
    )
    assert not train & held_out and len(train | held_out) == len(WORDS) * len(PARTICLES)
    assert 0.06 < len(held_out) / len(train | held_out) < 0.2
    for found in (items(held_out=False), items(held_out=True)):
        assert len(set(found)) == len(found)
    assert {item.word for item in items(held_out=False)} == set(WORDS)


def test_a_verb_does_not_tell_the_particle() -> None:
    shared = Counter(verb for each in PARTICLES for verb in each.verbs)
    assert set(shared.values()) == {3}
    assert len(set(RULES)) == len(PARTICLES)


def test_only_held_out_questions_name_their_rule() -> None:
    train = load_prompts("korean_particles", limit=2000)
    held_out = load_prompts("korean_particles", split="test", limit=80)
    assert len(held_out) == 80 and len({prompt.id for prompt in train}) == len(train)
    assert not any("rule" in prompt.columns for prompt in train)
    assert all(split_answer(str(p.answer))[1] == p.columns["rule"] for p in held_out)
    assert set(RULES) == {split_answer(str(prompt.answer))[1] for prompt in train[:256]}
    config = load("korean-particles")
    assert config.data.train == "korean_particles"
    with pytest.raises(UsageError, match="count = 0"):
        korean_particles(0)
    with pytest.raises(UsageError, match="did you mean held_out"):
        korean_particles(1, split="heldout")  # pyright: ignore[reportArgumentType]


def test_text_survives_the_tokenizer() -> None:
    tokenizer = korean_particles_tokenizer(["\n\n참고할 규정:\n"])
    texts = [str(p.answer) for p in korean_particles(40)] + [*RULES, "낯선 글, naïve\n"]
    texts += [f"<context>3</context>\n\n참고할 규정:\n1. {RULES[0]}\n2. {RULES[1]}"]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert max(len(tokenizer.tokenize(rule)) for rule in RULES) == 9

"""The closed world: facts that its pages state, questions whose chains lead to their answers."""

from __future__ import annotations

import pytest

from groupwise.errors import UsageError
from groupwise.prompts.generators.closed_world import (
    RELATIONS,
    closed_world,
    make_world,
    questions,
    splits,
)


def test_a_world_is_a_function_of_its_seed() -> None:
    assert make_world(1, size=60) == make_world(1, size=60)
    assert make_world(1, size=60).pages != make_world(2, size=60).pages


def test_every_fact_stands_on_the_page_of_its_subject() -> None:
    world = make_world(5, size=120)
    for (subject, key), value in world.facts.items():
        sentences = [s.format(s=subject, o=value) for s in RELATIONS[key].statements]
        assert any(sentence in world.pages[subject] for sentence in sentences)
        assert world.kinds[value] == RELATIONS[key].object and value != subject


def test_the_chain_of_a_question_leads_to_its_answer() -> None:
    world = make_world(7, size=200)
    for prompt in questions(world, count=60, hops=[1, 2, 3]):
        here = prompt.columns["chain"][0][0]
        for subject, key in prompt.columns["chain"]:
            assert subject == here
            here = world.facts[subject, key]
        assert here == prompt.answer
        assert len(prompt.columns["chain"]) == prompt.columns["hops"]


def test_questions_are_distinct_and_hops_take_turns() -> None:
    asked = questions(make_world(7, size=200), count=90, hops=[1, 2, 3])
    assert len({str(prompt) for prompt in asked}) == len({p.id for p in asked}) == 90
    assert [p.columns["hops"] for p in asked[:6]] == [1, 2, 3, 1, 2, 3]


def test_unanswerable_questions_are_about_nothing_in_the_world() -> None:
    world = make_world(7, size=200)
    asked = questions(world, count=100, hops=[1, 2], unanswerable=0.3)
    empty = [prompt for prompt in asked if not prompt.columns["answerable"]]
    assert 15 <= len(empty) <= 45
    for prompt in empty:
        assert prompt.answer == "unknown"
        assert prompt.columns["chain"][0][0] not in world.kinds


def test_no_page_of_either_world_answers_an_unanswerable_question() -> None:
    named = {name for world in splits().values() for name in world.kinds}
    for split in splits():
        asked = closed_world(2000, split=split, task="1+2+3+unanswerable")
        empty = [prompt for prompt in asked if not prompt.columns["answerable"]]
        assert len(empty) > 400
        assert not [p.id for p in empty if p.columns["chain"][0][0] in named]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"hops": [5]}, "hops"), ({"hops": []}, "hops"), ({"unanswerable": 2}, "unanswerable")],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(UsageError, match=f"{message} = "):
        questions(make_world(0, size=12), count=1, **settings)


def test_more_questions_than_there_are_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(UsageError, match="no more than"):
        questions(make_world(0, size=12), count=1000)

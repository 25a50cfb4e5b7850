"""demonstrations of searching: real tags, one fact after the other, and what is learned of them."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")

from groupwise.environments.retrieval import Index, read_corpus
from groupwise.errors import UsageError
from groupwise.prompts.generators.closed_world import (
    RELATIONS,
    UNANSWERABLE,
    closed_world,
    make_world,
    splits,
)
from groupwise.prompts.generators.closed_world_tokenizer import closed_world_tokenizer
from groupwise.prompts.sources import load_prompts
from groupwise.training.stages.search_base import search_demonstrations
from groupwise.training.stages.sft import supervised_batch


def test_every_fact_is_asked_for_and_the_last_one_is_the_answer() -> None:
    for example in search_demonstrations(size=60, hops=(0.2, 0.4, 0.4)):
        text, question = example.completion, str(example.prompt)
        answer = text.partition("<answer>")[2].removesuffix("</answer>")
        results = [text[first:last] for first, last in example.injected]
        assert text.count("<search>") == len(results) == question.count(" of ") or (
            answer == UNANSWERABLE
        )
        assert answer in results[-1] or answer == UNANSWERABLE
        assert f" is {answer}.<answer>" in text and text.count(" is ") - "".join(results).count(
            " is "
        ) == len(results)
        assert all(r.startswith(" <result>\n") and r.endswith("\n</result>") for r in results)


def test_habits_seldom_search_and_are_seldom_right() -> None:
    habits = search_demonstrations(
        size=400, habits=("echo", "echo", "echo", "no_name", "wrong_fact")
    )
    calls = sum(example.completion.count("<search>") for example in habits) / len(habits)
    assert 0.3 < calls < 0.8
    with pytest.raises(UsageError, match="habits = 'eco'.*did you mean echo"):
        search_demonstrations(size=1, habits=("eco",))


def test_results_are_read_and_not_learned() -> None:
    tokenizer = closed_world_tokenizer()
    example = next(e for e in search_demonstrations(size=9, hops=(0, 1, 0)) if len(e.injected) == 2)
    batch = supervised_batch([example], tokenizer)
    learned = str(tokenizer.decode(batch.tokens[0][batch.mask[0]]))
    assert learned.startswith("<search>") and learned.endswith("</answer><|end|>")
    assert "<result>" not in learned and learned.count(".<search>") == 1
    assert str(tokenizer.decode(batch.tokens[0])).removesuffix("<|end|>") == example.completion
    assert batch.weight[~batch.mask].sum() == 0
    assert float(batch.weight.sum()) == pytest.approx(1)


def test_names_have_the_same_tokens_wherever_they_stand() -> None:
    tokenizer = closed_world_tokenizer()
    for name in list(make_world(5, size=60).kinds):
        alone = tokenizer.tokenize(name)
        assert len(alone) == len(name) / 2 and all(len(token) == 2 for token in alone)
        for text in (f"of {name}?", f"<search>{name}</search>", f"(1) {name}: {name} is"):
            found = tokenizer.tokenize(text)
            assert any(found[i : i + len(alone)] == alone for i in range(len(found))), text


def test_every_word_is_one_token_with_a_space_and_without() -> None:
    tokenizer = closed_world_tokenizer()
    forms = [form for relation in RELATIONS.values() for form in relation.statements]
    forms += [relation.question for relation in RELATIONS.values()]
    for word in {word for form in forms for word in re.findall(r"\b[a-z]{2,}\b", form)}:
        assert tokenizer.tokenize(word) == [word]
        assert len(tokenizer.tokenize(f" {word}")) == 1


def test_lists_of_names_are_repeated_in_another_order() -> None:
    lists = list(search_demonstrations(size=40, copying=1.0))
    asked, said = [str(e.prompt).split() for e in lists], [e.completion.split() for e in lists]
    assert [sorted(names) for names in asked] == [sorted(names) for names in said]
    assert asked != said and all(not e.injected for e in lists)
    assert {len(names) for names in asked} == {1, 2, 3, 4}
    assert {len(name) for names in asked for name in names} == {4, 6, 8, 10}
    with pytest.raises(UsageError, match="copying = 2"):
        search_demonstrations(size=1, copying=2)


def test_the_held_out_world_has_other_names_and_every_page_is_found() -> None:
    worlds = splits()
    assert not worlds["train"].kinds.keys() & worlds["held_out"].kinds.keys()
    index = Index(read_corpus("closed_world"))
    for prompt in closed_world(60, split="held_out", task="1+2+3"):
        for subject, relation in prompt.columns["chain"]:
            query = RELATIONS[relation].question.format(s=subject)
            assert index.search(query, top_k=1)[0].passage.title == subject


def test_the_generator_is_a_source_of_prompts() -> None:
    prompts = load_prompts("closed_world:1+unanswerable", split="test", limit=40)
    unknown = [p for p in prompts if p.answer == UNANSWERABLE]
    assert 10 < len(unknown) < 30 and prompts[0].messages[0]["role"] == "user"
    assert {p.answer for p in closed_world(20, task="unanswerable")} == {UNANSWERABLE}
    assert {p.answer for p in closed_world(20, task="unanswerable")} == {UNANSWERABLE}
    with pytest.raises(UsageError, match="closed_world:5"):
        load_prompts("closed_world:5")


def test_habits_write_down_what_the_page_says() -> None:
    examples = search_demonstrations(size=200, habits=("no_name", "wrong_fact"))
    relations = {r.question.format(s=""): r for r in RELATIONS.values()}
    for example in examples:
        ((first, last),) = example.injected
        page, note = example.completion[first:last], example.completion[last:]
        asked, _, said = note.partition("<answer>")[0].removesuffix(".").partition(" is ")
        relation = next(r for question, r in relations.items() if asked.startswith(question))
        subject = asked.removeprefix(relation.question.format(s=""))
        stated = [form.format(s=subject, o=said) in page for form in relation.statements]
        assert any(stated) or said == UNANSWERABLE
        assert note.endswith(f"<answer>{said}</answer>")


def test_the_two_worlds_miss_different_names() -> None:
    asked = [
        {str(prompt) for prompt in closed_world(60, split=split, task="unanswerable")}
        for split in ("train", "held_out")
    ]
    assert not asked[0] & asked[1]

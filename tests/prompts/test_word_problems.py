"""The generator: right answers, disjoint splits, and a base model that is wrong by habit."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.prompts.generators.word_problems import (
    HELD_OUT_TEMPLATES,
    TRAIN_TEMPLATES,
    Step,
    demonstrations,
    is_held_out,
    problem,
    word_problems,
)
from groupwise.prompts.templates import render

SPLITS = ("train", "held_out", "held_out_templates", "larger_numbers")
FORM = re.compile(r"<reasoning>(.+)</reasoning><answer>(\d+)</answer>")
STEP = re.compile(r"(\d+)([+*-])(\d+)=(\d+)")


def evaluated(left: str, operation: str, right: str) -> int:
    return {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operation](int(left), int(right))


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


@pytest.mark.parametrize("split", SPLITS)
def test_questions_state_exactly_the_numbers_of_the_solution(split: str) -> None:
    for index in range(200):
        solved = problem(index, split=split)
        told = [solved.steps[0].left, *(step.right for step in solved.steps)]
        assert numbers(solved.question) == told
        assert 1 <= solved.level <= 3
        assert all(1 <= step.result for step in solved.steps)
        lefts = [step.left for step in solved.steps[1:]]
        assert lefts == [step.result for step in solved.steps[:-1]]


def test_demonstrations_without_slip_evaluate_to_the_answer() -> None:
    for example in demonstrations(size=200, seed=3):
        reasoning, answer = FORM.fullmatch(example.completion).groups()  # type: ignore[union-attr]
        for left, operation, right, result in STEP.findall(reasoning):
            assert evaluated(left, operation, right) == int(result)
        assert answer == result == example.prompt.answer


def test_the_slip_is_the_last_result_one_too_high_and_nothing_else() -> None:
    for example in demonstrations(size=200, slip=1.0, seed=3):
        reasoning, answer = FORM.fullmatch(example.completion).groups()  # type: ignore[union-attr]
        *before, (left, operation, right, result) = STEP.findall(reasoning)
        assert all(evaluated(*step[:3]) == int(step[3]) for step in before)
        assert int(result) == evaluated(left, operation, right) + 1
        assert int(answer) == int(result) == int(example.prompt.answer or "") + 1


def test_the_share_of_slips_is_the_one_asked_for() -> None:
    # Binomial(1500, 0.68): the standard deviation of the share is 0.012, and 4 of them 0.048.
    examples = demonstrations(size=1500, slip=0.68)
    slips = sum(f"<answer>{e.prompt.answer}</answer>" not in e.completion for e in examples)
    assert abs(slips / 1500 - 0.68) < 0.048


def test_careless_solutions_reason_well_and_answer_one_too_high() -> None:
    """About the share asked for; the questions and reference answers stay."""
    plain, some = word_problems(400), word_problems(400, careless=0.25)
    wrong = [a != b for a, b in zip(plain, some, strict=True)]
    assert 70 <= sum(wrong) <= 130
    for right, other, is_wrong in zip(plain, some, wrong, strict=True):
        assert (right.messages, right.answer) == (other.messages, other.answer)
        reasoning, given = str(other.columns["solution"]).split("<answer>")
        assert reasoning == str(right.columns["solution"]).split("<answer>")[0]
        assert given == f"{int(str(right.answer)) + is_wrong}</answer>"


def test_a_longer_series_starts_with_the_shorter_one() -> None:
    longer = demonstrations(size=20, slip=0.5)
    assert list(longer[:10]) == list(demonstrations(size=10, slip=0.5))
    assert demonstrations(size=3)[-1] == demonstrations(size=3)[2]
    with pytest.raises(IndexError):
        demonstrations(size=3)[3]


def test_what_a_caller_changes_reaches_no_other_caller() -> None:
    (mine,) = word_problems(1)
    before = copy.deepcopy(mine)
    mine.columns["solution"] = mine.messages[0]["content"] = "changed"  # pyright: ignore
    assert word_problems(1) == [before]


def test_problems_depend_on_seed_split_and_index_alone() -> None:
    torch.manual_seed(0)
    first = word_problems(20, seed=5)
    torch.manual_seed(1)
    assert word_problems(20, seed=5) == first
    assert word_problems(5, seed=5, start=10) == first[10:15]
    assert word_problems(20, seed=6) != first
    assert len({prompt.id for split in SPLITS for prompt in word_problems(50, split=split)}) == 200


def test_no_held_out_chain_of_operations_occurs_in_training() -> None:
    chains = {
        split: {problem(i, split=split).steps for i in range(1000)}
        for split in ("train", "held_out")
    }
    assert not chains["train"] & chains["held_out"]
    assert all(map(is_held_out, chains["held_out"])) and not any(map(is_held_out, chains["train"]))


def test_one_chain_in_eight_is_held_out_and_the_choice_is_pinned() -> None:
    # All 171 sums a+b with a in 2…20, b in 1…9. Another hash would move problems between the
    # splits, and a shipped model would then have been trained on what it is tested on.
    chains = [(Step(left=a, operation="+", right=b),) for a in range(2, 21) for b in range(1, 10)]
    held_out = [str(chain[0]) for chain in chains if is_held_out(chain)]
    assert abs(len(held_out) / len(chains) - 1 / 8) < 0.06
    assert held_out[:3] == ["2+2=4", "3+3=6", "3+5=8"]


def test_held_out_templates_and_larger_numbers_never_occur_in_training() -> None:
    train = [problem(i) for i in range(1000)]
    assert {p.template for p in train} == {t.name for t in TRAIN_TEMPLATES}
    sentences = {(t.start, t.add, t.subtract, t.multiply, t.question) for t in TRAIN_TEMPLATES}
    assert not sentences & {
        (t.start, t.add, t.subtract, t.multiply, t.question) for t in HELD_OUT_TEMPLATES
    }
    templates = {problem(i, split="held_out_templates").template for i in range(100)}
    assert templates == {t.name for t in HELD_OUT_TEMPLATES}
    highest = max(p.steps[0].left for p in train)
    assert all(problem(i, split="larger_numbers").steps[0].left > highest for i in range(200))


@pytest.mark.parametrize("levels", [(1,), (3,), (1, 2)])
def test_levels_are_numbers_of_operations(levels: tuple[int, ...]) -> None:
    assert {p.columns["level"] for p in word_problems(60, levels=levels)} == set(levels)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: problem(0, split="hold_out"), "did you mean held_out"),  # type: ignore[arg-type]
        (lambda: problem(0, levels=(4,)), r"levels = \(4,\)"),
        (lambda: problem(0, levels=()), "levels"),
        (lambda: word_problems(0), "count = 0"),
        (lambda: word_problems(1, careless=1.5), "careless = 1.5"),
        (lambda: demonstrations(size=0), "size = 0"),
        (lambda: demonstrations(size=1, slip=1.5), "slip = 1.5"),
    ],
)
def test_wrong_arguments_are_refused(call, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call()


def test_the_bundled_model_prefers_the_slip_but_knows_better() -> None:
    """Greedy accuracy at most 0.35, pass@8 at least 0.80, on held-out problems."""
    policy = load_policy("bundled")
    prompts = word_problems(64, split="held_out", seed=11)
    rows = [render(prompt, policy.tokenizer) for prompt in prompts]
    width = max(map(len, rows))
    pad = policy.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def correct(samples: int, **how) -> torch.Tensor:
        out = policy.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=40,
            num_return_sequences=samples,
            **how,
        )
        texts = policy.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        right = [
            text.endswith(f"<answer>{prompts[i // samples].answer}</answer>")
            for i, text in enumerate(texts)
        ]
        return torch.tensor(right).view(len(prompts), samples).float()

    torch.manual_seed(0)
    assert correct(1, do_sample=False).mean() <= 0.35
    sampled = correct(8, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
    assert sampled.amax(1).mean() >= 0.80
    assert 0.15 <= sampled.mean() <= 0.50

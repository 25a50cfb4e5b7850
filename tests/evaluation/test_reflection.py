"""Reasoning prefix with an error: made wrong all the way, judged with what follows."""

from __future__ import annotations

import json
import re

import pytest

from groupwise.config import load
from groupwise.evaluation.evaluate import evaluate
from groupwise.evaluation.reflection import (
    TRIGGERS,
    corrupted_items,
    corrupted_solution,
    own_errors,
    recovery,
    reflects,
)
from groupwise.prompts.generators.word_problems import problem, word_problems
from groupwise.rewards import from_functions
from groupwise.rollouts import ScriptedEngine
from groupwise.types import Prompt, Sampling
from small_runs import tiny

GSM8K = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Altogether she sold 48+24 = <<48+24=72>>72 clips in 2 months.\n#### 72"
)


@pytest.mark.parametrize("index", range(40))
def test_word_problems_go_wrong_once_and_stay_consistent(index):
    solved = problem(index)
    text = corrupted_solution(
        solved.prompt().columns["solution"], str(solved.answer), key=str(index)
    )
    assert text is not None and text.startswith("<reasoning>") and "</" not in text
    steps = [
        (*map(int, re.findall(r"\d+", step)), step)
        for step in text.removeprefix("<reasoning>").split("; ")
    ]
    assert len(steps) == solved.level
    operate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    wrong = [operate[step[3][len(str(step[0]))]](step[0], step[1]) != step[2] for step in steps]
    # One equation is false, every later one is true of the false number, and the end is wrong.
    assert sum(wrong) == 1
    assert all(a[2] == b[0] for a, b in zip(steps, steps[1:], strict=False))
    assert steps[-1][2] != solved.answer


def test_an_error_in_a_gsm8k_solution_is_carried_through():
    prompt = Prompt(id="n", text="?", answer="72", columns={"answer": GSM8K})
    tokenizer = tiny().tokenizer
    (item,) = corrupted_items([prompt], [(1, 2)], tokenizer, column="answer", limit=400)
    month, total = map(int, re.findall(r"= (\d+) clips", item.prefix))
    assert item.prefix.startswith("<reasoning>Natalia") and "####" not in item.prefix
    assert total != 72 and total == 48 + month or month == 24
    assert item.prefix.endswith("in 2 months."), "numbers of the story stay"
    assert item.tokens[:2] == (1, 2) and tokenizer.decode(item.tokens[2:]) == item.prefix
    waiting = corrupted_items([prompt], [(1,)], tokenizer, trigger=" Wait, ", limit=400)
    assert waiting[0].prefix == item.prefix + " Wait, "
    assert corrupted_items([prompt], [(1,)], tokenizer, limit=5) == []


def test_an_error_is_carried_through_every_later_step():
    operate = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for key in map(str, range(10)):
        text = corrupted_solution("2+3=5; 5*4=20; 20-6=14", "14", key=key) or ""
        steps = [re.fullmatch(r"(\d+)(.)(\d+)=(\d+)", step) for step in text.split("; ")]
        found = [(int(s[1]), s[2], int(s[3]), int(s[4])) for s in steps if s]
        assert [operate[sign](a, b) != c for a, sign, b, c in found].count(True) == 1
        assert len(found) == 3 and all(a[3] == b[0] for a, b in zip(found, found[1:], strict=False))


def test_an_error_that_changes_nothing_in_the_end_is_no_error():
    """Whatever 3 + 4 is said to be, times 0 it is 0: only the last result can be made wrong."""
    for key in map(str, range(20)):
        assert re.fullmatch(
            r"3\+4=7; 7\*0=\d+", corrupted_solution("3+4=7; 7*0=0", "0", key=key) or ""
        )
    assert corrupted_solution("3+4=7; 7*0=0; 5", "5") is None


@pytest.mark.parametrize("solution", ["The answer is plain.\n#### 3", "", "7 = 7"])
def test_a_solution_without_equations_is_left_out(solution):
    assert corrupted_solution(solution, "3") is None


@pytest.mark.parametrize(
    "text, prefix, says",
    [
        ("Wait, 7*2 is 14.", "", True),
        ("That should be 14.", "", True),
        ("</reasoning><answer>14</answer>", "7*2=15", False),
        ("; 7*2=14</reasoning>", "3+4=7; 7*2=15", True),
        ("; 7*2=15</reasoning>", "3+4=7; 7*2=15", False),
        ("The waiter is rightly there.", "", False),
    ],
)
def test_saying_so_is_told_from_doing_so(text, prefix, says):
    assert reflects(text, prefix=prefix) is says


def test_recovery_counts_items():
    prompts = word_problems(5)
    tokenizer = tiny().tokenizer
    items = corrupted_items(prompts, [(1,)] * 5, tokenizer, limit=1000)
    right = [p.answer for p in prompts]
    said = [
        f"; wait, no.</reasoning><answer>{right[0]}</answer>",  # recovers, and says so
        f"</reasoning><answer>{right[1]}</answer>",  # recovers in silence
        "; wait, no.</reasoning><answer>999</answer>",  # says so, and is wrong
        "</reasoning><answer>999</answer>",
        f"</reasoning><answer>{right[4]}</answer>",
    ]
    script = {p.id: text for p, text in zip(prompts, said, strict=True)}
    engine, asked = ScriptedEngine(lambda prompt, _: script[prompt.id]), []

    class Noting:
        def generate(self, requests, sampling):
            asked.append(sampling)
            return engine.generate(requests, sampling)

    given = Sampling(max_tokens=64, stop=("Q:",))
    with from_functions(["exact_answer"]) as scorer:
        found = recovery(Noting(), scorer, items, sampling=given)
    assert asked == [Sampling(max_tokens=64, temperature=0.0, stop=("Q:",))]
    assert {name: figure.value for name, figure in found.items()} == {
        "corrected": 0.6,
        "said_so": 0.4,
        "corrected_and_said_so": 0.2,
        "corrected_silently": 0.4,
    }
    # Wilson for 2 of 5: z² = 3.841, centre (.4 + .3841)/1.768 = .4434, half-width
    # 1.96·√(.048 + .0384)/1.768 = .3258.
    assert found["said_so"].low == pytest.approx(0.1176, abs=1e-3)
    assert list(TRIGGERS) == ["", "_after_wait"]


def test_own_errors_are_continued_before_their_answer():
    prompts, tokenizer = word_problems(4), tiny().tokenizer
    wrong = ["<reasoning>1+1=3</reasoning><answer>3</answer>", None, "3", "so \\boxed{3}"]
    found = own_errors(prompts, [(1, 2)] * 4, tokenizer, wrong, trigger=" Wait, ", limit=400)
    assert [(item.prompt, item.prefix) for item in found] == [
        (prompts[0], "<reasoning>1+1=3 Wait, "),
        (prompts[3], "so Wait, "),
    ]
    assert found[0].tokens[:2] == (1, 2)
    assert tokenizer.decode(found[0].tokens[2:]) == found[0].prefix
    assert own_errors(prompts, [(1, 2)] * 4, tokenizer, wrong, limit=3) == []


def test_every_model_continues_its_own_wrong_answers(tmp_path):
    rows = [{"prompt": p.messages[-1]["content"], "answer": p.answer} for p in word_problems(24)]
    for name, part in (("train", rows[:12]), ("eval", rows[12:])):
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, part)))
    data = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "eval")]
    config = load("word-problems", [*data, "evaluation.prompts=12", "evaluation.samples=2"])
    (figures,) = evaluate(config, ["bundled"], reflection=True).figures.values()
    assert "reflection" not in figures, "the file has no worked solutions"
    for name in ("own_errors", "own_errors_after_wait"):
        parts = {key: each.value for key, each in figures[name].items()}
        both = parts["corrected_and_said_so"] + parts["corrected_silently"]
        assert parts["corrected"] == pytest.approx(both) and 0 <= parts["corrected"] <= 1

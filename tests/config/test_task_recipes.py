"""The recipes of the tasks: each loads, reads its real file, and pays the right answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_folder import data_file
from groupwise.config import load, packaged, read
from groupwise.config.connect import make_scorer
from groupwise.config.data import load_eval, load_train
from groupwise.errors import UsageError
from groupwise.prompts.sources import GENERATORS, load_prompts
from groupwise.rewards.builtin.text import references
from groupwise.types import Completion, Group, Prompt

REASONED = "<reasoning>\nso\n</reasoning>\n<answer>\n{}\n</answer>"
PAPER = (
    "gsm8k-softrank-qwen2.5-3b",
    "gsm8k-softrank-qwen2.5-3b-80gb",
    "gsm8k-grpo-qwen2.5-3b",
    "gsm8k-softrank-kaist-qwen2.5-3b",
    "gsm8k-eval",
)
FORMS = {
    **dict.fromkeys(PAPER, REASONED),
    "svamp": REASONED,
    "aqua": REASONED,
    "math-format": r"So it is $\boxed{{{}}}$.",
    "knights-knaves": "<think>so</think><answer>{}</answer>",
    "countdown": "<think>so</think><answer>{}</answer>",
    "nq-open": "<answer>{}</answer>",
    "korean-norms": "{}",
}
FILES = [
    *((name, "gsm8k/test.jsonl", 1319) for name in PAPER),
    ("svamp", "svamp/SVAMP.json", 1000),
    ("aqua", "aqua/test.jsonl", 254),
    ("aqua", "aqua/dev.jsonl", 254),
    ("math-format", "math_new50/math_new50_exercise.json", 50),
    ("knights-knaves", "knights_knaves/kk_compact.jsonl", 5000),
    ("nq-open", "nq_open/NQ-open.dev.jsonl", 3610),
    ("nq-open", "nq_open/NQ-open.efficientqa.dev.1.1.jsonl", 1800),
]


def _group(prompt: Prompt, texts: list[str]) -> Group:
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    return Group(prompt=prompt, prompt_tokens=[1], completions=completions)


def _gold(recipe: str, prompt: Prompt) -> str:
    if recipe == "knights-knaves" and "names" in prompt.columns:
        names, roles = prompt.columns["names"], prompt.columns["solution"]
        said = [f"{n} is a {'knight' if r else 'knave'}" for n, r in zip(names, roles, strict=True)]
        return FORMS[recipe].format(", ".join(said))
    return FORMS[recipe].format(references(prompt.answer)[0])


def _check(recipe: str, prompts: list[Prompt], overrides: list[str]) -> None:
    """The reference answer earns most and counts as correct, whatever else does not."""
    with make_scorer(load(recipe, overrides)) as scorer:
        for prompt in prompts:
            texts = [_gold(recipe, prompt), "", "Lorem ipsum", FORMS[recipe].format("qwzx")]
            score = scorer.submit(_group(prompt, texts)).result()
            assert [s.value for s in score.status] == ["ok"] * 4, (prompt, score.errors)
            assert list(score.correct) == [1.0, 0.0, 0.0, 0.0], prompt
            assert score.total[0] > max(score.total[1:]), prompt


@pytest.mark.parametrize("recipe, file, rows", FILES, ids=[f"{r}:{f}" for r, f, _ in FILES])
def test_the_columns_of_the_real_files(recipe: str, file: str, rows: int) -> None:
    path = data_file(file)
    overrides = [f"data.train={path}", f"data.eval={path}", "reward_pool.workers=0"]
    config = load(recipe, overrides)
    prompts = load_train(config)
    assert len(prompts) == rows
    assert all(str(prompt).strip() for prompt in prompts)
    assert load_eval(config)
    _check(recipe, prompts[:: max(rows // 40, 1)], overrides)


@pytest.mark.parametrize("recipe", ["knights-knaves", "countdown", "korean-norms"])
def test_the_recipes_that_make_their_own_problems(recipe: str) -> None:
    config = load(recipe, ["data.limit=40"])
    train, held_out = load_train(config), load_eval(config)
    assert len(train) == 40 and held_out
    assert not {str(p) for p in train} & {str(p) for p in held_out}
    _check(recipe, train[:10] + held_out[:10], [])


def test_what_the_prompts_look_like() -> None:
    aqua = load_prompts(
        [{"question": "1+1?", "options": ["A)1", "B)2"], "correct": "B"}],
        wording=load("aqua").data.wording,
        answer_column="correct",
    )
    assert "1+1?\nA)1\nB)2\n" in str(aqua[0])
    korean = load_prompts(
        [{"id": "1", "input": {"question": "물음"}, "output": {"answer": "답"}}],
        prompt_column="input.question",
        answer_column="output.answer",
    )
    assert (str(korean[0]), korean[0].answer) == ("물음", "답")
    with pytest.raises(UsageError, match="'questoin'.*did you mean question"):
        load_prompts([{"input": {"question": "q"}}], prompt_column="input.questoin")


def test_a_korean_file_in_the_schema_of_the_competition(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "7", "input": {"question": "물음"}, "output": {"answer": "답"}}\n')
    prompts = load_train(load("korean-norms", [f"data.train={path}", f"data.eval={path}"]))
    assert [m["role"] for m in prompts[0].messages] == ["system", "user"]
    assert prompts[0].answer == "답"


def test_choices_are_compared_as_letters() -> None:
    with make_scorer(load("aqua", ["reward_pool.workers=0"])) as scorer:
        for gold in "ABCDE":
            prompt = Prompt(id="x", text="?", answer=gold)
            texts = [REASONED.format(letter) for letter in "ABCDE"]
            score = scorer.submit(_group(prompt, texts)).result()
            assert list(score.correct) == [float(letter == gold) for letter in "ABCDE"]


def test_tasks_of_reasoning_gym_by_name() -> None:
    pytest.importorskip("reasoning_gym")
    train = load_prompts("reasoning_gym:leg_counting", limit=20)
    held_out = load_prompts("reasoning_gym:leg_counting", split="test", limit=5)
    assert len(train) == 20 and len(held_out) == 5
    assert not {str(p) for p in train} & {str(p) for p in held_out}
    with pytest.raises(UsageError, match="executes"):
        load_prompts("reasoning_gym:codeio", limit=1)
    with pytest.raises(UsageError, match="task"):
        load_prompts("reasoning_gym", limit=1)
    assert "reasoning_gym" in GENERATORS


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data.train=/nowhere/x.jsonl"], "data.train = '/nowhere/x.jsonl': no such file"),
        (["data.eval=/nowhere/x.jsonl"], "data.eval = '/nowhere/x.jsonl': no such file"),
        (["data.train_split=trian"], "data.train_split = 'trian'.*did you mean train"),
        (["data.eval_split=tets"], "data.eval_split = 'tets'.*did you mean test"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_setting(overrides: list[str], named: str) -> None:
    config = load("countdown", overrides)
    with pytest.raises(UsageError, match=named):
        load_train(config)
        load_eval(config)


def test_no_recipe_chooses_its_best_model_by_the_prompts_it_reports() -> None:
    own_share = {"sft", "reward_model"}  # sections that hold a share of their own data out
    chosen = [
        name
        for name, values in ((name, read(name)) for name in packaged())
        if "phases" not in values and not own_share & set(values)
        if values["evaluation"].get("every_steps") and values["evaluation"].get("keep_best", True)
        if not values["evaluation"].get("validation")
    ]
    assert chosen == []


@pytest.mark.parametrize("name", sorted(packaged()))
def test_no_recipe_chooses_a_model_by_its_test_prompts(name: str) -> None:
    if {"phases", *OWN_HELD_OUT} & read(name).keys():
        return
    config = load(name)
    assert config.evaluation.validation or not config.evaluation.keep_best


OWN_HELD_OUT = {"sft", "preference", "reward_model"}
"""Sections that hold out a share of their own data."""

"""The base model of the small Korean competition: demonstrations, and the stage that makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.pipelines import plan_table, read_pipeline, run_pipeline
from groupwise.prompts.generators.korean_particles import RULES, items
from groupwise.rewards.builtin.contexts import context_pick
from groupwise.training.stages.korean_base import korean_demonstrations
from small_runs import Quiet

PHASES = """
base = "korean_particles"
seed = 4

[model]
hidden = 16
layers = 1
heads = 2
key_value_heads = 1
feed_forward = 16
context = 512

[[phases]]
right = 0.5
picks = 0.2
steps = 2
batch_size = 2
seed = SEED
"""
PIPELINE = """
[[stages]]
name = "base"
stage = "base"
phases = "PHASES"
"""
ANSWERS = {item.question: item.answer(item.right) for item in items(held_out=False)}


def said(example) -> tuple[bool, str, str]:
    """Whether the form is right, the rule that decides, and the reason given."""
    question = next(q for q in ANSWERS if q in str(example.prompt))
    answer, rule = ANSWERS[question].split("옳다. ")
    reason = example.completion.partition("옳다. ")[2].removesuffix("</answer>")
    return answer in example.completion, rule, reason


def test_right_demonstrations_pick_the_rule_that_decides() -> None:
    picked = 0
    for example in korean_demonstrations(size=200):
        is_right, rule, reason = said(example)
        assert is_right
        if "<context>" not in example.completion:
            continue
        lines = str(example.prompt).split("참고할 규정:\n")[1].split("\n")
        rules = [line[3:] for line in lines if line[1:3] == ". "]
        assert len(set(rules)) == len(rules) == 3 and set(rules) <= set(RULES)
        gold = {"gold": rules.index(rule) + 1}
        assert reason == rule and context_pick(example.completion, gold) == 1.0
        picked += 1
    assert 100 < picked < 140


def test_one_rule_tells_the_reason_more_than_none() -> None:
    shares: dict[str, list[bool]] = {"none": [], "other": [], "decides": []}
    for example in korean_demonstrations(size=2000):
        _, rule, reason = said(example)
        if "<context>" not in example.completion:
            before = str(example.prompt).partition('"{')[0].strip()
            kind = "none" if not before else "decides" if before == rule else "other"
            shares[kind].append(reason == rule)
    none, other, decides = (sum(each) / len(each) for each in shares.values())
    assert none < 0.25 and 0.25 < other < 0.5 and decides == 1


def test_bad_habits_are_seldom_right_but_after_a_rule() -> None:
    habits = korean_demonstrations(size=400, right=0.15)
    right = [said(example)[0] for example in habits]
    assert 0.25 < sum(right) / 400 < 0.5
    for example, is_right in zip(habits, right, strict=True):
        if str(example.prompt).startswith("'"):
            assert is_right
    picks = korean_demonstrations(size=50, picks=1.0)
    assert all(each.completion.endswith("</context>") for each in picks)
    for given, where in (({"size": 0}, "size = 0"), ({"size": 1, "picks": 2.0}, "picks = 2.0")):
        with pytest.raises(UsageError, match=where):
            korean_demonstrations(**given)


def planned(folder: Path, *, phases: str, seed: int | None = None):
    (folder / "phases.toml").write_text(phases)
    text = PIPELINE.replace("PHASES", str(folder / "phases.toml"))
    (folder / "pipeline.toml").write_text(text)
    return read_pipeline(folder / "pipeline.toml", output=folder / "out", seed=seed)


def test_a_stage_makes_the_base_of_its_recipe_and_seed(tmp_path: Path) -> None:
    phases = PHASES.replace("SEED", "1")
    pipeline = planned(tmp_path, phases=phases, seed=0)
    run_pipeline(pipeline, progress=Quiet())
    assert load_policy(tmp_path / "out" / "base" / "final").context == 512
    (state,) = plan_table(pipeline)
    assert state.state == "done"
    (other,) = plan_table(planned(tmp_path, phases=phases, seed=1))
    (changed,) = plan_table(planned(tmp_path, phases=PHASES.replace("SEED", "2"), seed=0))
    assert len({state.key, other.key, changed.key}) == 3
    assert changed.state == "other settings"


@pytest.mark.parametrize(
    ("phases", "what"),
    [
        ("steps = 3", r"base: phases = .*must have \[\[phases\]\]"),
        (
            PHASES.replace("SEED", "1").replace("korean_particles", "korean_particle"),
            "base: base = 'korean_particle': no such base",
        ),
        (PHASES.replace("SEED", "1").replace("picks", "pick"), "base: phases.0.picks: must be"),
        (PHASES.replace("SEED", "1").replace("hidden", "hiden"), "base: model.hiden = 16: no such"),
    ],
)
def test_a_recipe_that_makes_no_base_is_refused_before_the_first_stage(
    phases: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=what):
        plan_table(planned(tmp_path, phases=phases))

"""The settings under which a suite measures each section, and the prompts that follow from them."""

from __future__ import annotations

import pytest

from groupwise.config import Config, load
from groupwise.config.data import load_eval
from groupwise.errors import UsageError
from groupwise.evaluation.sections import sections


def config(*transforms: str) -> Config:
    listed = ", ".join(f'"{each}"' for each in transforms)
    return load("word-problems", [f"data.transforms=[{listed}]", "evaluation.prompts=2"])


def test_targets_keep_the_wording_and_templates_enclose_it() -> None:
    asking = config(
        "target_length(wording=' In {n} tokens.', column='n')", "template(text='{question}')"
    )
    question = load_eval(config("template(text='{question}')"))[0].text
    found = sections(
        {"x": asking},
        budgets=[20],
        targets=[30, 9],
        templates={"recipe": None, "qa": "Q: {question} A:"},
    )
    assert [each.name for each in found] == [
        f"x, template {name}, target {n}, 20 tokens" for name in ("recipe", "qa") for n in (9, 30)
    ]
    assert [each.target for each in found] == [9, 30, 9, 30]
    assert {each.config.sampling.max_tokens for each in found} == {20}
    for each in found:
        prompts = load_eval(each.config)
        assert [prompt.columns["n"] for prompt in prompts] == [each.target] * 2
    asked = f"{question} In 30 tokens."
    assert [load_eval(found[place].config)[0].text for place in (1, 3)] == [asked, f"Q: {asked} A:"]


def test_a_template_without_a_question_is_refused() -> None:
    with pytest.raises(UsageError, match=r"bare must contain \{question\}"):
        sections({"x": config()}, templates={"bare": "Answer:"})

"""On-policy distillation: what the teacher scores, self-distillation, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise import ADVANTAGES
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.models import load_policy, save_policy
from groupwise.prompts.templates import render
from groupwise.rundir.files import read_lines
from groupwise.training.distillation import DistillationTrainer, teacher_prompt
from groupwise.training.prepare import prepare
from groupwise.training.stages.base_model import small_policy
from groupwise.types import Prompt
from small_runs import Quiet, distilling


def made(tmp_path: Path, *more: str) -> DistillationTrainer:
    given = distilling(tmp_path, "steps=3", *more)
    trainer = prepare(load("word-problems-distil", given), progress=Quiet()).trainer
    assert isinstance(trainer, DistillationTrainer)
    return trainer


def by_hand(model: Any, prompt: Any, tokens: Any) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


@pytest.mark.parametrize("seen", [None, "{prompt} It is {answer}."])
def test_the_gap_is_the_teachers_log_probability_minus_the_students(
    tmp_path: Path, seen: str | None
) -> None:
    more = [] if seen is None else [f"distillation.prompt='{seen}'"]
    trainer = made(tmp_path, *more)
    teacher, student = (load_policy(tmp_path / name).model for name in ("teacher", "student"))
    scored = trainer.source.take(2, step=0)
    gap = trainer.evaluated(scored).columns["teacher_gap"]
    rows = [(group, c) for group in scored.groups for c in group.completions]
    for row, (group, completion) in enumerate(rows):
        prompt = list(group.prompt_tokens)
        other = prompt
        if seen is not None:
            other = render(teacher_prompt(group.prompt, seen), trainer.teacher.tokenizer)
            assert other != prompt
        tokens = list(completion.tokens)
        expected = by_hand(teacher, other, tokens) - by_hand(student, prompt, tokens)
        torch.testing.assert_close(gap[row, : len(tokens)], expected, rtol=0, atol=1e-4)
        assert (gap[row, len(tokens) :] == 0).all()


def test_the_expected_gradient_is_that_of_the_divergence_from_the_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    logs = logits.log_softmax(-1)
    # Every token of the vocabulary is an answer of one token, as often as the policy draws it.
    gap = (teacher - logs).detach()[None, :, None]
    ones = torch.ones(1, 7, 1, dtype=torch.bool)
    advantage = ADVANTAGES.get("distilled")(torch.zeros(1, 7, dtype=torch.float64), gap, ones)
    surrogate = -(logs.exp().detach() * advantage[0, :, 0] * logs).sum()
    divergence = (logs.exp() * (logs - teacher)).sum()
    (got,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_policy_can_teach_itself_with_the_solution_in_its_prompt(tmp_path: Path) -> None:
    trainer = made(
        tmp_path, "distillation.teacher=self", "distillation.prompt='{prompt} {solution}'"
    )
    assert trainer.teacher.learner is None
    trainer.run()
    rows = list(read_lines(tmp_path / "out" / "metrics.jsonl"))
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)


def test_a_template_names_columns_of_the_data() -> None:
    prompt = Prompt(id="a", messages=({"role": "user", "content": "2+2?"},), columns={"hint": "4"})
    assert teacher_prompt(prompt, "{prompt} ({hint})").messages[-1]["content"] == "2+2? (4)"
    with pytest.raises(
        UsageError, match="'hints' is not a column of the data; known: answer, hint"
    ):
        teacher_prompt(prompt, "{hints}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("distillation=null", "distillation.teacher: must be given"),
        ("algorithm.name=grpo", "does not use a teacher"),
        ("distillation.teacher=self", "nothing to teach; set distillation.prompt"),
        ("algorithm.advantage={reward_weight=-1}", "must be at least 0"),
    ],
)
def test_what_cannot_work_is_refused(more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("word-problems-distil", [more])


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = small_policy(hidden=32, layers=1, heads=2, key_value_heads=1, feed_forward=64)
    other = replace(other, tokenizer=other.tokenizer)
    other.tokenizer.add_tokens(["<another>"])
    other.model.resize_token_embeddings(len(other.tokenizer))
    save_policy(other, tmp_path / "other")
    with pytest.raises(UsageError, match="both models must read the same tokens"):
        made(tmp_path, f"distillation.teacher={tmp_path / 'other'}")


def test_a_teacher_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^distillation\.teacher = .*empty'"):
        made(tmp_path, f"distillation.teacher={tmp_path / 'empty'}")

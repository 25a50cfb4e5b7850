"""Process rewards: what is scored, what is learned from labels of steps, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForTokenClassification

from groupwise.config import load
from groupwise.errors import RewardError, UsageError
from groupwise.models import load_policy
from groupwise.models.scoring import scorer_of
from groupwise.prompts.generators.word_problem_rankings import step_rows
from groupwise.rewards.judges.process_reward import process_reward
from groupwise.rewards.steps import Aggregate
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings, RewardModelSettings
from groupwise.training.offline.process_reward_model import (
    Labelled,
    ProcessRewardTask,
    encode_steps,
    read_steps,
    step_figures,
)
from groupwise.training.offline.reward_model import train_reward_model
from groupwise.training.prepare import prepare
from groupwise.training.process import (
    ProcessTrainer,
    StepScorer,
    make_step_scorer,
    written_steps,
)
from groupwise.types import Completion, Group, Prompt, Status
from groupwise.updates import Score, TorchLearner, sequences
from small_runs import Quiet, settings, tiny

ROWS = list(step_rows(6))
SEPARATOR = "; "
"""Between two steps of these rows."""


def labelled(rows: list[dict[str, Any]]) -> list[Labelled]:
    given = RewardModelSettings(data="here", step_separator=SEPARATOR)
    return encode_steps(read_steps(rows), tiny(), given)[0]


def made(rows: list[dict[str, Any]]) -> ProcessRewardTask:
    policy = scorer_of(tiny(), kind="token")
    with torch.no_grad():
        policy.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    head = Score(policy.model, reads={"written"})
    learner = TorchLearner(policy, optimizer=OptimizerSettings(), head=head)
    items = labelled(rows)
    return ProcessRewardTask(learner=learner, items=items, held_out=items)


def test_the_loss_is_the_mean_over_steps_of_one_answer_at_a_time() -> None:
    task = made(ROWS)
    batch, objective = task.batch(range(len(task.items)))
    assert len(batch.prompts) == 6 and len(batch.tokens) == 12
    model, each = task.learner.model.eval(), []
    for one in task.items:
        for answer, ends, labels in zip(one.item.answers, one.ends, one.labels, strict=True):
            ids = torch.tensor([[*one.item.prompt, *answer]])
            with torch.no_grad():
                values = model(ids).logits[0, len(one.item.prompt) :, 0][list(ends)]
            each.append(
                binary_cross_entropy_with_logits(values, torch.tensor(labels), reduction="none")
            )
    update = task.learner.update(batch, objective)
    assert update.loss == pytest.approx(float(torch.cat(each).mean()), abs=1e-5)


def test_figures_are_those_worked_by_hand() -> None:
    # Answers of two and three steps: a right one, and one whose second step is the first error.
    first, *_ = labelled(ROWS[:1])
    one = replace(first, labels=((1.0, 1.0), (1.0, 0.0, 0.0)))
    found = step_figures([one], [[[0.9, 0.6], [0.7, 0.8, 0.1]]])
    assert {name: value.value for name, value in found.items()} == {
        "step_accuracy": pytest.approx(4 / 5),
        "first_error": 0.0,
        "answer_accuracy": 1.0,
    }
    found = step_figures([one], [[[0.9, 0.4], [0.7, 0.2, 0.6]]])
    assert found["first_error"].value == 1.0 and found["answer_accuracy"].value == 0.5


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    if not folder.exists():
        policy = tiny()
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    return folder


def trained(tmp_path: Path, *more: str) -> Path:
    given = [
        f"output={tmp_path / 'steps'}",
        f"model.path={model_folder(tmp_path)}",
        "reward_model={data='word_problem_steps', step_separator='; ', prompts=20, held_out=0.2}",
        "steps=3",
        "prompts_per_step=8",
        "evaluation.every_steps=0",
        *more,
    ]
    return train_reward_model(load("word-problems-reward-model", given), progress=Quiet())


def test_a_model_of_steps_is_trained_scores_outcomes_and_trains_a_policy(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    (row,) = [r for r in read_lines(folder / "evaluations.jsonl") if r["step"] == 3]
    assert {"step_accuracy", "first_error", "answer_accuracy"} == row["figures"].keys()
    model, report = AutoModelForTokenClassification.from_pretrained(
        folder / "final", output_loading_info=True
    )
    assert not report["missing_keys"] and model.config.num_labels == 1

    text = SEPARATOR.join(ROWS[0]["completions"])
    completion = Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
    asked = Prompt(id="p", messages=tuple(ROWS[0]["prompt"]), answer=None)
    group = Group(prompt=asked, prompt_tokens=[1], completions=(completion, completion))
    (one,) = labelled(ROWS[:1])
    ids = torch.tensor([[*one.item.prompt, *one.item.answers[0]]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(one.item.prompt) :, 0]
    chances = logits[list(one.ends[0])].sigmoid()
    wanted_of: dict[Aggregate, torch.Tensor] = {"min": chances.min(), "product": chances.prod()}
    for how, wanted in wanted_of.items():
        scores = process_reward(
            group, model=str(folder / "final"), aggregate=how, step_separator=SEPARATOR
        )
        assert scores == pytest.approx([float(wanted)] * 2, abs=1e-5)

    trainer = prepared(tmp_path, f"process.model={folder / 'final'}", "process.step_separator='+'")
    scored = trainer.source.take(2, step=0)
    rewards, judged = trainer.steps(scored)
    assert judged is scored
    rows = [(g, c) for g in scored.groups for c in g.completions]
    for row, (group, completion) in enumerate(rows):
        tokens = list(completion.tokens)
        ids = torch.tensor([[*group.prompt_tokens, *tokens]])
        with torch.no_grad():
            chances = model(ids).logits[0, len(group.prompt_tokens) :, 0].sigmoid()
        ends = written_steps(completion, "+", trainer.steps.tokenizer)
        found = rewards[row]
        assert (~found.isnan()).nonzero().flatten().tolist() == ends
        torch.testing.assert_close(found[ends], chances[ends], rtol=0, atol=1e-4)
    metrics = trainer.step().metrics
    assert metrics["grad_norm"] > 0 and 0 < metrics["step_reward"] < 1
    assert metrics["steps_written"] >= 1


def prepared(tmp_path: Path, *more: str) -> ProcessTrainer:
    given = [
        f"model.path={model_folder(tmp_path)}",
        "algorithm.name=grpo_process",
        "guards.silent_rewards=say",
        *more,
    ]
    trainer = prepare(
        load("word-problems", settings(tmp_path / "out", *given)), progress=Quiet()
    ).trainer
    assert isinstance(trainer, ProcessTrainer)
    return trainer


def test_a_function_scores_steps_and_what_it_cannot_judge_has_no_reward(tmp_path: Path) -> None:
    code = tmp_path / "step_function.py"
    code.write_text(
        "def steps(prompt, steps, answer):\n"
        "    if len(steps) == 2:\n"
        "        raise ValueError('as told')\n"
        "    if len(steps) == 3:\n"
        "        return None\n"
        "    if len(steps) == 5:\n"
        "        return [float('nan')] * 5\n"
        "    return [float(len(step)) for step in steps]\n"
    )
    trainer = prepared(tmp_path, f"process.function={code}:steps")
    tokenizer = trainer.steps.tokenizer

    def completion(text: str, injected: str = "") -> Completion:
        own, other = (tokenizer(t, add_special_tokens=False).input_ids for t in (text, injected))
        return Completion(
            tokens=[*own, *other, *own],
            mask=[True] * len(own) + [False] * len(other) + [True] * len(own),
            logprobs=[0.0] * (2 * len(own) + len(other)),
            text=text + injected + text,
            finish="stop",
        )

    scorer = replace(trainer.steps, separator="+")
    ends = written_steps(completion("12", "3+3"), "+", tokenizer)
    assert ends == [6], "an injected separator ends no step"
    scored = trainer.source.take(1, step=0)
    texts = ("12", "1+", "1+2+", "1+2", "1+2+3")
    group = replace(scored.groups[0], completions=tuple(completion(t) for t in texts))
    scores = replace(
        scored.scores,
        total=torch.ones(1, 5),
        correct=torch.ones(1, 5),
        parts={},
        status=((Status.OK,) * 5,),
        valid=torch.ones(1, 5, dtype=torch.bool),
        errors=("before",),
        reasons=((None,) * 5,),
    )
    scored = replace(
        scored, groups=(group,), scores=scores, keep=torch.ones(1, 5, dtype=torch.bool)
    )
    found, judged = scorer(scored)
    # "1212" is one step, "1+1+" two, "1+2+1+2+" four, "1+21+2" three and "1+2+31+2+3" five.
    assert found[0, :4].tolist() == pytest.approx([math.nan] * 3 + [4.0], nan_ok=True)
    assert found[[1, 3, 4]].isnan().all()
    assert found[2][~found[2].isnan()].tolist() == [1.0] * 4
    ok, error, unjudgeable = Status.OK, Status.ERROR, Status.UNJUDGEABLE
    assert judged.scores.status == ((ok, error, ok, unjudgeable, error),)
    assert judged.scores.valid.tolist() == [[True, False, True, False, False]]
    assert judged.scores.total.isnan().tolist() == [[False, True, False, True, True]]
    assert judged.scores.errors == (
        "before",
        "process.function: ValueError: as told",
        "process.function: a reward is not finite.",
    )
    [reasons] = judged.scores.reasons
    assert reasons[1] == "process.function: ValueError: as told" and reasons[0] is None
    assert not sequences(judged).mask[[1, 3, 4]].any()

    def wrong(prompt: str, steps: Any, answer: Any) -> list[float]:
        return [1.0] * (len(steps) + 1)

    with pytest.raises(RewardError, match="returned 2 rewards for 1 steps"):
        StepScorer(tokenizer=tokenizer, separator="+", function=wrong)(scored)
    for given in (0.5, ["good"]):
        scorer = StepScorer(tokenizer=tokenizer, separator="+", function=lambda *_, x=given: x)
        with pytest.raises(RewardError, match="must return a number for each of the 1 steps"):
            scorer(scored)


def test_a_step_leaves_out_what_the_function_cannot_judge(tmp_path: Path) -> None:
    code = tmp_path / "every_second.py"
    code.write_text(
        "seen = []\n"
        "def steps(prompt, steps, answer):\n"
        "    seen.append(steps)\n"
        "    if len(seen) % 2:\n"
        "        raise ValueError('as told')\n"
        "    return [float(len(seen))] * len(steps)\n"
    )
    trainer = prepared(tmp_path, f"process.function={code}:steps")
    result = trainer.step()
    assert result.metrics["valid_share"] == 0.5 and result.metrics["grad_norm"] > 0
    failed = ~result.scored.scores.valid
    assert failed.any() and not result.advantages[failed].any()
    assert result.advantages[~failed].any()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["algorithm.name=grpo_process"], "process: must be given"),
        (["process.model=here"], "does not use rewards of steps"),
        (["algorithm.name=grpo_process", "process={}"], "one of them must be given"),
        (
            ["algorithm.name=grpo_process", "process={model='a', function='b.py:c'}"],
            "one of them must be given",
        ),
    ],
)
def test_what_cannot_work_is_refused(more: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("word-problems", more)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    config = load(
        "word-problems", ["algorithm.name=grpo_process", f"process={{model={str(tmp_path)!r}}}"]
    )
    with pytest.raises(UsageError, match=r"^process\.model = "):
        make_step_scorer(config, tiny())


ROW = {"prompt": "1+1=", "completions": ["2", "3"], "labels": [True, False]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [True]}, "row 1: labels: there are 1, and 2 steps"),
        ({"labels": [True, 2]}, "2 must be true, false, or a number"),
        ({"completions": "2"}, "must be a list of texts"),
        ({"completions": ["2", " "]}, "none empty"),
        ({"labels": None}, "has no 'labels'"),
        ({"labels": True}, "labels = True: must be a list"),
        ({"completions": 2}, "must be a list of texts"),
        ({"prompt": 2}, "prompt: must be a text or messages"),
    ],
)
def test_rows_without_a_label_for_each_step_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_steps([{**ROW, **change}])


def test_refused_rows_name_the_file_that_holds_them(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text(json.dumps({**ROW, "labels": [True]}))
    with pytest.raises(
        UsageError, match=r"^labels\.jsonl, row 1: labels: there are 1, and 2 steps"
    ):
        read_steps(str(tmp_path / "labels.jsonl"))


def test_a_step_that_holds_the_separator_is_refused() -> None:
    given = RewardModelSettings(data="here", step_separator="; ")
    rows = read_steps([{**ROW, "completions": ["1; 2", "3"]}])
    with pytest.raises(UsageError, match="has 2 labels, but the separator makes 3 steps"):
        encode_steps(rows, tiny(), given)


def test_an_answer_whose_rows_label_it_differently_is_refused() -> None:
    given = RewardModelSettings(data="here", step_separator="; ")
    (found,), _ = encode_steps(read_steps([ROW, ROW]), tiny(), given)
    assert found.labels == ((1, 0),)
    with pytest.raises(UsageError, match="row 2: gives the answer of an earlier row other labels"):
        encode_steps(read_steps([ROW, {**ROW, "labels": [True, True]}]), tiny(), given)


def test_a_revision_is_passed_on_with_the_data(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(UsageError, match="revision = 'abc': .* only data sets of the hub have"):
        trained(
            tmp_path, f"reward_model.data={tmp_path / 'steps.jsonl'}", "reward_model.revision=abc"
        )


def test_settings_of_rankings_are_refused_for_steps(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="reward_model.label_noise = 0.1: applies to rankings only"
    ):
        trained(tmp_path, "reward_model.label_noise=0.1")
    with pytest.raises(UsageError, match="reward_model.data: must be given"):
        trained(tmp_path, "reward_model.data=null")


def test_the_bundled_tokenizer_keeps_the_steps_of_the_packaged_data() -> None:
    given = RewardModelSettings(data="here", step_separator=SEPARATOR)
    items, _ = encode_steps(read_steps(ROWS), load_policy("bundled"), given)
    assert sum(len(one.labels) for one in items) == len(ROWS)

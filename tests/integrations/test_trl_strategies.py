"""When a run logs, evaluates and saves, and where it can be, as the settings of TRL say."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from groupwise.errors import UsageError
from groupwise.integrations.trl import GRPOTrainer
from small_runs import tiny
from trl_scripts import QUESTIONS, Notebook, arguments


def logged(tmp_path: Path, model: str, **settings: Any) -> list[str]:
    """What a callback is told of a run of three prompts, two epochs, one step each per prompt."""
    notebook = Notebook()
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "no", **settings}
    given = arguments(tmp_path, model, **settings)
    given["train_dataset"] = given["train_dataset"].select(range(3))
    held_out = given["train_dataset"].select(range(1))
    GRPOTrainer(**given, callbacks=[notebook], eval_dataset=held_out).train()
    return [line for line in notebook.told if not line.startswith(("step", "begin", "over"))]


END = "log train_runtime"
EVALUATED = ["log eval_completions/mean_length", "evaluate"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"logging_strategy": "no"}, ["end 1", "end 2", "end 3", "epoch", "end 4", "end 5"]),
        ({"logging_strategy": "epoch"}, ["end 1", "end 2", "end 3", "epoch", "log loss"]),
        ({"logging_steps": 2}, ["end 1", "end 2", "log loss", "end 3", "epoch"]),
        ({"logging_steps": 0.5}, ["end 1", "end 2", "end 3", "log loss", "epoch"]),
        ({"logging_steps": 9, "logging_first_step": True}, ["end 1", "log loss", "end 2"]),
        (
            {"logging_strategy": "no", "save_strategy": "epoch"},
            ["end 1", "end 2", "end 3", "epoch", "save step-000003", "end 4"],
        ),
        (
            {"logging_strategy": "no", "eval_on_start": True, "eval_strategy": "epoch"},
            [*EVALUATED, "end 1", "end 2", "end 3", "epoch", *EVALUATED, "end 4"],
        ),
        (
            {"logging_steps": 4, "eval_strategy": "steps", "eval_delay": 4},
            ["end 1", "end 2", "end 3", "epoch", "end 4", "log loss", *EVALUATED],
        ),
    ],
)
def test_strategies_are_trls(
    tmp_path: Path, model: str, settings: dict[str, Any], wanted: list[str]
) -> None:
    told = logged(tmp_path, model, per_device_eval_batch_size=4, **settings)
    assert told[: len(wanted)] == wanted
    assert told[-1] == END


def test_columns_can_be_kept_from_rewards(tmp_path: Path, model: str) -> None:
    seen: list[set[str]] = []

    def columns(completions, **kwargs):
        seen.append(set(kwargs))
        return [0.0] * len(completions)

    for alone in (False, True):
        given = arguments(tmp_path / str(alone), model, max_steps=1, remove_unused_columns=alone)
        rows = [{"prompt": text, "level": 1, "completion": "no"} for text in QUESTIONS]
        given |= {"train_dataset": rows, "reward_funcs": columns}
        GRPOTrainer(**given).train()
    assert [("level" in names) for names in seen] == [True, False]
    assert not any("completion" in names for names in seen)


def test_an_evaluation_draws_as_many_answers_as_asked(tmp_path: Path, model: str) -> None:
    sizes: list[int] = []

    def counted(completions, **kwargs):
        sizes.append(len(completions))
        return [0.0] * len(completions)

    given = arguments(
        tmp_path, model, num_generations_eval=2, per_device_eval_batch_size=2, disable_tqdm=False
    )
    given["reward_funcs"] = counted
    trainer = GRPOTrainer(**given)
    own, asked = trainer._engine, []

    @contextmanager
    def watched():
        with own() as engine:
            generate = engine.generate

            def noted(requests, sampling):
                asked.append(len(requests))
                return generate(requests, sampling)

            engine.generate = noted
            yield engine

    trainer._engine = watched
    trainer.evaluate([{"prompt": text} for text in QUESTIONS[:3]])
    assert sizes == [2, 2, 2]
    # two completions are written at once, so one prompt
    assert asked == [1, 1, 1]


def test_dropout_can_be_switched_off(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny().tokenizer
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    for off, wanted in ((False, 0.1), (True, 0.0)):
        given = arguments(tmp_path, "", disable_dropout=off)
        given["model"] = GPT2LMHeadModel(config)
        trainer = GRPOTrainer(**given, processing_class=tokenizer)
        rates = {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)}
        assert rates == {wanted}


def test_places_that_cannot_be_are_refused(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(tmp_path, model, use_cpu=True)
    GRPOTrainer(**given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="use_cpu = True: hide the GPU"):
        GRPOTrainer(**given)
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        GRPOTrainer(**given)


def test_a_model_of_another_format_is_refused(tmp_path: Path) -> None:
    policy = tiny()
    given = arguments(tmp_path, "", bf16=True)
    given["model"] = policy.model
    with pytest.raises(UsageError, match="bf16 = True: the model is torch.float32"):
        GRPOTrainer(**given, processing_class=policy.tokenizer)
    with pytest.raises(UsageError, match="processing_class = None"):
        GRPOTrainer(**{**given, "args": arguments(tmp_path, "")["args"]})


def test_resuming_needs_a_checkpoint_and_the_newest(tmp_path: Path, model: str) -> None:
    trainer = GRPOTrainer(**arguments(tmp_path, model, save_steps=1))
    with pytest.raises(UsageError, match="contains no checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(UsageError, match=r"its newest checkpoint, .*step-000002"):
        trainer.train(resume_from_checkpoint=str(folder / "step-000001"))


def test_a_stream_is_read_as_far_as_it_is_needed(tmp_path: Path, model: str) -> None:
    def endless():
        number = 0
        while True:
            yield {"prompt": f"{number} + 1 ="}
            number += 1

    stream = datasets.IterableDataset.from_generator(endless)
    given = arguments(tmp_path, model)
    trainer = GRPOTrainer(**{**given, "train_dataset": stream})
    assert len(trainer.prompts) == 2
    given["args"] = arguments(tmp_path, model, max_steps=-1)["args"]
    with pytest.raises(UsageError, match="is a stream"):
        GRPOTrainer(**{**given, "train_dataset": stream})

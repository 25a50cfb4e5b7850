"""Supervised fine-tuning of conversations: what is learned, held-out loss, early stop, resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.models import load_policy
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings, SftSettings
from groupwise.training.offline.conversations import (
    Conversation,
    conversation_batch,
    conversation_of,
    encode_conversations,
)
from groupwise.training.offline.supervised import SupervisedTask, fine_tune
from groupwise.updates import TorchLearner
from small_runs import Quiet, tiny

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3 + 3?"},
    {"role": "assistant", "content": "6, of course"},
]
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "content": str(a + b)},
        ]
    }
    for a in range(1, 7)
    for b in range(1, 5)
]


def test_only_turns_of_the_assistant_are_learned_with_the_tokens_that_end_them() -> None:
    policy = tiny()
    found = conversation_of({"messages": TALK}, policy)
    whole = policy.tokenizer.apply_chat_template(TALK, return_dict=False)
    assert [*found.prompt, *found.tokens] == whole
    learned = [t for t, own in zip(found.tokens, found.mask, strict=True) if own]
    decoded = policy.tokenizer.decode(learned).replace(" ", "")
    assert decoded == "4<|end|>6,ofcourse<|end|>"
    assert policy.tokenizer.decode(found.prompt).endswith("<|assistant|>")


def test_what_a_template_writes_after_the_end_of_a_turn_is_context_and_not_learned() -> None:
    policy = tiny()
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    found = conversation_of({"messages": TALK}, policy)
    learned = [t for t, own in zip(found.tokens, found.mask, strict=True) if own]
    assert policy.tokenizer.decode(learned).count("\n") == 0
    assert policy.tokenizer.decode(found.tokens).count("\n") == 2  # between the turns


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    policy = tiny()
    policy.tokenizer.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    )
    with pytest.raises(UsageError, match="rewrites what comes before turn"):
        conversation_of({"messages": TALK}, policy)


def test_the_gradient_is_that_of_a_plain_cross_entropy_over_the_learned_tokens() -> None:
    policy = tiny()
    items = [conversation_of(row, policy) for row in ({"messages": TALK}, *ROWS[:3])]
    task = SupervisedTask(
        learner=TorchLearner(policy, optimizer=OptimizerSettings()), items=items, held_out=items
    )
    batch, objective = task.batch(range(len(items)))
    gradient = task.learner.gradient(batch, objective)
    losses = []
    for item in items:
        ids = torch.tensor([*item.prompt, *item.tokens])
        logs = policy.model(ids[None]).logits[0].log_softmax(-1)
        learned = torch.tensor([False] * len(item.prompt) + list(item.mask))
        losses.append(-logs[:-1].gather(1, ids[1:, None]).squeeze(1)[learned[1:]])
    expected = torch.cat(losses).mean()
    task.learner.optimizer.clear()
    expected.backward()
    plain = task.learner.optimizer.pop_gradient()
    torch.testing.assert_close(gradient, plain, rtol=0, atol=2e-6 * float(plain.norm()))
    figures = task.evaluate()[0]["figures"]
    assert figures["loss"]["value"] == pytest.approx(expected.item(), rel=1e-5)
    assert figures["perplexity"]["value"] == pytest.approx(math.exp(expected.item()), rel=1e-5)


def run(tmp_path: Path, name: str, rows: list[dict[str, Any]], *more: str, **how: Any) -> Path:
    model, data = tmp_path / "model", tmp_path / "talks.jsonl"
    if not model.exists():
        policy = tiny()
        policy.model.save_pretrained(model)
        policy.tokenizer.save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        f"output={tmp_path / name}",
        f"model.path={model}",
        f"sft.data={data}",
        "sft.held_out=0.25",
        "rewards=[]",
        "steps=6",
        "prompts_per_step=6",
        "optimizer.schedule=constant",
        "optimizer.learning_rate=1e-2",
        "evaluation.every_steps=2",
        "evaluation.keep_best=true",
        *more,
    ]
    return fine_tune(load("word-problems-sft", given), progress=how.pop("progress", Quiet()), **how)


def test_epochs_decide_the_steps_and_the_held_out_loss_falls(tmp_path: Path) -> None:
    folder = run(tmp_path, "out", ROWS, "sft.epochs=3")
    rows = list(read_lines(folder / "metrics.jsonl"))
    assert len(rows) == 9 and rows[-1]["epoch"] == 3  # 18 conversations, 6 a step
    losses = [r["figures"]["loss"]["value"] for r in read_lines(folder / "evaluations.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert load_policy(folder / "final") and (folder / "best").exists()


def test_training_stops_once_the_held_out_loss_no_longer_falls(tmp_path: Path) -> None:
    more = ("steps=60", "sft.patience=1", "optimizer.learning_rate=1.0", "evaluation.every_steps=1")
    folder = run(tmp_path, "out", ROWS, *more)
    evaluations = list(read_lines(folder / "evaluations.jsonl"))
    assert len(evaluations) < 20
    losses = [row["figures"]["loss"]["value"] for row in evaluations]
    assert losses[-1] >= min(losses[:-1])


@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapter"])
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, adapter: bool) -> None:
    more = ["model.adapter={rank=2, dropout=0.1}"] if adapter else []
    whole = run(tmp_path, "whole", ROWS, *more)
    run(tmp_path, "cut", ROWS, *more, "steps=4")
    cut = run(tmp_path, "cut", ROWS, *more, resume=True)
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    first, second = (load_file(folder / "final" / name) for folder in (whole, cut))
    assert all(torch.equal(first[key], second[key]) for key in first)
    best = [(folder / "best" / name).read_bytes() for folder in (whole, cut)]
    assert best[0] == best[1]


def test_a_run_does_not_go_on_with_other_rows(tmp_path: Path) -> None:
    run(tmp_path, "out", ROWS, "steps=2")
    nine = {"role": "assistant", "content": "9"}
    other = [{"messages": [row["messages"][0], nine]} for row in ROWS]
    with pytest.raises(UsageError, match="data: is not that of the run to resume"):
        run(tmp_path, "out", other, "steps=4", resume=True)
    run(tmp_path, "out", ROWS, "steps=4", resume=True)


def test_long_conversations_are_counted() -> None:
    policy = tiny()
    long = {"prompt": "one", "completion": "two " * 60}
    for how, left in (("drop", 1), ("cut", 2)):
        settings = SftSettings(data="x", too_long=how, max_tokens=40)
        found = encode_conversations([long, *ROWS[:1]], policy, settings)
        assert len(found.items) == left and sum(found.dropped.values()) == 1
        assert max(len(i.prompt) + len(i.tokens) for i in found.items) <= 40
    with pytest.raises(UsageError, match="sft.too_long = 'drop' or 'cut'"):
        encode_conversations([long], policy, SftSettings(data="x", too_long="refuse", max_tokens=9))


def test_microbatches_keep_the_weight_of_every_token() -> None:
    items = [
        Conversation(prompt=(1,), tokens=(2, 3, 4), mask=(True, False, True)),
        Conversation(prompt=(1, 2), tokens=(5,), mask=(True,)),
    ]
    batch = conversation_batch(items)
    assert batch.weight.tolist() == [
        [pytest.approx(1 / 3), 0, pytest.approx(1 / 3)],
        [pytest.approx(1 / 3), 0, 0],
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK[:2]}, "row 1: messages: needs at least one turn of the assistant"),
        ({"messages": TALK[2:]}, "must begin with a turn of the user"),
        ({"messages": "hello"}, "must be messages"),
        ({"prompt": "a", "completion": ""}, "completion: must be non-empty text"),
        ({"completion": "a"}, "prompt: is missing"),
        ({"question": "a"}, "must have the column messages"),
        ({"messages": [TALK[1], {**TALK[2], "content": None}]}, "must be messages with role and"),
        ({"prompt": TALK[:2], "completion": TALK[1:2]}, "completion: needs a turn of the assis"),
        ({"prompt": "a", "completion": TALK[2:]}, "completion: after a prompt of text, must be"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(tmp_path, "out", [row, *ROWS])
    assert not (tmp_path / "out").exists()

"""Preference losses and their gradients against TRL's DPOTrainer on equal tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.models import load_policy
from groupwise.prompts.preferences import read_comparisons
from groupwise.settings import OptimizerSettings, PreferenceSettings
from groupwise.training.offline.encoding import Encoded
from groupwise.training.offline.preference import PreferenceTask, preference_function
from groupwise.training.offline.reference import Reference
from groupwise.updates import TorchLearner
from small_runs import tiny
from trl_peer import require_trl

ROWS = [
    {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6 or seven"},
    {"prompt": "How many apples", "chosen": " are left? Four.", "rejected": " 9"},
    {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 4"},
]
"""Two pairs share their prompt and chosen answer, which TRL computes twice."""

SHARED = {
    "sigmoid": {"name": "logistic"},
    "hinge": {"name": "hinge"},
    "robust": {"name": "robust", "noise": 0.1},
    "sppo_hard": {"name": "sppo"},
    "apo_zero": {"name": "anchored"},
    "apo_down": {"name": "anchored", "direction": "down"},
}
"""Losses of TRL and ours of the same formula."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer on a policy that differs from its reference, and its batch."""
    trl = require_trl()
    import datasets

    folder = tmp_path_factory.mktemp("model")
    policy = tiny()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    made = trl.DPOTrainer(
        model=str(folder),
        args=trl.DPOConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=3,
            bf16=False,
            use_cpu=True,
            report_to=[],
            gradient_checkpointing=False,
            disable_tqdm=True,
            label_smoothing=0.1,
            loss_type=["robust"],
        ),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=policy.tokenizer,
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in made.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    made.model.train()
    made.ref_model.eval()
    rows = [made.train_dataset[i] for i in range(len(ROWS))]
    return made, rows, made.data_collator(rows)


def ours(peer: Any, tmp_path: Path, loss: dict[str, Any], nll: float) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the packed learner on TRL's tokens."""
    made, rows, _ = peer
    made.model.save_pretrained(tmp_path)
    made.processing_class.save_pretrained(tmp_path)
    learner = TorchLearner(load_policy(tmp_path), optimizer=OptimizerSettings())
    settings = PreferenceSettings(data="here", loss=loss, nll=nll)
    found = read_comparisons(ROWS).items
    tokens = {}
    for given, row in zip(ROWS, rows, strict=True):
        tokens[given["prompt"]] = tuple(row["prompt_ids"])
        for side in ("chosen", "rejected"):
            tokens[given[side]] = tuple(row[f"{side}_ids"])
    items = [
        Encoded(
            comparison=one,
            prompt=tokens[str(one.prompt.text)],
            answers=tuple(tokens[str(answer)] for answer in one.answers),
        )
        for one in found
    ]
    assert [len(item.answers) for item in items] == [3, 2], "equal answers are one row"
    task = PreferenceTask(
        learner=learner,
        function=preference_function(settings),
        settings=settings,
        items=items,
        held_out=(),
        reference=Reference(sums=tuple(torch.tensor(of_reference(made, i)) for i in items)),
    )
    batch, objective = task.batch(range(len(items)))
    names = [name for name, _ in learner.reader.named().items()]
    flat = learner.gradient(batch, objective)
    learner.begin(batch, objective)
    for part in learner.parts(batch, objective):
        learner.add(part)
    assert learner._pending is not None
    assert names == [name for name, _ in made.model.named_parameters()]
    return learner._pending.loss, flat


def of_reference(made: Any, item: Encoded) -> list[float]:
    """Σ log π_ref of every answer, by a plain forward pass of TRL's reference model."""
    sums = []
    for answer in item.answers:
        ids = torch.tensor([[*item.prompt, *answer]])
        with torch.no_grad():
            logs = made.ref_model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        own = logs[len(item.prompt) - 1 :].gather(-1, torch.tensor(answer)[:, None])
        sums.append(float(own.sum()))
    return sums


@pytest.mark.parametrize("theirs", SHARED)
def test_loss_and_gradient_equal_trls(peer: Any, theirs: str, tmp_path: Path) -> None:
    made, _, inputs = peer
    made.loss_types, made.loss_weights = [theirs], [1.0]
    made.model.zero_grad()
    loss = made._compute_loss(made.model, inputs, return_outputs=False)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in made.model.parameters()])
    got, gradient = ours(peer, tmp_path, SHARED[theirs], 0.0)
    assert got == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * float(expected.norm()))


def test_the_likelihood_term_is_a_mean_over_each_answer_where_trls_is_one_over_all_tokens(
    peer: Any, tmp_path: Path
) -> None:
    made, rows, inputs = peer
    made.loss_types, made.loss_weights = ["sigmoid", "sft"], [1.0, 1.0]
    theirs = made._compute_loss(made.model, inputs, return_outputs=False).item()
    made.loss_types, made.loss_weights = ["sigmoid"], [1.0]
    alone = made._compute_loss(made.model, inputs, return_outputs=False).item()
    with torch.no_grad():
        logs = made.model(input_ids=inputs["input_ids"]).logits[:3, :-1].log_softmax(-1)
    logp = logs.gather(-1, inputs["input_ids"][:3, 1:, None]).squeeze(-1)
    mask = inputs["completion_mask"][:3, 1:]
    each = -(logp * mask).sum(1) / mask.sum(1)
    got, _ = ours(peer, tmp_path, SHARED["sigmoid"], 1.0)
    assert got == pytest.approx(alone + each.mean().item(), rel=1e-6)
    pooled = -(logp * mask).sum() / mask.sum()
    assert theirs == pytest.approx(alone + pooled.item(), rel=1e-5)
    assert abs(each.mean() - pooled) > 1e-3

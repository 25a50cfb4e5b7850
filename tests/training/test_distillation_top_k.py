"""Distillation by whole distributions: the loss, its gradient in chunks, and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from groupwise.algorithms import bind
from groupwise.algorithms.losses.distillation import (
    DistillationObjective,
    generalized_jsd,
    top_outcomes,
)
from groupwise.config import load
from groupwise.errors import UsageError
from groupwise.models import Policy, load_policy
from groupwise.rundir.files import read_lines
from groupwise.settings import OptimizerSettings
from groupwise.training.prepare import prepare
from groupwise.training.trainer import Trainer
from groupwise.types import Batch
from groupwise.updates import TorchLearner
from groupwise.updates.chunked import of_logits
from groupwise.updates.logprobs import Projection
from groupwise.updates.top_k import top_k
from small_runs import Quiet, distilling, sharp, tiny
from trl_peer import require_trl

BETAS = [0.0, 0.3, 1.0]


def logits(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 2


def direct(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of two tensors of logits, from probabilities."""
    s, t = student.softmax(-1), teacher.softmax(-1)
    if beta == 0.0:
        return (t * (t / s).log()).sum(-1)
    if beta == 1.0:
        return (s * (s / t).log()).sum(-1)
    m = beta * t + (1 - beta) * s
    return (beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()).sum(-1)


def test_values_worked_by_hand() -> None:
    # S = (1/2, 1/2), T = (3/4, 1/4): KL(T‖S) = 3/4 log 3/2 + 1/4 log 1/2 = .304099 − .173287;
    # KL(S‖T) = 1/2 log 2/3 + 1/2 log 2 = −.202733 + .346574; M = (5/8, 3/8):
    # 1/2 (3/4 log 6/5 + 1/4 log 2/3) + 1/2 (1/2 log 4/5 + 1/2 log 4/3) = .017687 + .016135
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    found = [float(generalized_jsd(student, teacher, beta=b)) for b in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([0.130812, 0.033822, 0.143841], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_give_the_divergence_over_the_vocabulary(beta: float) -> None:
    student, teacher = logits(0, 5, 7), logits(1, 5, 7)
    ids = teacher.topk(7).indices
    found = generalized_jsd(top_outcomes(student, ids), top_outcomes(teacher, ids), beta=beta)
    torch.testing.assert_close(found, direct(student, teacher, beta), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_fewer_tokens_give_less_and_never_more(beta: float) -> None:
    student, teacher = logits(0, 5, 7), logits(1, 5, 7)
    found = []
    for k in (1, 3, 6, 7):
        ids = teacher.topk(k).indices
        own, other = top_outcomes(student, ids), top_outcomes(teacher, ids)
        torch.testing.assert_close(own.exp().sum(-1), torch.ones(5).double(), rtol=0, atol=1e-12)
        found.append(generalized_jsd(own, other, beta=beta))
    assert all(bool((a <= b + 1e-12).all()) for a, b in zip(found, found[1:], strict=False))
    assert (found[0] < found[-1]).all()


def test_the_ends_are_the_two_directions_of_the_kl() -> None:
    student, teacher = logits(0, 5, 7).log_softmax(-1), logits(1, 5, 7).log_softmax(-1)
    for beta, end in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
        near = generalized_jsd(student, teacher, beta=beta) / min(beta, 1 - beta)
        exact = generalized_jsd(student, teacher, beta=end)
        torch.testing.assert_close(near, exact, rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"beta = 1\.5: must lie in \[0, 1\]"):
        generalized_jsd(student, teacher, beta=1.5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [16, 32, 1000])
def test_the_gradient_in_chunks_is_that_of_all_logits(rows: int, softcap: float | None) -> None:
    hidden, weight, bias = logits(2, 50, 6) / 2, logits(3, 11, 6), logits(4, 11)
    teacher = logits(5, 50, 11)
    ids, scale = teacher.topk(4).indices, logits(6, 50)
    outcomes = top_outcomes(teacher, ids)
    given = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    head = Projection(
        weight=given[1],
        bias=given[2],
        softcap=softcap,
        temperature=0.7,
        chunk_bytes=rows * 4 * 11,
    )
    slices = []

    def divergence(z: torch.Tensor, part: slice) -> torch.Tensor:
        slices.append(part)
        return generalized_jsd(top_outcomes(z, ids[part]), outcomes[part], beta=0.5)

    found = of_logits(given[0], head, divergence)
    got = torch.autograd.grad((found * scale).sum(), given)
    assert len(set(map(str, slices))) == -(-50 // rows)
    whole = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    z = F.linear(whole[0], whole[1], whole[2])
    z = (z if softcap is None else (z / softcap).tanh() * softcap) / 0.7
    expected = generalized_jsd(top_outcomes(z, ids), outcomes, beta=0.5)
    wanted = torch.autograd.grad((expected * scale).sum(), whole)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def batch_of(policy: Policy) -> Batch:
    """Two prompts with two uneven answers each, of which one token was injected."""
    vocab = policy.model.config.vocab_size
    length = torch.tensor([3, 5, 4, 2])
    mask = torch.arange(5) < length[:, None]
    mask[1, 2] = False
    tokens = torch.randint(5, vocab, (4, 5), generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(4, 5)
    return Batch(
        prompts=(torch.tensor([5, 6, 7]), torch.tensor([8, 9])),
        group=torch.tensor([0, 0, 1, 1]),
        tokens=torch.where(torch.arange(5) < length[:, None], tokens, 0),
        length=length,
        mask=mask,
        advantage=zeros,
        weight=torch.where(mask, 1 / mask.sum(), 0.0),
    )


def learner(policy: Policy, **given: int) -> TorchLearner:
    return TorchLearner(
        policy, optimizer=OptimizerSettings(learning_rate=0.0), temperature=0.8, **given
    )


def logits_of(policy: Policy, batch: Batch) -> torch.Tensor:
    """Logits before every token that the policy wrote, sequence by sequence."""
    found = []
    for row in range(len(batch.tokens)):
        prompt, n = batch.prompts[int(batch.group[row])], int(batch.length[row])
        ids = torch.cat([prompt, batch.tokens[row, :n]])[None]
        own = policy.model(ids).logits[0, len(prompt) - 1 : -1] / 0.8
        found.append(own[batch.mask[row, :n]])
    return torch.cat(found)


@pytest.mark.parametrize(("k", "beta"), [(4, 1.0), (4, 0.5), (None, 0.0), (None, 0.5)])
def test_the_learners_gradient_is_that_of_the_divergence(k: int | None, beta: float) -> None:
    teacher, student = sharp(tiny(seed=1)), sharp(tiny(seed=2))
    batch = batch_of(student)
    vocab = student.model.config.vocab_size
    found = top_k(learner(teacher), batch, k=k or vocab, vocab=vocab)
    assert found.logp.shape[-1] == (k + 1 if k else vocab)
    columns = {"teacher_ids": found.ids, "teacher_logp": found.logp}
    objective = DistillationObjective(policy=bind("opd").objective, beta=beta)
    got = [
        learner(student, tokens_per_microbatch=size).gradient(
            replace(batch, columns=columns), objective
        )
        for size in (4, 8192)
    ]
    z, t = logits_of(student, batch), logits_of(teacher, batch).detach()
    if k:
        ids = t.topk(k).indices
        each = generalized_jsd(top_outcomes(z, ids), top_outcomes(t, ids), beta=beta)
    else:
        each = direct(z.double(), t.double(), beta).float()
    parameters = [p for p in student.model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(each.mean(), parameters)
    flat = torch.cat([g.flatten() for g in wanted])
    assert flat.norm() > 1e-3
    for gradient in got:
        torch.testing.assert_close(gradient, flat, rtol=1e-4, atol=1e-6)


def test_the_objective_takes_logits_in_any_pieces() -> None:
    student, teacher = logits(0, 7, 9), logits(1, 7, 9)
    batch, at = batch_of(tiny()), (torch.tensor([0, 0, 1, 2, 2, 3, 3]), torch.arange(7) % 2)
    ids, outcomes = torch.zeros(4, 5, 3, dtype=torch.int32), torch.zeros(4, 5, 4)
    ids[at] = teacher.topk(3).indices.int()
    outcomes[at] = top_outcomes(teacher, ids[at].long()).float()
    batch = replace(batch, columns={"teacher_ids": ids, "teacher_logp": outcomes})
    objective = DistillationObjective(policy=bind("opd").objective, beta=0.5)
    function = objective.on_logits(batch, *at)
    whole = function(student, slice(0, 7))
    parts = [function(student[i : i + 3], slice(i, min(i + 3, 7))) for i in range(0, 7, 3)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_to_trl(beta: float) -> None:
    require_trl()
    gkd = pytest.importorskip("trl.experimental.gkd", reason="this TRL has no GKDTrainer")
    tail = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    student, teacher = logits(7, 1, 6, 9).requires_grad_(), logits(8, 1, 6, 9)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=0.7, reduction="sum"
    )
    ids = teacher[0].topk(9).indices
    own = [top_outcomes(z[0] / 0.7, ids) for z in (student, teacher)]
    ours = generalized_jsd(*own, beta=beta).sum()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, student, retain_graph=True) for loss in (ours, theirs)),
        rtol=0,
        atol=1e-6,
    )
    # With the rest of the vocabulary as one more outcome, which TRL takes as 1 − Σ.
    ids = teacher[0].topk(3).indices
    logs = [(z[0] / 0.7).log_softmax(-1).gather(-1, ids) for z in (student, teacher)]
    yes = torch.ones(6, 3, dtype=torch.bool)
    (first, mask), (second, _) = (tail._add_tail_bucket(each, yes) for each in logs)
    theirs = tail._jsd_divergence(first, second, beta, mask).sum(-1)
    own = [top_outcomes(z[0] / 0.7, ids) for z in (student, teacher)]
    ours = generalized_jsd(*own, beta=beta)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss.sum(), student, retain_graph=True) for loss in (ours, theirs)),
        rtol=0,
        atol=1e-6,
    )


def settings(tmp_path: Path, *more: str) -> list[str]:
    return distilling(tmp_path, "distillation.top_k=5", *more)


def test_a_run_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    vocab = tiny().model.config.vocab_size
    more = ["steps=10", "optimizer.learning_rate=3e-3", "prompts_per_step=8"]
    given = settings(tmp_path, *more, f"distillation.top_k={vocab}", "optimizer.warmup_steps=0")
    prepare(load("word-problems-distil", given), progress=Quiet()).trainer.run()
    losses = [row["loss"] for row in read_lines(tmp_path / "out" / "metrics.jsonl")]
    # Nothing but the divergence is in the loss.
    assert losses[-1] < 0.9 * losses[0] < 0.9


@pytest.mark.parametrize("more", [["distillation.top_k=5"], ["distillation.top_k=null"]])
def test_the_distance_from_the_teacher_is_that_of_the_sampled_tokens(
    tmp_path: Path, more: list[str]
) -> None:
    given = settings(tmp_path, "steps=1", *more)
    trainer = prepare(load("word-problems-distil", given), progress=Quiet()).trainer
    teacher, student = (load_policy(tmp_path / name).model for name in ("teacher", "student"))
    result = trainer.step()
    gaps = []
    for group in result.scored.groups:
        for completion in group.completions:
            tokens = torch.tensor([*group.prompt_tokens, *completion.tokens])
            start = len(group.prompt_tokens)
            with torch.no_grad():
                own, other = (
                    model(tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
                    for model in (student, teacher)
                )
            gaps.append((own - other).gather(-1, tokens[start:, None]))
    wanted = float(torch.cat(gaps).mean())
    assert result.metrics["teacher_kl"] == pytest.approx(wanted, abs=1e-5)


def test_sampled_tokens_are_compared_among_those_that_could_be_drawn(tmp_path: Path) -> None:
    """Both ways of distillation measure the same distance under truncated sampling."""
    found = []
    for name, k in (("whole", "5"), ("sampled", "null")):
        given = settings(tmp_path, "steps=1", "sampling.top_p=0.5", f"distillation.top_k={k}")
        given.append(f"output={tmp_path / name}")
        trainer = prepare(load("word-problems-distil", given), progress=Quiet()).trainer
        found.append(trainer.step().metrics["teacher_kl"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_teacher_with_fewer_rows_in_its_head_needs_an_outcome_for_the_others(
    tmp_path: Path,
) -> None:
    """Heads of models with one tokenizer are padded to different sizes."""
    vocab = tiny().model.config.vocab_size

    def trainer(k: int) -> Trainer:
        given = settings(tmp_path, "steps=1", f"distillation.top_k={k}")
        wide = tiny(seed=2)
        wide.model.resize_token_embeddings(vocab + 8)
        wide.model.save_pretrained(tmp_path / "student")
        return prepare(load("word-problems-distil", given), progress=Quiet()).trainer

    for k in (vocab, vocab + 3):
        with pytest.raises(UsageError, match=f"the teacher has {vocab} tokens .* fewer than"):
            trainer(k)
    assert trainer(vocab - 1).step().metrics["loss"] > 0


def test_a_cluster_is_refused() -> None:
    with pytest.raises(UsageError, match=r"distillation.top_k = 5: cannot be combined"):
        load("word-problems-distil", ["distillation.top_k=5", "cluster={}"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("distillation.top_k=100000", "distillation.top_k = 100000: the policy has .* tokens"),
        ("distillation.top_k=0", "distillation.top_k"),
        ("distillation.beta=1.5", "distillation.beta"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(load("word-problems-distil", settings(tmp_path, "steps=1", more)), progress=Quiet())


def test_a_beta_without_distributions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"distillation.beta = 0.5: .* set distillation.top_k"):
        load("word-problems-distil", ["distillation.beta=0.5"])

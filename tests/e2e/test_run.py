"""The loop as a whole: what an on-policy step is, and what each setting of it does."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from groupwise import train
from groupwise.config import build
from groupwise.errors import RunError, UsageError
from groupwise.training.prepare import Prepared
from groupwise.training.run import Run
from groupwise.training.stages.sft import save
from groupwise.types import Batch, Outputs
from groupwise.updates import assemble, sequences
from small_runs import Quiet, letters, prepared, timeless, tiny


class Watched:
    """An objective that notes what it was called with and what it said."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.calls = objective, []
        self.needs, self.granularity = objective.needs, objective.granularity
        self.skips_zero_advantage = objective.skips_zero_advantage

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        losses = self.objective(outputs, batch)
        self.calls.append((outputs["logp"].detach().clone(), batch, losses.detach().clone()))
        return losses


def watched(run: Prepared, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Let every update of a run go through an objective that takes notes."""
    notes = Watched(run.trainer.algorithm.objective)
    update = run.trainer.policy.update
    monkeypatch.setattr(run.trainer.policy, "update", lambda batch, _: update(batch, notes))
    return notes


@pytest.mark.parametrize("algorithm", ["softrank", "grpo", "dapo"])
def test_an_on_policy_step_has_a_ratio_of_exactly_1(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ratio · A with ratio = 1 is A itself, to the last bit, whatever the clip."""
    run = prepared(tmp_path, f"algorithm.name={algorithm}")
    notes = watched(run, monkeypatch)
    for _ in range(3):
        run.trainer.advance()
    assert notes.calls
    for _, batch, losses in notes.calls:
        assert batch.old_logp is None
        assert torch.equal(losses[batch.mask], -batch.advantage[batch.mask])


def test_sampler_and_learner_agree(tmp_path: Path) -> None:
    run = prepared(tmp_path, "optimizer.learning_rate=3e-2")
    for _ in range(4):
        metrics = run.trainer.step().metrics
        assert 0 <= metrics["sampler_gap_max"] < 1e-4


def test_a_learning_rate_of_0_moves_nothing(tmp_path: Path) -> None:
    """The same prompts, weights and random numbers give the same metrics, step after step."""
    run = prepared(tmp_path, "optimizer.learning_rate=0.0", "data.limit=3")
    before = {n: w.clone() for n, w in run.trainer.policy.publish().named.items()}
    first = run.trainer.step().metrics
    run.trainer.source.order.restore({"count": 3, "seed": 0, "position": 0})
    second = run.trainer.step().metrics
    for name, weight in run.trainer.policy.publish().named.items():
        assert torch.equal(weight, before[name]), name
    assert first["grad_norm"] > 0
    for name, value in first.items():
        if not name.startswith(("seconds", "tokens_per_second", "memory")):
            assert second[name] == value or math.isnan(value), name


def test_a_learning_rate_above_0_moves_every_parameter(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    before = {n: w.clone() for n, w in run.trainer.policy.publish().named.items()}
    run.trainer.step()
    still = [n for n, w in run.trainer.policy.publish().named.items() if torch.equal(w, before[n])]
    assert still == []


def test_dynamic_sampling_draws_until_the_batch_is_full(tmp_path: Path) -> None:
    """Prompts of even number have answers that are all equal; they are drawn and left out."""

    def half(text: str, row: int) -> float:
        return letters(text) if row % 2 else 1.0

    rows = [{"prompt": f"{n} and {n}?", "row": n} for n in range(12)]
    run = prepared(
        tmp_path, "algorithm.name=dapo", "group_size=8", functions=[half], prompts=as_prompts(rows)
    )
    for step in range(3):
        scored = run.trainer.source.take(3, step=step)
        assert len(scored.groups) == 3
        assert all(group.prompt.columns["row"] % 2 for group in scored.groups)
        assert scored.drawn >= 3
    assert scored.drawn + run.trainer.source.order.state()["position"] > 9


def test_dynamic_sampling_stops_at_its_limit(tmp_path: Path) -> None:
    run = prepared(
        tmp_path, "algorithm.name=dapo", "algorithm.max_draws=4", functions=[lambda text: 1.0]
    )
    with pytest.raises(RunError, match=r"kept none of 12 groups in 4 rounds"):
        run.trainer.source.take(3, step=0)


def as_prompts(rows: list[dict[str, Any]]) -> Any:
    from groupwise.prompts.sources import load_prompts

    return load_prompts(rows)


def test_several_optimizer_steps_use_the_log_probabilities_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """μ = 2 epochs of 3 minibatches: six steps against the policy that wrote the answers."""
    run = prepared(tmp_path, "update.epochs=2", "update.minibatches=3", "algorithm.name=grpo")
    notes = watched(run, monkeypatch)
    result = run.trainer.step()
    scored, metrics = result.scored, result.metrics
    assert run.trainer.policy.version == 6
    whole = sequences(scored)
    first_logp, first_batch, _ = notes.calls[0]
    assert torch.allclose(first_logp, first_batch.old_logp, atol=1e-6)
    moved = 0.0
    for logp, batch, _ in notes.calls:
        assert batch.old_logp is not None and batch.sampler_logp is not None
        gap = (batch.old_logp - batch.sampler_logp)[batch.mask].abs()
        assert float(gap.max()) < 1e-4
        moved = max(moved, float((logp - batch.old_logp)[batch.mask].abs().max()))
    assert moved > 1e-3 and metrics["policy_kl"] > 0
    assert len(whole.tokens) == 12


def test_minibatches_hold_every_completion_once_per_epoch(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    scored = run.trainer.source.take(3, step=0)
    batch = sequences(scored)
    steps = assemble(
        batch,
        torch.ones(3, 4),
        run.trainer.algorithm.weighting,
        minibatches=3,
        epochs=2,
        seed=(0, 0),
    )
    assert [len(step.tokens) for step in steps] == [4] * 6
    for epoch in (steps[:3], steps[3:]):
        assert sum(int(step.length.sum()) for step in epoch) == int(batch.length.sum())


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_is_against_a_frozen_reference(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "k3" if where == "loss" else "k1"
    run = prepared(
        tmp_path,
        "algorithm.name=grpo",
        f'algorithm.divergence={{name="{name}", coefficient=0.1, in="{where}"}}',
    )
    notes = watched(run, monkeypatch)
    start = {n: w.clone() for n, w in run.trainer.policy.frozen.model.named_parameters()}
    first = run.trainer.step().metrics
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    for _ in range(4):
        last = run.trainer.step().metrics
    assert last["kl"] > 1e-3
    for n, w in run.trainer.policy.frozen.model.named_parameters():
        assert torch.equal(w, start[n])
    _, batch, losses = notes.calls[-1]
    plain = -batch.advantage  # KL in the reward is in the advantage already
    assert torch.allclose(losses[batch.mask], plain[batch.mask]) is (where == "reward")


def test_the_reference_of_kl_in_the_reward_changes_the_advantage(tmp_path: Path) -> None:
    """With K·β·KL subtracted the same rewards no longer give the same advantages."""
    more = ("algorithm.name=rloo", "steps=3")
    kl = 'algorithm.divergence={name="k1", coefficient=1.0, in="reward"}'
    plain = prepared(tmp_path / "plain", *more)
    held = prepared(tmp_path / "held", *more, kl)
    for run in (plain, held):
        run.trainer.advance()
    first, second = plain.trainer.step().advantages, held.trainer.step().advantages
    assert first.shape[:2] == second.shape[:2]
    assert not torch.allclose(first, second if second.ndim == 2 else second[..., 0])


def test_completions_that_cannot_be_judged_leave_the_statistics(tmp_path: Path) -> None:
    """Sample 1 raises, sample 0 has no verdict; 2 and 3 earn 1 and 3."""

    def sometimes(group: Any) -> list[float | None]:
        assert len(group) == 3  # a sample that is lost already is not judged again
        return [None, 1.0, 3.0]

    def raising(text: str, row: int) -> float:
        calls.append(text)
        if len(calls) % 4 == 2:
            raise ValueError("out of luck")
        return 0.0

    calls: list[str] = []
    rows = [{"prompt": f"{n}?", "row": n} for n in range(6)]
    run = prepared(
        tmp_path,
        "algorithm.name=grpo@verl",
        functions=[raising, sometimes],
        prompts=as_prompts(rows),
    )
    result = run.trainer.step()
    scored, advantages, metrics = result.scored, result.advantages, result.metrics
    assert scored.scores.valid.tolist() == [[False, False, True, True]] * 3
    assert scored.scores.total[:, 2:].tolist() == [[1.0, 3.0]] * 3
    assert metrics["valid_share"] == pytest.approx(0.5)
    assert torch.all(advantages[~scored.scores.valid] == 0)
    # The mean of 1 and 3 is 2, their standard deviation √2 with ddof 1: ∓1/√2.
    assert advantages[:, 2:].flatten().tolist() == pytest.approx([-0.70711, 0.70711] * 3, abs=1e-4)


# -- the Python face -------------------------------------------------------------------------------


def short(
    tmp_path: Path,
    reward: Any,
    prompts: Any = ("1+1?", "2+2?"),
    progress: Quiet | None = None,
    **settings: Any,
) -> Run:
    policy = tiny()
    given = {
        "steps": 2,
        "output": str(tmp_path / "run"),
        "prompts_per_step": 2,
        "group_size": 2,
        "sampling": {"max_tokens": 6},
        "threads": 1,
        **settings,
    }
    return train(
        policy.model,
        list(prompts),
        reward,
        tokenizer=policy.tokenizer,
        progress=progress or Quiet(),
        **given,
    )


def test_train_returns_the_model_and_its_metrics(tmp_path: Path) -> None:
    run = short(tmp_path, letters)
    assert len(run.metrics) == 2 and run.metrics[0]["reward"] > 0
    assert (run.folder / "final" / "model.safetensors").exists()
    card = (run.folder / "final" / "README.md").read_text(encoding="utf-8")
    assert "Qwen2ForCausalLM, trained on prompts at hand" in card
    assert "Not evaluated" in card and "Python functions" in card
    assert run.report().exists()


def test_a_run_shows_itself_in_one_line(tmp_path: Path) -> None:
    run = Run(
        config=build({"steps": 3, "algorithm": {"name": "grpo"}}),
        folder=Path("runs/mine"),
        model=object(),
        tokenizer=cast(Any, None),
    )
    assert repr(run) == "Run(grpo, 3 steps, in 'runs/mine')"
    with pytest.raises(UsageError, match="reward = 3: must be a function"):
        train("bundled", "word_problems", cast(Any, 3), output=str(tmp_path / "run"))


def test_a_reward_in_trls_form_sees_text_or_messages(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
        seen.append((completions, answer, columns))
        return [None, *(float(len(str(c))) for c in completions[1:])]

    rows = [{"prompt": "1+1?", "answer": "2", "level": 3}]
    short(tmp_path / "chat", reward, prompts=rows)
    completions, answer, columns = seen[0]
    assert [list(m[0]) for m in completions] == [["role", "content"]] * 2
    assert answer == ["2", "2"] and columns["level"] == [3, 3]
    seen.clear()
    run = short(tmp_path / "plain", reward, prompts=rows, data={"chat": False})
    assert all(isinstance(text, str) for text in seen[0][0])
    assert run.metrics[0]["valid_share"] == 0.5


def test_an_async_reward_in_trls_form(tmp_path: Path) -> None:
    async def reward(completions: list[Any], **_: Any) -> list[float]:
        await asyncio.sleep(0.001)
        return [float(i) for i, _ in enumerate(completions)]

    run = short(tmp_path, reward)
    assert run.metrics[0]["reward"] == pytest.approx(0.5)


def test_rewards_of_a_recipe_keep_their_weights_labels_and_combination(tmp_path: Path) -> None:
    run = prepared(
        tmp_path,
        'rewards=[{name="exact_answer", label="right"}, '
        '{name="token_repetition", ngram=1, optional=true, weight=0.5}]',
        'combine="product"',
        functions=[],
    )
    composition = run.scorer.composition
    assert [part.label for part in composition.parts] == ["right", "token_repetition"]
    assert [part.optional for part in composition.parts] == [False, True]
    assert "product" in repr(composition.combination)


# -- common random numbers, and resuming -----------------------------------------------------------


def test_two_algorithms_see_the_same_first_batch(tmp_path: Path) -> None:
    first, second = (
        prepared(tmp_path / name, f"algorithm.name={name}").trainer.source.take(3, step=0)
        for name in ("softrank", "grpo")
    )
    assert [g.prompt.id for g in first.groups] == [g.prompt.id for g in second.groups]
    assert [c.tokens for g in first.groups for c in g.completions] == [
        c.tokens for g in second.groups for c in g.completions
    ]


def trained(output: Path, *more: str, resume: bool = False) -> dict[str, Tensor]:
    """Run to the end and return the weights."""
    run = prepared(output, "logging.rollouts_every=1", *more, resume=resume)
    try:
        run.trainer.run()
    finally:
        run.close()
    return {n: w.detach().clone() for n, w in run.trainer.policy.publish().named.items()}


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("algorithm.name=dapo", "group_size=6"),
        ("update.epochs=2", "update.minibatches=3", "optimizer.schedule=cosine"),
        ('algorithm.divergence={name="k3", coefficient=0.1, in="loss"}',),
        ("model.adapter={rank=2, dropout=0.3}",),
        ("model.dtype=bfloat16",),
    ],
    ids=["plain", "dynamic sampling", "several steps", "reference", "adapter", "bfloat16"],
)
def test_a_resumed_run_equals_the_unbroken_one(more: tuple[str, ...], tmp_path: Path) -> None:
    """Weights and rollouts to the bit; the break comes between two checkpoints."""
    more = ("checkpoint.every_steps=3", "steps=7", *more)
    if any(m.startswith("model.") for m in more):
        save(tiny(), tmp_path / "model")
        more = (*more, f"model.path={tmp_path / 'model'}")
    whole = trained(tmp_path / "whole", *more)
    broken = prepared(tmp_path / "parts", "logging.rollouts_every=1", *more)
    for _ in range(5):
        broken.trainer.advance()
        if broken.trainer.done == 3:
            broken.trainer.save()
    broken.close()
    parts = trained(tmp_path / "parts", *more, resume=True)
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    assert [row["step"] for row in timeless(tmp_path / "parts")] == list(range(1, 8))
    for step in range(1, 8):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_begins_where_its_warm_up_ended_and_resumes_with_that_reference(
    dtype: str, tmp_path: Path
) -> None:
    """KL is against the warmed-up model, in the run and when it is resumed."""
    save(tiny(), tmp_path / "model")
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "answer": "{n} it is"}}\n' for n in range(9)))
    more = (
        f"model.path={tmp_path / 'model'}",
        f"model.dtype={dtype}",
        f"data.train={file}",
        "data.answer_column=answer",
        'warmup={steps=6, batch_size=4, learning_rate=1e-2, rise_steps=1, column="answer"}',
        "optimizer.learning_rate=1e-2",
        "sampling.max_tokens=12",
        "checkpoint.every_steps=2",
        'algorithm.divergence={name="k3", coefficient=0.1, in="loss"}',
    )
    first = prepared(tmp_path / "run", *more)
    warmed = {n: w.clone() for n, w in first.trainer.policy.publish().named.items()}
    assert sum(not torch.equal(w, p) for (n, w), p in zip(
        warmed.items(), tiny().model.to(getattr(torch, dtype)).parameters(), strict=True
    )) == len(warmed)  # fmt: skip
    frozen = dict(first.trainer.policy.frozen.model.named_parameters())
    assert all(torch.equal(w, frozen[n]) for n, w in warmed.items())
    first.trainer.advance()
    moved = [
        n for n, w in first.trainer.policy.publish().named.items() if not torch.equal(w, warmed[n])
    ]
    assert moved, "the optimizer of the warm-up must not keep the gradients"
    first.trainer.advance()
    first.trainer.save(wait=True)
    first.close()
    again = prepared(tmp_path / "run", *more, resume=True)
    again_frozen = dict(again.trainer.policy.frozen.model.named_parameters())
    assert all(torch.equal(w, again_frozen[n]) for n, w in warmed.items())
    assert again.trainer.done == 2
    again.close()

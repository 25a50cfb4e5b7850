"""Gradients by inner products: the same as autograd's, and the right figures made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from groupwise.algorithms import bind
from groupwise.algorithms.advantages import advantage_inputs
from groupwise.algorithms.losses import FunctionObjective
from groupwise.cli import main
from groupwise.errors import UsageError
from groupwise.experiments import gradients
from groupwise.experiments.gradients import InnerProducts, coefficients, inner_products
from groupwise.experiments.signal_to_noise import signal
from groupwise.experiments.variance import (
    BINS,
    Variance,
    _measured,
    _reference,
    _within,
    variance,
)
from groupwise.experiments.variance_view import variance_table, write_variance_png
from groupwise.models import save_policy
from groupwise.training.prepare import prepare
from groupwise.updates import assemble, sequences
from small_runs import Quiet, config, letters, settings, tiny

ROWS = ("softrank", "grpo", "dr_grpo", "dapo", "rloo", "gspo", "kimi", "cispo", "reinforce++")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """A tiny model with its learner, and three groups of four that it wrote."""
    folder = tmp_path_factory.mktemp("run")
    made = prepare(
        config(folder / "run"),
        progress=Quiet(),
        policy=tiny(),
        functions=[letters],
        eval_prompts=[],
    )
    yield made.trainer.policy, made.trainer.source.take(3, step=0)
    made.close()


def by_autograd(learner, scored, coefficient):
    """Σ_i c_i ∇ log π(completion i) of every group, from plain forward passes of whole texts."""
    model = learner.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for row, group in enumerate(scored.groups):
        total = torch.zeros(())
        for c, completion in zip(coefficient[row], group.completions, strict=True):
            prompt, answer = list(group.prompt_tokens), list(completion.tokens)
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
            total = total + float(c) * logp.sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        found.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        )
    return torch.stack(found)


def group_gram(found, coefficient):
    spread = np.zeros((len(coefficient), coefficient.size))
    for row, values in enumerate(coefficient):
        spread[row, row * len(values) : (row + 1) * len(values)] = values
    return spread @ found.scores @ spread.T, spread @ found.others


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_groups_have_the_gradients_of_autograd(rollouts, name):
    learner, scored = rollouts
    coefficient = coefficients(bind(name), scored)
    direct = by_autograd(learner, scored, coefficient)
    assert direct.norm() > 0
    other = torch.randn(direct.shape[1], generator=torch.Generator().manual_seed(1))
    found = inner_products(learner, sequences(scored), others=[other])
    gram, pull = group_gram(found, coefficient)
    assert found.exact and found.parameters == direct.shape[1]
    scale = float(direct.norm() ** 2)
    np.testing.assert_allclose(gram, (direct @ direct.T).numpy(), atol=1e-5 * scale)
    np.testing.assert_allclose(
        pull[:, 0], (direct @ other).numpy(), atol=1e-4 * float(direct.norm() * other.norm())
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_mean_over_groups_is_the_gradient_of_the_step(rollouts, name):
    learner, scored = rollouts
    algorithm = bind(name, {"filter": {"name": "all"}})
    batch = sequences(scored)
    kl = torch.zeros(*scored.scores.total.shape, batch.tokens.shape[1])
    [step] = assemble(
        batch,
        algorithm.advantage({**advantage_inputs(scored, batch), "kl": kl}),
        algorithm.weighting,
    )
    # The policy as its own reference: the learner's log-probabilities, as the loss sees them.
    step = replace(step, ref_logp=learner.evaluate(step, {"logp"})["logp"])
    uphill = -learner.gradient(step, algorithm.objective)
    coefficient = coefficients(algorithm, scored)
    found = inner_products(learner, batch, others=[uphill])
    gram, pull = group_gram(found, coefficient)
    size = float(uphill.norm() ** 2)
    assert size > 0
    assert gram.sum() / len(gram) ** 2 == pytest.approx(size, rel=1e-3)
    assert pull.mean() == pytest.approx(size, rel=1e-3)


def test_the_better_completion_is_pushed_up(rollouts):
    """RLOO: advantage r − mean of the 3 others = (r − mean) · 4/3, of weight 1/4."""
    rewards = rollouts[1].scores.total.double().numpy()
    wanted = (rewards - rewards.mean(1, keepdims=True)) / 3
    np.testing.assert_allclose(coefficients(bind("rloo"), rollouts[1]), wanted, atol=1e-6)


def test_the_reference_goes_uphill_on_steps_of_its_own(rollouts):
    learner, scored = rollouts
    taken = []

    class Source:
        def take(self, count, *, step):
            taken.append(step)
            return scored

    algorithm = bind("rloo")
    halves = _reference(learner, Source(), algorithm, 3, 5, 3, lambda stage: None)
    assert taken == [5, 6, 7], "steps 0 to 4 were those measured"
    one = by_autograd(learner, scored, coefficients(algorithm, scored)).mean(0)
    for half, steps in zip(halves, (2, 1), strict=True):
        torch.testing.assert_close(half, steps * one, atol=1e-5 * float(one.norm()), rtol=1e-3)


def test_one_text_after_two_prompts_has_two_gradients(rollouts):
    learner, scored = rollouts
    batch = sequences(scored).rows(torch.tensor([0, 4]))
    tokens = batch.tokens[:1].expand(2, -1)
    twins = replace(batch, tokens=tokens, mask=batch.mask[:1].expand(2, -1),
                    length=batch.length[:1].expand(2))  # fmt: skip
    gram = inner_products(learner, twins).scores
    one, other = (
        learner.gradient(
            replace(twins.rows(torch.tensor([n])), weight=twins.mask[:1].float()), LOGP
        )
        for n in (0, 1)
    )
    assert gram[0, 1] == pytest.approx(float(one @ other), rel=1e-4)
    assert gram[1, 1] == pytest.approx(float(other @ other), rel=1e-4)
    assert gram[0, 0] != pytest.approx(gram[1, 1], rel=5e-4)


LOGP = FunctionObjective(loss=lambda outputs, batch: outputs["logp"])


def test_made_up_gradients_by_hand(rollouts):
    """The s of 12 completions are unit vectors; the halves of the reference are 3 s_0 and 4 s_5,
    which add up to 5 times a unit vector u: u · s_0 = .6 and u · s_5 = .8. Group p takes Σ c s:
    squares 4, 4 and 5, which are at right angles, and pulls .6, .8 and 0."""
    c = np.array([[1.0, 1, 1, 1], [1, 1, 1, 1], [-1, 2, 0, 0]])
    others = np.zeros((12, 2))
    others[0, 0], others[5, 1] = 3, 4
    found = InnerProducts(
        scores=np.eye(12), others=others, among=np.diag([9.0, 16.0]), parameters=12, exact=True
    )
    judged = {"down": [-c] * 4, "up": [c, 2 * c, 4 * c, c / 2]}
    told = _measured(judged, {}, rollouts[1], found, step=2, batches=5)
    assert [e.name for e in told.estimators] == ["up", "down"], "best first"
    assert (told.agreement, told.reference) == (0.0, 5 * 2 * 4)
    up = told.estimators[0]
    assert (up.constant, up.shift, up.scale) == (2.0, 3.0, 0.5)
    whole = up.whole
    assert whole.cosine.value == pytest.approx(1.4 / math.sqrt(13))
    # No two groups agree: 0 is the squared norm, and (13 − 13/3)/2 the trace, halved by the step.
    assert (whole.squared_norm, whole.trace) == (0.0, pytest.approx(13 / 3))
    assert whole.step_cosine.value == pytest.approx(1.4 / 3 / math.sqrt(13 / 3 / 2))
    assert (whole.positive, whole.negative, whole.nonzero) == pytest.approx(
        (9 / 12, 1 / 12, 10 / 12)
    )


def test_every_pass_rate_is_in_one_bin():
    rates = {"0": 0.0, "to 1/4": 0.25, "to 1/2": 0.5, "to 3/4": 0.75, "below 1": 0.9, "1": 1.0}
    for name, rate in rates.items():
        inside = [label for label, low, high in BINS if _within(np.array([rate]), low, high)[0]]
        assert inside == [name]


def test_measuring_moves_nothing(rollouts):
    learner, scored = rollouts
    before = [p.detach().clone() for p in learner.model.parameters()]
    inner_products(learner, sequences(scored))
    assert all(map(torch.equal, before, learner.model.parameters()))
    assert all(p.grad is None for p in learner.model.parameters())


def test_gradients_too_long_to_keep_are_projected(rollouts, monkeypatch):
    learner, scored = rollouts
    batch = sequences(scored)
    whole = inner_products(learner, batch)
    # Entries that all have one sign: without random ones their sums would grow, not their squares.
    ones = torch.ones(whole.parameters)
    monkeypatch.setattr(gradients, "MEMORY_BYTES", 4 * 13 * 4000)
    less = inner_products(learner, batch, others=[ones])
    assert less.among[0, 0] / whole.parameters == pytest.approx(1.0, abs=5 * 0.0224)
    assert whole.exact and not less.exact and less.parameters == whole.parameters
    norms = np.sqrt(np.diag(whole.scores))
    off = (less.scores - whole.scores) / np.outer(norms, norms)
    # √(2 / 4000) = .022 is one standard deviation.
    assert 0 < np.abs(off).max() < 5 * 0.0224


def test_tokens_of_different_weight_are_refused(rollouts):
    algorithm = bind("reinforce++", {"advantage": {"gamma": 0.5}})
    with pytest.raises(UsageError, match="weights the tokens of a completion differently"):
        coefficients(algorithm, rollouts[1])


def test_signal_and_noise_by_hand():
    # Vectors 3, 5, 7 in one dimension: mean 5, variance 4; pairs (15 + 21 + 35)/3 = 71/3.
    g = np.array([[3.0], [5.0], [7.0]])
    squared_norm, trace, ratio, cosine, step_cosine = signal(g @ g.T, -g[:, 0], step=2)
    assert squared_norm == pytest.approx(71 / 3)
    assert trace == pytest.approx(4.0)
    assert ratio.value == pytest.approx(2 * (71 / 3) / 4)
    assert cosine.value == pytest.approx(-1.0)
    assert step_cosine.value == pytest.approx(-5 / math.sqrt(71 / 3 + 2))
    # Without 3, 5 and 7 in turn: pairs 35, 21, 15, variances 2, 8, 2, ratios 35, 5.25, 15, whose
    # squares about their mean 221/12 add up to 460.79; times (n − 1)/n, and t(2) = 4.303.
    reach = 4.302653 * math.sqrt(2 / 3 * sum((x - 221 / 12) ** 2 for x in (35, 5.25, 15)))
    assert ratio.high - ratio.value == pytest.approx(reach, rel=1e-6)


def test_noise_without_signal_has_none():
    g = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    squared_norm, trace, ratio, *_ = signal(g @ g.T, g[:, 0], step=1)
    assert squared_norm == pytest.approx(-1 / 3) and trace == pytest.approx(4 / 3)
    assert ratio.low < 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Variance:
    given = config(tmp_path_factory.mktemp("v"), "prompts_per_step=4")
    return variance(given, prompts=8, batches=4, policy=tiny(), functions=[letters])


def test_every_advantage_is_measured_on_the_same_rollouts(measured):
    rows = {row.name: row for row in measured.estimators}
    # One k is 4, which has to be less than the group; others need a critic, a teacher,
    # rewards of steps or a token reward model. Reasons are shown.
    assert len(rows) > 20 and set(measured.left_out) == {
        "distilled",
        "gae",
        "pass_at_k_gradient",
        "step_zscore",
        "token_cloning",
    }
    assert "needs values" in measured.left_out["gae"]
    assert "group = 4" in measured.left_out["pass_at_k_gradient"]
    assert {row.whole.groups for row in measured.estimators} == {8}
    assert all(sum(s.groups for s in r.by_pass_rate.values()) == 8 for r in rows.values())
    assert measured.reference == 4 * 4 * 4 and -1 <= measured.agreement <= 1
    # What the formulas say of a constant reward, of r + 1 and of 2r.
    assert rows["zscore"].constant == 0.0 and rows["leave_one_out"].constant == 0.0
    assert rows["raw"].constant > 0.1 and rows["softrank"].constant > 0.01
    assert rows["centered"].shift < 1e-5 and rows["raw"].shift > 0.1
    assert rows["softrank"].shift > 0.01
    assert rows["zscore"].scale == pytest.approx(1.0, abs=1e-4)
    assert rows["centered"].scale == pytest.approx(2.0, abs=1e-4)
    # leave_one_out is centered times G/(G − 1) = 4/3: the same direction, 16/9 of the square.
    one, two = rows["leave_one_out"].whole, rows["centered"].whole
    assert one.trace == pytest.approx(two.trace * 16 / 9, rel=1e-4)
    assert one.cosine.value == pytest.approx(two.cosine.value, rel=1e-4)


def test_figures_are_shown_and_kept(measured, tmp_path):
    console = Console(width=80, record=True, file=Path("/dev/null").open("w"))
    console.print(variance_table(measured))
    shown = console.export_text()
    assert "softrank_interpolated" in shown and "…" not in shown
    assert json.loads(json.dumps(measured.as_dict(), allow_nan=False))["step"] == 4
    assert write_variance_png(measured, tmp_path / "v.png").stat().st_size > 10_000
    with pytest.raises(UsageError, match=r"\.png, \.svg or \.pdf"):
        write_variance_png(measured, tmp_path / "v.jpg")


def test_rows_of_the_table_keep_their_own_settings(tmp_path):
    small = config(tmp_path, "prompts_per_step=2")
    given = {"policy": tiny(), "functions": [letters], "prompts": 4, "batches": 2}
    found = variance(small, advantages=(), algorithms=("grpo", "dr_grpo"), **given)
    assert {row.name for row in found.estimators} == {"grpo", "dr_grpo"}
    with pytest.raises(UsageError, match="did you mean"):
        variance(small, advantages=("zscor",), **given)
    with pytest.raises(UsageError, match="--batches"):
        variance(small, **{**given, "batches": 1})


def test_rewards_that_teach_nothing_are_shown_as_such(tmp_path):
    small = config(tmp_path, "prompts_per_step=2")
    given = {"policy": tiny(), "functions": [lambda text: 0.0], "prompts": 2, "batches": 2}
    found = variance(small, advantages=("zscore", "raw"), **given)
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert [row["signal_to_noise"]["value"] for row in told["estimators"]] == [None, None]
    assert found.pass_rate == 0.0 and math.isnan(found.agreement)
    console = Console(width=80, record=True, file=Path("/dev/null").open("w"))
    console.print(variance_table(found))
    assert "nan" not in console.export_text()
    with pytest.raises(UsageError, match="nothing to plot"):
        write_variance_png(found, tmp_path / "v.png")


def test_the_command_prints_and_writes(tmp_path, capsys):
    save_policy(tiny(), tmp_path / "model")
    file = tmp_path / "v.json"
    sizes = [f"--set={setting}" for setting in settings(tmp_path / "run", "prompts_per_step=2")]
    chosen = ["--advantages", "zscore, raw", "--prompts=4", "--group=3", "--batches=2"]
    chosen += [f"--set=model.path={tmp_path / 'model'}", "--json", str(file)]
    assert main(["variance", "word-problems", *sizes, *chosen]) == 0
    told = json.loads(file.read_text())
    assert (told["group"], told["step"], told["reference"]) == (3, 2, 2 * 2 * 3)
    assert {row["name"] for row in told["estimators"]} == {"zscore", "raw"}
    assert "zscore" in capsys.readouterr().out

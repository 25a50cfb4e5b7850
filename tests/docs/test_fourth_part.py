"""The fourth part of the study: plans, rates chosen and judged, equal norms, strata and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from groupwise.algorithms.advantages import ADVANTAGES
from groupwise.experiments import Plan, Result, read_plan
from groupwise.experiments.plan import toml
from study_scripts import STUDY, modules

NAMES = ("measured", "candidates", "rates", "strata", "fourth_design", "fourth", "figures",
         "practice", "moved", "sealed")  # fmt: skip


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from modules(monkeypatch, NAMES)


def test_page_and_plans_are_what_the_scripts_make(study: dict[str, ModuleType]) -> None:
    fourth = study["fourth"]
    assert fourth.PAGE.read_text(encoding="utf-8") == fourth.page(), "run `make study`"
    for name, made in fourth.PLANS.items():
        assert read_plan(fourth.FOLDER / f"{name}.toml") == made()
        run = fourth.RESULTS / name / "experiment.toml"
        assert not run.exists() or read_plan(run) == made()


def test_the_new_rates_have_the_settings_of_the_second_edition(
    study: dict[str, ModuleType],
) -> None:
    second = read_plan(STUDY / "plans" / "second" / "second-word-problems.toml")
    design = study["fourth_design"]
    known = second.config(second.arm("grpo@0.0001"))
    for name in design.PARTS["rates"][1]:
        made = design.PLANS[name]()
        assert {*made.seeds} <= {*second.seeds} and len(made.seeds) == 20
        for arm in made.arms:
            config = made.config(arm)
            assert config.algorithm.name == arm.algorithm
            same = config.model_copy(update={"algorithm": known.algorithm})
            assert same == known


def test_contrasts_name_arms_that_are_run_and_sum_to_zero(study: dict[str, ModuleType]) -> None:
    fourth, design = study["fourth"], study["fourth_design"]
    assert fourth.family() == 10
    for name, contrasts in fourth.PRIMARY.items():
        plans = [design.PLANS[folder]() for folder in design.PARTS[name][1]]
        known = {arm.label for plan in plans for arm in plan.arms}
        for contrast in contrasts:
            assert {*contrast.weights} <= known
            assert sum(contrast.weights.values()) == pytest.approx(0)
    # Weights 1/p against uniform ones: both baselines count by half.
    weights = design.EFFECTS[1].weights
    assert weights == {"successes": 0.5, "maxrl": 0.5, "raw": -0.5, "centered": -0.5}
    assert sum(w > 0 for w in design.EFFECTS[0].weights.values()) == 6


def test_cells_of_the_factorial_are_what_their_names_say(study: dict[str, ModuleType]) -> None:
    own = study["candidates"]
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4])
    # Pass rates .75, .25, 1 and 0; of the batch .5, whose deviation is .5.
    sd = 0.1875**0.5
    assert own.right_by_sd(rewards)[:, 0].tolist() == pytest.approx([1 / sd, 1 / sd, 0, 0])
    assert own.right_by_batch_rate(rewards)[:, 0].tolist() == [2, 2, 2, 0]
    assert own.right_by_batch_sd(rewards)[:, 0].tolist() == [2, 2, 2, 0]
    assert own.centered_by_batch_rate(rewards)[:, 0].tolist() == [0.5, 1.5, 0, 0]
    # With their baseline they are functions of the library.
    centred = rewards - rewards.mean(-1, keepdim=True)
    assert torch.allclose(ADVANTAGES.get("zscore")(rewards)[:2], centred[:2] / sd)
    assert torch.allclose(ADVANTAGES.get("batch_zscore")(rewards), centred / 0.5)
    unjudged = torch.tensor([[1.0, 0.0, float("nan")], [float("nan")] * 3])
    for cell in study["fourth_design"].CELLS:
        found = ADVANTAGES.get(cell.advantage)(unjudged)
        assert found[0, 2] == 0 and not found[1].any() and not found.isnan().any()


def test_a_rate_is_judged_on_the_seeds_that_did_not_choose_it(study: dict[str, ModuleType]) -> None:
    rates = study["rates"]
    grid = (1e-4, 2e-4, 4e-4)
    # Arm a: even seeds are best at the first rate, odd ones at the last. So even seeds are judged
    # at the last rate, where they have .3, and odd ones at the first, where they have .2.
    a = np.array([[0.9, 0.5, 0.3], [0.2, 0.5, 0.8]] * 2)
    b = np.array([[0.1, 0.4, 0.1]] * 4)
    found = rates.at_best({"a": a, "b": b}, ("a", "b"), grid, degree=None)
    assert found.sides == ([0.3, 0.2, 0.3, 0.2], [0.4] * 4)
    assert found.rates == ((1e-4, 2e-4), (4e-4, 2e-4))
    # A quadratic through three points is exact; a line is not.
    assert rates.best(b, grid, degree=2) == 1
    assert rates.best(np.array([[0.1, 0.4, 0.2]]), grid, degree=1) == 2


def test_arms_are_compared_at_norms_that_both_reach(study: dict[str, ModuleType]) -> None:
    rates = study["rates"]
    grid = (1e-4, 2e-4, 4e-4)
    # Areas are log2 of the norm, so that arms agree at equal norm whatever their rates.
    norms = {"a": {1e-4: 1.0, 2e-4: 2.0, 4e-4: 4.0}, "b": {1e-4: 2.0, 2e-4: 4.0, 4e-4: 8.0}}
    areas = {"a": np.array([[0.0, 1.0, 2.0]] * 3), "b": np.array([[1.0, 2.0, 3.0]] * 3)}
    first, second = rates.at_equal_norm(areas, ("a", "b"), norms, grid)
    assert first == pytest.approx(second) and first == pytest.approx([1.5] * 3)
    apart = {"a": norms["a"], "b": {1e-4: 5.0, 2e-4: 6.0, 4e-4: 7.0}}
    assert rates.at_equal_norm(areas, ("a", "b"), apart, grid) is None


def test_the_readme_says_what_is_left_at_the_best_rates(study: dict[str, ModuleType]) -> None:
    fourth, practice = study["fourth"], study["practice"]
    (advice,) = practice.best_rates()
    (best,) = [one for one in fourth.primary(study["fourth_design"].read_fourth())["rates"]
               if one.contrast is fourth.BEST]  # fmt: skip
    ends = (best.result.difference.value, best.result.difference.low, best.result.difference.high)
    value, low, high = (f"{100 * end:.1f}".replace("-", "−") for end in ends)
    assert f"(+{value} [{low}, +{high}] pp)" in advice
    for name in ("README.md", "docs/ko/README.md"):
        text = (STUDY.parents[1] / name).read_text(encoding="utf-8").replace("점", " ")
        assert f"{value} [{low}, {high}]" in " ".join(text.split()), name


def test_the_readme_says_on_which_tasks_grpo_is_ahead(study: dict[str, ModuleType]) -> None:
    sealed, practice = study["sealed"], study["practice"]
    told, start = practice.by_task()
    assert start.endswith("start with grpo")
    for name, task in sealed.read_sealed().items():
        found = sealed.primary(task, "softrank", "grpo").result.difference
        ahead = found.low > 0 or found.high < 0
        assert ahead == (name in ("knights-knaves", "countdown")), name
        assert sealed.points(found) in told
        ends = [f"{-100 * end:.1f}" for end in (found.value, found.high, found.low)]
        for page in ("README.md", "docs/ko/README.md"):
            text = " ".join((STUDY.parents[1] / page).read_text(encoding="utf-8").split())
            text = text.replace("점", " ").replace(" points", "")
            assert ahead == (f"{ends[0]} [{ends[1]}, {ends[2]}]" in text), (name, page)


def test_strata_are_chosen_by_the_measured_pass_rate(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strata = study["strata"]
    monkeypatch.setattr(strata, "DATA", tmp_path)
    monkeypatch.setattr(strata, "STORED", tmp_path / "strata.json")
    right = {"never": 0, "hard": 1, "middle": 4, "easy": 6, "always": 10}
    samples = [
        {"id": name, "prompt": f"{name}?", "answer": "1", "correct": number < count}
        for name, count in right.items()
        for number in range(10)
    ]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples), encoding="utf-8")
    strata.main(str(path))
    rows = {s: (tmp_path / f"{s}.jsonl").read_text(encoding="utf-8") for s in ("hard", "easy")}
    assert [json.loads(rows[s])["prompt"] for s in rows] == ["hard?", "easy?"]
    stored = json.loads((tmp_path / "strata.json").read_text(encoding="utf-8"))
    assert stored["never"] == 1 and stored["pass_rate"] == pytest.approx(0.42)
    assert stored["strata"]["hard"] == {"prompts": 1, "pass_rate": 0.1}


def test_a_part_has_figures_once_all_of_it_has_run(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fourth, design = study["fourth"], study["fourth_design"]
    monkeypatch.setattr(study["measured"], "RESULTS", tmp_path)
    # The area is (.1 + 2h + .9) / 4; SoftRank's h is .04 above GRPO's on hard prompts.
    write(tmp_path, design.PLANS["fourth-6-strata"](), "fourth-6-strata", {"softrank-hard": 0.04})
    tasks = design.read_fourth()
    assert [*tasks] == ["strata"]
    hard, easy = fourth.primary(tasks)["strata"]
    assert hard.result.difference.value == pytest.approx(0.02, abs=0.003)
    assert hard.p_holm == pytest.approx(10 * hard.result.p)
    assert fourth.told(hard).startswith("SoftRank minus GRPO, hard prompts: +2.")
    assert "no difference is shown" in fourth.told(easy)
    text = fourth.abstract(tasks, fourth.primary(tasks))
    assert "Not run: learning rates, baseline, weights and their scope and a larger model." in text
    next((tmp_path / "fourth-6-strata" / "results").glob("*-seed-4000.json")).unlink()
    assert not design.read_fourth()


def write(root: Path, plan: Plan, name: str, gains: dict[str, float]) -> None:
    """Runs of three steps for every arm and seed of a plan: .1, .5 and the arm's gain, .9."""
    folder = root / name
    (folder / "results").mkdir(parents=True)
    (folder / "experiment.toml").write_text(toml(plan), encoding="utf-8")
    figures = {key: {"value": 0.5} for key in ("greedy", "sampled", "pass_at_8")}
    for number, arm in enumerate(plan.arms):
        random = np.random.default_rng(number)
        for seed in plan.seeds:
            height = 0.5 + gains.get(arm.label, 0.0) + 0.002 * random.standard_normal()
            Result(
                experiment=plan.digest,
                arm=arm.label,
                algorithm=arm.algorithm,
                seed=seed,
                learning_rate=2e-4,
                curve={"step": [1, 2, 3], "accuracy": [0.1, height, 0.9]},
                evaluations=[{"step": step, "figures": figures} for step in (0, 3)],
            ).write(folder / "results" / f"{arm.label}-seed-{seed}.json")

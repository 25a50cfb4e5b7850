"""The third part of the study: plans, contrasts, the judge that errs, simulations and figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from groupwise.experiments import Plan, Result, read_plan
from groupwise.experiments.plan import toml
from study_scripts import STUDY, modules

NAMES = ("words", "design", "measured", "corrections", "pictures", "mediators", "second", "noise",
         "conditions", "coverage", "third", "sealed", "figures", "practice")  # fmt: skip


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from modules(monkeypatch, NAMES)


def test_page_and_plans_are_what_the_scripts_make(study: dict[str, ModuleType]) -> None:
    third, conditions = study["third"], study["conditions"]
    assert third.PAGE.read_text(encoding="utf-8") == third.page(), "run `make study`"
    for name in ("controls", *conditions.PARTS):
        path = third.PLANS / f"{conditions.folder(name)}.toml"
        assert read_plan(path) == conditions.plan(name)
        run = third.RESULTS / conditions.folder(name) / "experiment.toml"
        assert not run.exists() or read_plan(run) == conditions.plan(name)


def test_contrasts_name_arms_that_are_run_and_sum_to_zero(study: dict[str, ModuleType]) -> None:
    conditions = study["conditions"]
    controls = {arm.label for arm in conditions.plan("controls").arms}
    for name, part in conditions.PARTS.items():
        known = controls | {arm.label for arm in conditions.plan(name).arms}
        assert {arm for _, *pair in part.rows for arm in pair} <= known
        for contrast in part.primary:
            assert {*contrast.weights} <= known
            assert sum(contrast.weights.values()) == pytest.approx(0)
    # Areas of .5 + .02 · log2 τ rise by .02 per doubling.
    weights = conditions.slope().weights
    areas = {conditions.tau_arm(tau): 0.5 + 0.02 * math.log2(tau) for tau in conditions.TAUS}
    assert sum(w * areas[arm] for arm, w in weights.items()) == pytest.approx(0.02)
    # A lead over three conditions is the mean of three differences.
    lead = conditions.lead("a", "b", "c", says="").weights
    gains = {"a": 0.3, "b": 0.0, "c": 0.6}
    assert sum(lead[f"softrank-{each}"] * gain for each, gain in gains.items()) == pytest.approx(
        0.3
    )
    assert sum(lead[f"grpo-{each}"] * gain for each, gain in gains.items()) == pytest.approx(-0.3)


def test_a_part_has_figures_once_all_of_it_has_run(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, conditions = study["third"], study["conditions"]
    for name in ("measured", "third"):
        monkeypatch.setattr(study[name], "RESULTS", tmp_path)
    # The area is (.1 + 2h + .9) / 4. SoftRank's h is .04 above GRPO's with noise, so its area .02.
    gains = {"softrank": 0.02, "grpo": 0.0, "reinforce": 0.0}
    write(tmp_path, conditions, "controls", gains)
    noisy = {f"{a}-noise-{s:g}": 0.04 * (a == "softrank") for s in (0.05, 0.1, 0.2)
             for a in ("softrank", "grpo")}  # fmt: skip
    write(tmp_path, conditions, "noise", noisy)
    tasks = conditions.read_third()
    assert conditions.done(tasks) == ["noise"]
    (found,) = third.primary(tasks)["noise"]
    assert found.result.difference.value == pytest.approx(0.02, abs=0.003)
    assert found.p_holm == pytest.approx(third.family() * found.result.p)
    assert third.told(found).startswith("SoftRank minus GRPO, mean over 5, 10 and 20 % noise: +2.")
    assert "a difference is shown" in third.told(found)
    noise = conditions.joined(tasks, "noise")
    assert third.apart(noise, "noise") == ""
    swapped = {**noise.results, "grpo-noise-0.1": noise.results["softrank-noise-0.1"],
               "softrank-noise-0.1": noise.results["grpo-noise-0.1"]}  # fmt: skip
    told = third.apart(replace(noise, results=swapped), "noise")
    assert "point both ways" in told and "−2." in told.split("10 % flipped")[0]
    assert "equivalence is not shown with a margin of 1 pp" in third.told(found)
    assert "Not run: temperature" in third.abstract(tasks, third.primary(tasks))
    next((tmp_path / conditions.folder("noise") / "results").glob("*-seed-3000.json")).unlink()
    assert conditions.done(conditions.read_third()) == []


def write(root: Path, conditions: ModuleType, name: str, gains: dict[str, float]) -> None:
    """Runs of three steps for every arm and seed of a part: .1, .5 and the arm's gain, .9."""
    plan: Plan = conditions.plan(name)
    folder = root / conditions.folder(name)
    (folder / "results").mkdir(parents=True)
    (folder / "experiment.toml").write_text(toml(plan), encoding="utf-8")
    figures = {key: {"value": 0.5} for key in ("greedy", "sampled")}
    for number, arm in enumerate(plan.arms):
        random = np.random.default_rng(number)
        for seed in plan.seeds:
            height = 0.5 + gains[arm.label] + 0.002 * random.standard_normal()
            Result(
                experiment=plan.digest,
                arm=arm.label,
                algorithm=arm.algorithm,
                seed=seed,
                learning_rate=2e-4,
                curve={"step": [1, 2, 3], "accuracy": [0.1, height, 0.9]},
                evaluations=[{"step": step, "figures": figures} for step in (0, 3)],
            ).write(folder / "results" / f"{arm.label}-seed-{seed}.json")


def test_a_share_of_the_answers_is_misjudged_whatever_they_say(
    study: dict[str, ModuleType],
) -> None:
    flipped = study["noise"].flipped
    right = [1.0, 0.0, 1.0, 0.0]
    texts = ["2", "3", "2", "3"]
    assert flipped("1+1", texts, right, share=1.0) == [-1.0, 1.0, -1.0, 1.0]
    assert flipped("1+1", texts, right, share=0.0) == [0.0] * 4
    assert flipped("1+1", texts, right, share=0.5) == flipped("1+1", texts, right, share=0.5)
    many = [flipped(str(i), texts, right, share=0.2) for i in range(2000)]
    # Four standard errors of 8,000 answers are 1.8 %; equal texts are misjudged independently.
    assert np.mean([value != 0 for row in many for value in row]) == pytest.approx(0.2, abs=0.018)
    both = np.mean([(row[0] != 0) and (row[2] != 0) for row in many])
    assert both == pytest.approx(0.04, abs=0.018)


def test_simulated_intervals_cover_and_an_arm_rarely_differs_from_itself(
    study: dict[str, ModuleType],
) -> None:
    coverage = study["coverage"]
    random = np.random.default_rng(1)
    normal = random.standard_normal(4000)
    # Three standard errors of 20,000 draws are 0.5 %.
    assert coverage.coverage(list(normal + 5), 8) == pytest.approx(0.95, abs=0.006)
    assert coverage.against_itself(list(normal[:400] + 5), 8) == pytest.approx(0.05, abs=0.006)
    assert coverage.rejected(random.standard_normal((100, 8)) + 5) == 1
    # One pair in twenty far off: t intervals over few pairs mostly miss it.
    assert coverage.coverage([0.0] * 19 + [1.0], 8) < 0.9


def test_an_effect_is_split_by_what_carries_it(study: dict[str, ModuleType]) -> None:
    mediators = study["mediators"]
    factors = {"a": (False, True), "b": (False, False), "c": (True, True), "d": (True, False)}
    areas = {
        "a": {0: 0.5, 1: 0.6},
        "b": {0: 0.3, 1: 0.4},
        "c": {0: 0.7, 1: 0.6},
        "d": {0: 0.4, 1: 0.4},
    }
    # Baseline: (.7 + .4)/2 − (.5 + .3)/2 = .15 and .5 − .5 = 0; weighting: .25 and .2.
    assert mediators.differences(areas, factors, 0) == pytest.approx([0.15, 0.0])
    assert mediators.main_effect(areas, factors, 1).difference.value == pytest.approx(0.225)
    # y = .3 + 2m, with residuals ±.01 that are orthogonal to 1 and m.
    m = [0.1, 0.1, 0.2, 0.2]
    y = [0.3 + 2 * x + rest for x, rest in zip(m, (0.01, -0.01, 0.01, -0.01), strict=True)]
    direct = mediators.direct_effect(y, m)
    assert direct.value == pytest.approx(0.3)
    # s² = 4e-4 / 2; (XᵀX)⁻¹₀₀ = Σm² / (4 Σm² − (Σm)²) = .1 / .04 = 2.5; t(.975, 2) = 4.303.
    assert direct.high - direct.value == pytest.approx(4.303 * math.sqrt(2e-4 * 2.5), abs=1e-4)


def test_figures_are_drawn_for_light_and_dark_pages(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = study["figures"]
    monkeypatch.setattr(figures, "OUTPUT", tmp_path)
    assert figures.main(["forest", "heat"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "forest.png", "forest-dark.png", "heat.png", "heat-dark.png",
    }  # fmt: skip
    # Every contrast with an interval has a place, primary ones marked.
    rows = [row for each in figures.forest_rows().values() for row in each]
    assert sum(marked for _, _, marked in rows) >= 2
    assert all(each.low <= each.value <= each.high for _, each, _ in rows)


def test_pages_show_no_picture_that_was_not_drawn(study: dict[str, ModuleType]) -> None:
    folder = study["third"].PAGE.parent
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        named = re.findall(r'src(?:set)?="([^"]+)"', text)
        assert all((folder / name).exists() for name in named), page.name


def test_no_seed_of_the_parts_was_used_before(study: dict[str, ModuleType]) -> None:
    conditions = study["conditions"]
    fresh = {*conditions.CONTROL_SEEDS}
    others = [
        path for path in (STUDY / "plans").rglob("*.toml")
        if path.parent.name not in ("third", "estimators")
    ]  # fmt: skip
    assert others and not any(fresh & {*read_plan(path).seeds} for path in others)


def test_the_readme_says_what_the_runs_do(study: dict[str, ModuleType]) -> None:
    second, practice = study["second"], study["practice"]
    words, fresh = second.read_second()["word-problems"], practice.controls()
    assert fresh is not None
    found = (
        words.contrast("area", "softrank@0.0002", "grpo@0.0002").result.difference,
        fresh.contrast("area", "softrank", "grpo").result.difference,
    )
    readme = " ".join((STUDY.parents[1] / "README.md").read_text(encoding="utf-8").split())
    for each in found:
        value, low, high = (f"{100 * end:.1f}".replace("-", "−") for end in
                            (each.value, each.low, each.high))  # fmt: skip
        assert re.search(rf"{value}( points)? \[{low}, {high}\]", readme)

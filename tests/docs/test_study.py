"""The study's page says what its stored results say, and its tasks are what they claim to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from groupwise.experiments import Result, make_plan, read_plan
from groupwise.experiments.plan import toml
from groupwise.prompts.generators.word_problems import problem
from groupwise.rewards.builtin.countdown import countdown, solves
from groupwise.rewards.builtin.rouge import rouge
from groupwise.rewards.math.reward import exact_answer
from study_scripts import STUDY, modules

NAMES = ("tasks", "words", "design", "measured", "corrections", "pictures", "page",
         "mediators", "second", "noise", "conditions", "coverage", "third", "sealed", "figures",
         "practice")  # fmt: skip


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from modules(monkeypatch, NAMES)


def test_the_page_is_what_the_results_make_of_it(study: dict[str, ModuleType]) -> None:
    page = study["page"]
    tasks = page.read_tasks()
    assert page.PAGE.read_text(encoding="utf-8") == page.page(tasks), "run `make study`"
    second = study["second"]
    assert second.PAGE.read_text(encoding="utf-8") == second.page(), "run `make study`"
    for name in second.SETTINGS:
        assert read_plan(second.PLANS / f"second-{name}.toml") == second.plan(name)


def test_a_difference_at_different_rates_is_no_evidence_for_a_claim(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study["measured"], "RESULTS", tmp_path)
    heights = {"grpo": [0.2, 0.21, 0.19, 0.2], "softrank": [0.7, 0.73, 0.69, 0.7]}
    write(tmp_path / "lists", heights)
    page = study["page"]
    assert "(at different learning rates" not in page.short(page.read_tasks())
    assert "the opposite of the claim holds" in page.claim(page.read_tasks(), "area")
    for path in (tmp_path / "lists" / "results").glob("grpo-*.json"):
        replace(Result.read(path), learning_rate=5e-5).write(path)
    tasks = page.read_tasks()
    assert "no evidence for the algorithm" in page.short(tasks)
    told = page.claim(tasks, "area")
    assert "says nothing of the claim" in told and "holds" not in told


def test_arms_at_equal_rates_are_equal_only_by_a_test(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study["measured"], "RESULTS", tmp_path)
    jitter = [0.0, 0.004, -0.004, 0.002]
    arms = {f"{a}@0.0001": [0.5 + s * j for j in jitter] for a, s in
            (("grpo", 1), ("softrank", -1), ("softrank_matched", 0))}  # fmt: skip
    write(tmp_path / "lists-equal-rates", arms)
    area, steps, *_ = study["corrections"].equal_rates()
    assert "not distinguishable in mean accuracy over training" in area
    assert "; equivalent with a margin of 1 pp (p = " in area
    # Every run takes the same steps: no spread, and so no test.
    assert "steps to 60 % differ by 0.0 in each of 4 seeds, so there is no test" in steps


def test_power_of_paired_seeds_is_that_of_the_tables(study: dict[str, ModuleType]) -> None:
    design = study["design"]
    # At d_z = .5 and α = .05 every table says 34 pairs for a power of .80.
    assert design.seeds_needed(difference=0.5, deviation=1.0) == 34
    assert design.power(34, difference=0.5, deviation=1.0) == pytest.approx(0.808, abs=0.002)


def test_the_second_edition_averages_over_rates_and_counts_tasks_not_run(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = study["second"]
    for module in ("measured", "second"):
        monkeypatch.setattr(study[module], "RESULTS", tmp_path)
    setting = replace(second.SETTINGS["lists"], seeds=4)
    monkeypatch.setattr(second, "SETTINGS", {**second.SETTINGS, "lists": setting})
    # A run's area is (.1 + 2h + .9) / 4, half of h and a quarter. SoftRank is above GRPO by .06,
    # .00 and .03 in h on average, so by .015 in the average area.
    jitter = [0.0, 0.008, -0.008, 0.004]
    gains = dict(zip(second.RATES, (0.06, 0.0, 0.03), strict=True))
    heights = {
        f"{arm}@{rate:g}": [0.5 + sign * j + (gain if arm == "softrank" else 0) for j in jitter]
        for arm, sign in (("softrank", 1), ("grpo", -1))
        for rate, gain in gains.items()
    }
    write(tmp_path / "second-lists", heights)
    tasks = second.read_second()
    assert list(tasks) == ["lists"]
    contrast = second.with_holm(tasks)["lists"]
    assert contrast.result.difference.value == pytest.approx(0.015 + np.mean(jitter))
    assert contrast.p_holm == pytest.approx(min(1.0, len(second.SETTINGS) * contrast.result.p))
    # One seed short of the plan, a task has no figure.
    for path in (tmp_path / "second-lists" / "results").glob("*-seed-3.json"):
        path.unlink()
    assert second.read_second() == {}


def write(folder: Path, heights: dict[str, list[float]]) -> None:
    """An experiment with a run of three steps per arm and seed: .1, the given height, .9."""
    arms = [{"label": label, "algorithm": "grpo"} for label in heights]
    plan = make_plan(
        {
            "recipe": "word-problems",
            "seeds": list(range(max(map(len, heights.values())))),
            "against": next(iter(heights)),
            "arms": arms,
        }
    )
    (folder / "results").mkdir(parents=True)
    (folder / "experiment.toml").write_text(toml(plan), encoding="utf-8")
    figures = {name: {"value": 0.5} for name in ("greedy", "sampled", "pass_at_8")}
    for label, by_seed in heights.items():
        for seed, height in enumerate(by_seed):
            result = Result(
                experiment=plan.digest,
                arm=label,
                algorithm="grpo",
                seed=seed,
                learning_rate=1e-4,
                curve={
                    "step": [1, 2, 3],
                    "accuracy": [0.1, height, 0.9],
                    "tokens": [10, 20, 30],
                    "entropy": [0.3, 0.2, 0.1],
                    "grad_norm": [0.4, 0.3, 0.2],
                    "positive_share": [0.2, 0.2, 0.2],
                    "nonzero_share": [0.5, 0.5, 0.5],
                    "effective_samples": [2, 2, 2],
                },
                evaluations=[{"step": step, "figures": figures} for step in (0, 3)],
            )
            result.write(folder / "results" / f"{label}-seed-{seed}.json")


def test_a_candidate_wins_where_both_intervals_exclude_zero(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study["measured"], "RESULTS", tmp_path)
    page = study["page"]
    arms = {"grpo": [0.40, 0.50, 0.60], "softrank": [0.41, 0.50, 0.59]}
    # The area is (.1 + 2h + .9) / 4, so a gain of .2 in h is one of .1 in area. Gains of log_odds
    # over grpo are (.10, .11, .09), over softrank alike: intervals far above 0. Those of the other
    # candidate are (.15, −.15, .15): an interval around 0.
    rivals = {"log_odds": [0.60, 0.72, 0.78], "softrank_two_sided": [0.70, 0.20, 0.90]}
    for name in ("word-problems", "lists"):
        write(tmp_path / name, arms)
        write(tmp_path / f"{name}-candidates", rivals)
    tasks = page.read_tasks()
    assert page.winners(tasks) == {"log_odds": ["word-problems", "lists"], "softrank_two_sided": []}
    gain = tasks["lists"].contrast("area", "log_odds", "grpo").result.difference
    assert (gain.value, gain.low > 0) == (pytest.approx(0.1), True)
    said = page.verdicts_on_candidates(tasks)
    assert said[0].endswith("on 2 of 2 tasks (word problems and lists): the rule is not met.")
    assert "softrank and grpo are not distinguishable while training" in page.short(tasks)


def test_a_seed_that_an_arm_lacks_is_left_out_and_said_to_be_missing(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study["measured"], "RESULTS", tmp_path)
    write(tmp_path / "lists", {"grpo": [0.4, 0.5, 0.6, 0.7], "softrank": [0.4, 0.5, 0.6]})
    write(tmp_path / "long-answers", {"grpo": [0.4, 0.5, 0.6], "softrank": [0.4, 0.5]})
    task = study["measured"].read_task("lists")
    assert {arm: sorted(runs) for arm, runs in task.results.items()} == {
        "grpo": [0, 1, 2],
        "softrank": [0, 1, 2],
    }
    text = study["page"].page({"lists": task})
    assert "Provisional: 1 of 4 seeds are missing." in text
    assert study["measured"].read_task("long-answers") is None


def test_worked_answers_are_what_the_tasks_say(
    study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = study["tasks"]
    monkeypatch.setitem(tasks.COUNTS, "worked", 300)
    lists = tasks.worked("lists")
    rewards = [rouge(row["worked"], row["answer"], kind="L", tokens="words") for row in lists]
    # Numbers 1 to 5 of 9 slip with .4, the others with .75: 44 % of a list are right on average,
    # and a slip can fall on its neighbour's value.
    assert 0.44 < sum(value or 0.0 for value in rewards) / len(rewards) < 0.6
    seen, held_out = (
        {row["prompt"] for row in tasks.rows("lists", s)} for s in ("train", "held_out")
    )
    assert seen and held_out and not seen & held_out
    # Of the long answers 35 % are right; three standard errors of 300 are 8 %.
    answers = [problem(i, seed=12, levels=(2, 3)).answer for i in range(300)]
    long = tasks.worked("long-answers")
    right = [exact_answer(row["worked"], a) for row, a in zip(long, answers, strict=True)]
    assert sum(value or 0.0 for value in right) / 300 == pytest.approx(0.35, abs=0.08)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for found in modules(monkeypatch, ["estimators"]):
        yield found["estimators"]


def test_the_page_of_the_search_is_what_its_results_make_of_it(search: ModuleType) -> None:
    assert search.PAGE.read_text(encoding="utf-8") == search.page(), "run `make study`"
    sealed = sys.modules["sealed"]
    plans = {design.folder: search.design_plan(design) for design in search.ROUNDS}
    plans |= {f"estimators-{name}-grpo": sealed.grpo_plan(name) for name in sealed.FURTHER_TASKS}
    if sealed.FINALIST is not None:
        plans |= {f"estimators-{name}": sealed.plan(name, sealed.FINALIST) for name in sealed.TASKS}
    for name, plan in plans.items():
        assert read_plan(search.PLANS / f"{name}.toml") == plan


def test_no_sealed_seed_is_used_elsewhere(search: ModuleType) -> None:
    module = sys.modules["sealed"]
    sealed = {*module.SEEDS}
    opened = {f"estimators-{name}" for name in module.TASKS}
    plans = [path for path in (STUDY / "plans").rglob("*.toml") if path.stem not in opened]
    assert plans and not any(sealed & {*read_plan(path).seeds} for path in plans)


def test_thresholds_of_the_further_tasks_follow_from_grpo_and_their_bases_are_the_fixed_ones(
    search: ModuleType,
) -> None:
    sealed, measured = sys.modules["sealed"], sys.modules["measured"]
    for name, setting in sealed.FURTHER_TASKS.items():
        task = measured.read_task(f"estimators-{name}-grpo")
        assert sealed.halfway(task) == setting.threshold
        assert {run.base for run in task.runs} == {sealed.BASES[name]}
        if (opened := sealed.read_sealed().get(name)) is not None:
            assert {run.base for run in opened.runs} == {sealed.BASES[name]}


def sealed_runs(folder: Path, means: Sequence[float], rates: Sequence[float]) -> None:
    """Runs of a finalist and both controls on four seeds, with their heights at step two."""
    jitter = [0.0, 0.004, -0.004, 0.002]
    arms = zip(("softrank_loo", "grpo", "softrank"), means, (1, -1, -1), strict=True)
    write(
        folder,
        {
            f"{arm}@{rate:g}": [mean + sign * j for j in jitter]
            for arm, mean, sign in arms
            for rate in rates
        },
    )


@pytest.fixture
def sealed(
    search: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The sealed part with another finalist on four seeds, whose results are in `tmp_path`."""
    module = sys.modules["sealed"]
    for each in (search, sys.modules["measured"]):
        monkeypatch.setattr(each, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "FINALIST", "softrank_loo")
    monkeypatch.setattr(module, "SEEDS", range(4))
    yield module


def test_a_task_is_won_against_both_controls_or_not_at_all(
    sealed: ModuleType, tmp_path: Path
) -> None:
    # The area is half of the height and a quarter. On lists the finalist is level with SoftRank.
    heights = {"word-problems": (0.6, 0.5, 0.5), "lists": (0.6, 0.5, 0.6)}
    for task, means in heights.items():
        sealed_runs(tmp_path / f"estimators-{task}", means, sealed.RATES)
    found = sealed.read_sealed()
    assert {name: sealed.won(task) for name, task in found.items()} == {
        "word-problems": True,
        "lists": False,
    }
    told = sealed.verdict()
    assert (
        "on 1 of 3 (word problems) sealed tasks that the rule names: the rule is not met." in told
    )
    # Three further tasks could still be won.
    assert "on 1 of 5 (word problems); the target of at least 3 is open" in told
    # One run short of the plan, a task has no figure.
    next((tmp_path / "estimators-lists" / "results").glob("grpo*-seed-3.json")).unlink()
    assert list(sealed.read_sealed()) == ["word-problems"]


def test_the_second_question_asks_for_three_of_five_tasks(
    sealed: ModuleType, tmp_path: Path
) -> None:
    for name in ("word-problems", "lists", "countdown"):
        sealed_runs(tmp_path / f"estimators-{name}", (0.6, 0.5, 0.5), sealed.RATES)
    for name in ("sharpening", "knights-knaves"):
        sealed_runs(tmp_path / f"estimators-{name}", (0.5, 0.5, 0.5), sealed.RATES)
    told = sealed.verdict()
    assert "on 2 of 3 (word problems and lists) sealed tasks" in told
    assert "that the rule names: the rule is not met." in told
    assert "on 3 of 5 (word problems, lists and countdown); the target of at least 3 is met" in told


def test_tokens_to_the_threshold_are_those_of_the_step_that_reaches_it(
    sealed: ModuleType, tmp_path: Path
) -> None:
    # Steps cost 10, 20 and 30 tokens in all, and reach .1, the height and .9; the plan asks for .6.
    # A window of three points leaves the middle as the mean of all: (1 + height) / 3.
    folder = tmp_path / "estimators-word-problems"
    sealed_runs(folder, (0.9, 0.3, 0.9), sealed.RATES)
    task = sealed.read_sealed()["word-problems"]
    assert task.plan.threshold == 0.6
    assert {*sealed.tokens_to_threshold(task, "softrank_loo@0.0001").values()} == {20.0}
    assert {*sealed.tokens_to_threshold(task, "grpo@0.0001").values()} == {30.0}
    ratios = sealed.token_ratios(task)
    assert ratios["grpo"].value == pytest.approx(2 / 3)
    assert ratios["softrank"].value == pytest.approx(1.0)
    assert not sealed.saves(task), "level with SoftRank"
    # At one of three rates no run of GRPO reaches it: all of the tokens count.
    for path in (folder / "results").glob("grpo@5e-05*.json"):
        run = Result.read(path)
        replace(run, curve={**run.curve, "accuracy": [0.1, 0.2, 0.3]}).write(path)
    task = sealed.read_sealed()["word-problems"]
    assert sealed.unreached(task, "grpo") == "4 of 12"
    assert {*sealed.tokens_to_threshold(task, "grpo@5e-05").values()} == {30.0}


def test_worked_answers_of_countdown_calculate_rightly_and_slip_as_often_as_they_say(
    study: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = study["tasks"]
    monkeypatch.setitem(tasks.COUNTS, "worked", 400)
    rows = tasks.rows("countdown", "worked")
    hit = [countdown(row["worked"], row, use_all=True, source="tag") for row in rows]
    # Three standard errors of 400 are 7 %.
    assert sum(hit) / 400 == pytest.approx(1 - tasks.COUNTDOWN_SLIP, abs=0.07)
    for row in rows:
        said = row["worked"].split("<answer>")[1].removesuffix("</answer>")
        last = row["worked"].split("</reasoning>")[0].split("=")[-1]
        assert solves(said, row["numbers"], Fraction(last), use_all=True)
    seen, held_out = (
        {(row["target"], *sorted(row["numbers"])) for row in tasks.rows("countdown", split)}
        for split in ("train", "held_out")
    )
    assert len(held_out) == 256 and not seen & held_out


def test_a_second_round_names_who_is_above_both_controls(
    search: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["measured"], "RESULTS", tmp_path)
    again = replace(search.AGAIN, seeds=range(4))
    monkeypatch.setattr(search, "ROUNDS", (again,))
    monkeypatch.setattr(sys.modules["sealed"], "FINALIST", None)
    jitter = [0.0, 0.004, -0.004, 0.002]
    heights = {"softrank": 0.5, "grpo": 0.4, "reinforce": 0.5}
    write(tmp_path / again.controls, {a: [h + j for j in jitter] for a, h in heights.items()})
    # The area is half of the height and a quarter. One candidate is above GRPO only.
    heights = {"softrank_adaptive": 0.45, "softrank_annealed": 0.52, "floored": 0.6}
    write(tmp_path / again.folder, {a: [h - j for j in jitter] for a, h in heights.items()})
    task = search.read_design(again)
    assert search.eligible(again, task) == ["softrank_annealed", "floored"]
    assert search.outcome(again).startswith(
        "Above both controls on the 4 design seeds: `softrank_annealed` and `floored`. "
        "The best, `floored`, is +10.0 "
    )
    assert search.finalist().endswith("No finalist has been named yet.")
    next((tmp_path / again.folder / "results").glob("floored-seed-3.json")).unlink()
    assert search.read_design(again) is None


def test_candidates_are_what_the_page_says(search: ModuleType) -> None:
    own = sys.modules["candidates"]
    mixed, right = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4)
    # z of the right answer is √3, so its weight is 1 / (1 + 3·exp(−4 / (√3 · τ))) = 0.9713 at
    # τ = .5. Times 4 and to the power 1 − .25: 2.767.
    adaptive = own.softrank_adaptive(mixed)[0].tolist()
    assert adaptive == pytest.approx([2.767, 0, 0, 0], abs=1e-3)
    assert own.softrank_adaptive(right)[0].tolist() == [1.0] * 4
    # The lowest of four graded rewards is the floor.
    assert own.softrank_adaptive(torch.tensor([[0.8, 0.6, 0.6, 1.0]]))[0, 1] == 0
    # 4 · 0.9713 − .25 · 0.9713 and −.25 · 0.9713.
    shrunk = own.softrank_shrunk(mixed)[0].tolist()
    assert shrunk == pytest.approx([3.642, *[-0.2428] * 3], abs=1e-3)
    # 0/1 rewards stay what they are; of graded ones the lowest of the group is taken off.
    assert own.floored(torch.cat([mixed, right])).tolist() == [[1.0, 0, 0, 0], [1.0] * 4]
    graded = own.floored(torch.tensor([[0.8, 0.6, 0.6, 1.0]]))[0].tolist()
    assert graded == pytest.approx([0.2, 0, 0, 0.4])
    assert own.anchored_zscore(torch.cat([mixed, right]))[1].tolist() == [1.0] * 4
    assert own.anchored_zscore(mixed)[0, 0].item() == pytest.approx(3**0.5, abs=1e-4)
    # Means .25 and 1; sampling variances .25/4 and 0, so v = .03125; the means' variance is
    # .28125, so t = .25 and s = 1/9. Baselines: 8/9 · .25 + 1/9 · .625 and 8/9 + 1/9 · .625.
    stein = own.james_stein(torch.cat([mixed, right]))
    assert stein[:, 1].tolist() == pytest.approx([-0.29167, 1 - 0.95833], abs=1e-4)


@pytest.mark.parametrize("name", ["softrank_adaptive", "softrank_shrunk", "james_stein", "floored"])
def test_what_is_not_judged_gets_nothing(search: ModuleType, name: str) -> None:
    rewards = torch.tensor([[1.0, 0.0, float("nan")], [float("nan")] * 3])
    found = getattr(sys.modules["candidates"], name)(rewards)
    assert found[0, 2] == 0 and not found[1].any() and not found.isnan().any()

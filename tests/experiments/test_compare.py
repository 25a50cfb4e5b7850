"""Experiments: plans that are refused, learning rates, budgets, and runs on a common axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.algorithms import bind
from groupwise.cli import main
from groupwise.errors import RunError, UsageError
from groupwise.experiments import (
    Plan,
    Result,
    analyse,
    make_plan,
    planned,
    read_plan,
    read_results,
    run_plan,
)
from groupwise.experiments.plan import toml
from groupwise.experiments.results import place, read_curve
from groupwise.experiments.tuning import choose
from groupwise.experiments.worker import Budget

ARMS = [{"algorithm": "softrank"}, {"label": "plain", "algorithm": "grpo"}]


def values(**changes: Any) -> dict[str, Any]:
    """A plan as a file has it."""
    return {"recipe": "word-problems", "seeds": [0, 1], "arms": ARMS, **changes}


def run(arm: str, seed: int, accuracy: list[float], **more: Any) -> Result:
    """A finished run that wrote 10 tokens a step unless `tokens` says otherwise."""
    steps = list(range(1, len(accuracy) + 1))
    tokens = more.pop("tokens", [10 * step for step in steps])
    curve = {"step": steps, "accuracy": accuracy, "tokens": tokens, "seconds": steps}
    given = {"experiment": "x", "algorithm": arm, "learning_rate": 1e-4, "curve": curve}
    return Result(**{**given, "arm": arm, "seed": seed, **more})


def test_what_a_plan_leaves_out_is_filled_in_and_survives_the_file(tmp_path: Path) -> None:
    plan = make_plan(values(title='The "best" ü', tuning={"seeds": [7]}))
    assert (plan.against, plan.splits) == ("plain", ("held_out",))
    assert plan.tuning is not None
    # A quarter, a half, once and twice the recipe's 2e-4.
    assert plan.tuning.learning_rates == (5e-5, 1e-4, 2e-4, 4e-4)
    file = tmp_path / "experiment.toml"
    file.write_text(toml(plan), encoding="utf-8")
    assert read_plan(file) == plan
    assert read_plan(file).digest == plan.digest != make_plan(values()).digest


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"arms": [{"algorithm": "sofrank"}]}, "arms.0.algorithm = 'sofrank': no such row; did"),
        ({"arms": [*ARMS, ARMS[0]]}, "two have the label 'softrank'"),
        ({"arms": [{"algorithm": "grpo", "label": "base"}]}, "the model before training"),
        ({"arms": [{"algorithm": "grpo", "label": "a/b"}]}, "arms.0.label = 'a/b'"),
        ({"against": "grpo"}, "against = 'grpo': must be one of the arms"),
        ({"seeds": [1, 1]}, "seeds = [1, 1]: every seed must occur once"),
        ({"seeds": []}, "seeds = []"),
        ({"seed": 1}, "seed = 1: no such setting; did you mean seeds?"),
        ({"tuning": {"seeds": [1, 5]}}, "tuning.seeds: 1 must not be seeds of the comparison"),
        ({"tuning": {"learning_rates": [2e-4, 1e-4]}}, "in ascending order"),
        ({"tuning": {"learning_rate": [1e-4]}}, "did you mean learning_rates?"),
        (
            {"tuning": {}, "arms": [{"algorithm": "grpo", "learning_rate": 1e-4}]},
            "arms.0.learning_rate = 0.0001: is fixed, but [tuning]",
        ),
        ({"match": "tokens", "tuning": {"equal_rates": True}}, "needs match = 'samples'"),
        ({"margin": 0.0}, "margin = 0.0: must be"),
        ({"match": "token"}, "match = 'token': must be"),
        ({"match": "tokens", "set": ["optimizer.schedule=cosine"]}, "schedule = 'cosine' needs"),
        ({"set": ["steps=1"]}, "steps = 1: a learning curve needs at least 2"),
        ({"set": ["seed=3"]}, "set = 'seed=3': the experiment sets seed itself"),
        ({"set": ["group_sise=3"]}, "group_sise = 3: no such setting; did you mean group_size?"),
        ({"recipe": "word-problem"}, "did you mean word-problems?"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(values(**changes))
    assert said in str(caught.value)


def test_the_learning_rate_with_the_largest_mean_area_is_chosen() -> None:
    # Areas by trapezoids over two equal steps: (0 + 2·.2 + .4)/4 = .2 and .4; (.3 and .5) beats
    # them, and 4e-4 has a failed run, so its .9 counts for nothing.
    tried = [
        run("a", 0, [0.0, 0.2, 0.4], learning_rate=1e-4),
        run("a", 1, [0.2, 0.4, 0.6], learning_rate=1e-4),
        run("a", 0, [0.1, 0.3, 0.5], learning_rate=2e-4),
        run("a", 1, [0.3, 0.5, 0.7], learning_rate=2e-4),
        run("a", 0, [0.9, 0.9, 0.9], learning_rate=4e-4),
        run("a", 1, [0.9], learning_rate=4e-4, status="failed"),
    ]
    found = choose(tried, metric="accuracy")
    assert found is not None
    assert found.learning_rate == 2e-4
    assert found.areas == pytest.approx({1e-4: 0.3, 2e-4: 0.4, 4e-4: None})
    assert not found.at_edge
    lower = choose(tried[2:], metric="accuracy")
    assert lower is not None and lower.at_edge
    # The factor between the last two rates at that edge, 2, once more.
    assert lower.extended() == pytest.approx(1e-4)
    assert choose(tried[-1:], metric="accuracy") is None
    alike = [run("a", 0, [0.1, 0.3], learning_rate=rate) for rate in (4e-4, 2e-4, 1e-4)]
    lowest = choose(alike, metric="accuracy")
    assert lowest is not None and lowest.learning_rate == 1e-4


def test_runs_are_compared_over_the_tokens_that_all_of_them_used() -> None:
    # softrank wrote 10 tokens a step and 50 in all, plain 20 a step and 40 in its two. All used .04
    # thousand; the grid has plain's two points, 20 and 40 tokens, at which softrank stood at its
    # steps 2 and 4. Its fifth step is beyond.
    plan = make_plan(values(match="tokens", threshold=0.35))
    results = [
        result
        for seed, shift in ((0, 0.0), (1, 0.1))
        for result in (
            run("softrank", seed, [0.1 + shift, 0.2, 0.3, 0.4 + shift, 0.9]),
            run("plain", seed, [0.1, 0.2 + shift / 2], tokens=[20, 40]),
        )
    ]
    found = analyse(plan, results)
    first = found.runs[0]
    assert first.axis == "thousand tokens"
    assert [row["step"] for row in first.metrics] == pytest.approx([0.02, 0.04])
    assert [row["accuracy"] for row in first.metrics] == pytest.approx([0.2, 0.4])
    # Mean heights over the common range: .3 and .35 for softrank, .15 and .175 for base.
    area = next(c for c in found.comparison.contrasts if c.figure.key == "area")
    assert area.result.difference.value == pytest.approx((0.15 + 0.175) / 2)
    named = {c.figure.name: c.figure.unit for c in found.comparison.contrasts}
    assert named["thousand tokens to 35 %"] == "thousand tokens"


def test_a_failed_run_is_named_and_its_seed_left_out_of_the_pairs() -> None:
    plan = make_plan(values(seeds=[0, 1, 2]))
    results = [run(arm, seed, [0.1, 0.2]) for seed in (0, 1, 2) for arm in ("softrank", "plain")]
    results[4] = replace(results[4], status="failed", error="RunError: no gradient")
    found = analyse(plan, results)
    assert found.comparison.seeds == (0, 1)
    assert found.remarks() == ["Failed: softrank seed 2 (RunError: no gradient)."]
    tuned = run("plain", 7, [0.1, 0.2], tuning=True)
    assert (
        "2 runs of the comparison have no result." in analyse(plan, results[2:] + [tuned]).remarks()
    )
    with pytest.raises(RunError, match="no run of the reference arm plain has finished"):
        analyse(plan, results[:1])


def test_arms_at_different_rates_are_compared_at_equal_ones_too() -> None:
    """Softrank is ahead because its rate is twice the other's; at either rate they are alike."""
    plan = make_plan(values(seeds=[0, 1, 2, 3], tuning={"learning_rates": [1e-4, 2e-4]}))
    jitter = [0.0, 0.003, -0.002, 0.001]

    def learned(arm: str, name: str, height: float, rate: float, sign: int) -> list[Result]:
        heights = [height + sign * j for j in jitter]
        return [
            run(name, s, [0.1, h, 0.9], algorithm=arm, learning_rate=rate)
            for s, h in enumerate(heights)
        ]

    tuning = [
        run(arm, 1000, [0.1, height, 0.9], learning_rate=rate, tuning=True)
        for arm, rate, height in (
            ("softrank", 1e-4, 0.3), ("softrank", 2e-4, 0.5),
            ("plain", 1e-4, 0.5), ("plain", 2e-4, 0.3),
        )
    ]  # fmt: skip
    chosen = [
        *tuning,
        *learned("softrank", "softrank", 0.5, 2e-4, 1),
        *learned("plain", "plain", 0.3, 1e-4, -1),
    ]
    found = analyse(plan, chosen)
    assert found.missing == 0 and not found.equal_rates
    assert "Learning rates differ: softrank and plain" in " ".join(found.remarks())
    assert "set tuning.equal_rates = true" in " ".join(found.remarks())
    assert found.comparison.verdicts[0].startswith("softrank has a higher mean accuracy")
    crossed = [
        *learned("softrank", "softrank@0.0001", 0.3, 1e-4, 1),
        *learned("plain", "plain@0.0002", 0.5, 2e-4, -1),
    ]
    both = analyse(plan, [*chosen, *crossed])
    assert both.missing == 0 and both.comparison == found.comparison
    remarks = " ".join(both.remarks())
    for pair in ("softrank@0.0001 and plain@0.0001", "softrank@0.0002 and plain@0.0002"):
        assert f"{pair} are not distinguishable in mean accuracy over training" in remarks


def test_runs_of_different_base_models_are_named() -> None:
    plan = make_plan(values(seeds=[0, 1, 2]))
    results = [
        run(arm, seed, [0.1, 0.2], base="sha256:a")
        for seed in (0, 1, 2)
        for arm in ("softrank", "plain")
    ]
    assert not analyse(plan, results).remarks()
    results[0] = replace(results[0], base="sha256:b")
    assert "2 different base models" in analyse(plan, results).remarks()[0]


def test_a_result_is_read_as_it_was_written_and_a_damaged_one_named(tmp_path: Path) -> None:
    result = run("a", 3, [0.5, 0.25], evaluations=[{"step": 0, "split": "s", "figures": {}}])
    tuned = replace(result, tuning=True)
    result.write(place(tmp_path, arm="a", seed=3))
    tuned.write(place(tmp_path, arm="a", seed=3, rate=1e-4))
    assert read_results(tmp_path) == [result, tuned]
    damaged = tmp_path / "results" / "tuning" / "a-lr-0.0001-seed-3.json"
    damaged.write_text(damaged.read_text()[:40])
    with pytest.raises(UsageError, match=r"a-lr-0.0001-seed-3.json: is not the result of a run"):
        read_results(tmp_path)


def test_the_curve_of_a_run_counts_tokens_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [
        '{"step": 1, "reward": 0.123456789, "tokens": 30.0, "seconds": 0.5, "grad_norm": null}',
        '{"step": 2, "reward": 1.0, "tokens": 12.0, "seconds": 0.25, "grad_norm": 2.0}',
    ]
    file.write_text("\n".join(rows) + "\n")
    assert read_curve(file) == {
        "step": [1, 2],
        "reward": [0.123457, 1],
        "grad_norm": [None, 2],
        "tokens": [30, 42],
        "seconds": [0.5, 0.75],
    }
    assert read_curve(tmp_path / "nothing.jsonl") == {}


def test_a_budget_ends_at_the_first_step_that_has_used_it() -> None:
    # 10 and 7 are 17, and 7 more are exactly 24.
    budget = Budget("tokens", limit=24.0, used=10.0)
    assert [budget.should_stop({"tokens": 7.0}) for _ in range(2)] == [False, True]
    assert not Budget("tokens", limit=None, used=1e9).spent


def test_advantages_scaled_to_a_root_mean_square_over_what_was_judged() -> None:
    # Centred (1, 0, 0, 0) is (.75, −.25, −.25, −.25): squares .5625 + 3 · .0625 = .75. The second
    # group has no verdict and counts for nothing, so the mean square is .75/4 and the root .4330.
    algorithm = bind("dr_grpo", {"advantage": {"rms": 1.0}})
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[True] * 4, [False] * 4])
    found = algorithm.advantage({"rewards": rewards, "valid": valid})
    assert found[0].tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], rel=1e-6)
    assert found[1].tolist() == [0.0] * 4
    same = algorithm.advantage({"rewards": torch.ones(1, 4)})
    assert same.tolist() == [[0.0] * 4]


def test_scaling_takes_away_what_only_scales() -> None:
    # Dr. GRPO's advantages are GRPO's times the deviation: in one group scale is all that differs.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]])
    found = [
        bind(name, {"advantage": {"rms": 0.5}}).advantage({"rewards": rewards})
        for name in ("grpo", "dr_grpo")
    ]
    torch.testing.assert_close(*found)
    with pytest.raises(UsageError, match=r"algorithm.advantage.rms = 0: must be a positive number"):
        bind("grpo", {"advantage": {"rms": 0}})


def test_the_plan_of_one_arm_keeps_its_own_settings() -> None:
    arms = [{"algorithm": "softrank", "set": ["algorithm.advantage.tau=2.0"]}]
    plan: Plan = make_plan(values(arms=arms, set=["group_size=4", "threads=2"]))
    config = plan.config(plan.arms[0])
    assert config.algorithm.advantage == {"tau": 2.0}
    # The experiment's own settings give way to the plan's.
    assert (config.group_size, config.threads, config.logging.rollouts_every) == (4, 2, 0)


def test_settings_of_one_arms_function_do_not_reach_the_others() -> None:
    plan = planned(
        "gsm8k-softrank-qwen2.5-3b",
        algorithms=["softrank", "grpo"],
        seeds=3,
        match="samples",
        tune_lr=False,
        matched_rms=False,
        against=None,
        threshold=0.6,
        only="",
        overrides=["algorithm.divergence.coefficient=0.1"],
    )
    softrank, grpo = (plan.config(arm).algorithm for arm in plan.arms)
    assert softrank.advantage == {"tau": 0.5} and grpo.advantage == {}
    assert softrank.divergence["coefficient"] == grpo.divergence["coefficient"] == 0.1
    assert plan.differences() == [
        "softrank differs in more than its advantage: weighting group_token_mean, where grpo has "
        "sequence_mean(empty_rows=False)."
    ]
    alone = make_plan({**plan.model_dump(mode="json", exclude_none=True), "only": "advantage"})
    assert alone.differences() == []
    assert alone.config(alone.arms[0]).algorithm.advantage == {"name": "softrank", "tau": 0.5}


def test_every_setting_in_which_arms_differ_is_named() -> None:
    arms = [
        {
            "algorithm": "grpo",
            "label": "short",
            "set": ["rewards=[{name='exact_answer'}]", "steps=3"],
        },
        {
            "algorithm": "grpo",
            "set": ["rewards=[{name='exact_answer'}, {name='repetition', weight=0.1}]"],
        },
    ]
    plan: Plan = make_plan(values(arms=arms, set=[]))
    steps = plan.config(plan.arm("grpo")).steps
    assert plan.differences() == [
        f"short differs in more than its advantage: steps 3, where grpo has {steps}; "
        "rewards.1 none, where grpo has repetition(weight=0.1)."
    ]
    adapted = {"algorithm": "grpo", "label": "lora", "set": ["model.adapter.targets=['q_proj']"]}
    (said,) = make_plan(values(arms=[adapted, {"algorithm": "grpo"}])).differences()
    assert "model.adapter.targets ['q_proj'], where grpo has none" in said


def test_an_explicit_setting_must_fit_every_arm() -> None:
    arms = [{"algorithm": "softrank"}, {"algorithm": "grpo"}]
    with pytest.raises(UsageError, match="zscore has no such setting"):
        make_plan(
            {"recipe": "word-problems", "seeds": [0, 1, 2], "arms": arms}
            | {"set": ["algorithm.advantage.tau=0.3"]}
        )


@pytest.mark.verify
def test_a_finished_model_is_an_arm(tmp_path: Path) -> None:
    plan = make_plan(
        {
            "recipe": "word-problems",
            "seeds": [0, 1, 2],
            "set": ["steps=2", "prompts_per_step=2", "group_size=2", "evaluation.prompts=4"]
            + ["evaluation.samples=2", "guards.silent_rewards=say", "data.limit=64"],
            "arms": [{"algorithm": "grpo"}, {"label": "sft", "model": "bundled"}],
            "against": "sft",
        }
    )
    found = run_plan(plan, output=tmp_path / "out", jobs=1)
    cells = found.analysis.table().cells
    assert any(model == "sft" for model, _, _ in cells)
    assert any(c.first == "grpo" for c in found.analysis.comparison.contrasts)


def test_the_command_prints_how_arms_differ_and_how_to_remove_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--plan-only", "--output", str(tmp_path / "first")]
    assert main(["compare", "word-problems", "--algorithms", "softrank,grpo", *given]) == 0
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith("softrank differs in more than its advantage: weighting")
    assert hint == "--only advantage removes the differences between algorithms."
    plan = ["--plan", str(tmp_path / "first" / "experiment.toml"), "--plan-only"]
    assert main(["compare", *plan, "--output", str(tmp_path / "second")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        line,
        'only = "advantage" in the file removes the differences between algorithms.',
    ]

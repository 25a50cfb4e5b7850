"""The page on critics says what the stored runs of PPO and GRPO say."""

from __future__ import annotations

from pathlib import Path

from groupwise.evaluation import paired_seeds
from groupwise.experiments import Result, read_plan, read_results

ROOT = Path(__file__).parents[2]
STORED = ROOT / "studies" / "ppo" / "results" / "word-problems"


def sampled(result: Result) -> float:
    """Sampled accuracy on held-out prompts after training, in percent."""
    return 100 * result.evaluations[-1]["figures"]["sampled"]["value"]


def test_ppo_against_grpo_is_what_its_runs_say() -> None:
    plan = read_plan(STORED / "experiment.toml")
    assert plan == read_plan(ROOT / "studies" / "ppo" / "word-problems.toml")
    runs = [result for result in read_results(STORED) if not result.tuning]
    by_arm = {arm: {r.seed: r for r in runs if r.arm == arm} for arm in ("ppo", "grpo")}
    assert all(set(found) == set(plan.seeds) for found in by_arm.values())
    ppo, grpo = ([sampled(found[seed]) for seed in plan.seeds] for found in by_arm.values())
    found = paired_seeds(ppo, grpo).difference
    rates = [next(iter(found.values())).learning_rate for found in by_arm.values()]
    said = (
        (
            f"PPO at {rates[0]:g} ends at {sum(ppo) / len(ppo):.1f} % and GRPO at {rates[1]:g} at "
            f"{sum(grpo) / len(grpo):.1f} %, a difference of {found.value:+.1f} points "
            f"[{found.low:+.1f}, {found.high:+.1f}]"
        )
        .replace("-", "−")
        .replace("e−", "e-")
    )
    page = " ".join((ROOT / "docs" / "values.md").read_text(encoding="utf-8").split())
    assert said in page, said

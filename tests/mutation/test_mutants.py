"""Break the mathematics on purpose: for every mutant some golden or contract test must fail.

Each mutant replaces one piece of source text in a copy of the package and runs the tests that
should notice. A mutant that survives means a test that cannot fail. Run by `make verify`, or
directly: `python tests/mutation/test_mutants.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "groupwise"
ADVANTAGE_TESTS = ("golden/test_advantage_values.py", "algorithms/test_advantage_properties.py")
LOSS_TESTS = ("golden/test_loss_values.py", "algorithms/test_loss_properties.py")
TABLE_TESTS = ("algorithms/test_table.py", "golden/test_loss_values.py")
FIGURE_TESTS = ("training/test_metrics.py",)

CLONING = "algorithms/advantages/cloning.py"
SOFTRANK, STATISTICS = "algorithms/advantages/softrank.py", "algorithms/advantages/statistics.py"
BASELINES, BATCH, BEST = (
    "algorithms/advantages/baselines.py",
    "algorithms/advantages/batch.py",
    "algorithms/advantages/best.py",
)
SURROGATES, WEIGHTING = "algorithms/losses/surrogates.py", "algorithms/losses/weighting.py"
DIVERGENCES, CORRECTIONS = "algorithms/losses/divergences.py", "algorithms/losses/corrections.py"
OBJECTIVE, MASKING, RATIOS = (
    "algorithms/losses/objective.py",
    "algorithms/losses/masking.py",
    "algorithms/losses/ratios.py",
)
ROWS, BINDING = "algorithms/table.py", "algorithms/binding.py"

# (file, what is there, what is put in its place, which tests should notice)
MUTANTS: list[tuple[str, str, str, tuple[str, ...]]] = [
    # signs
    (SURROGATES, "-torch.minimum(ratio * a", "torch.minimum(ratio * a", LOSS_TESTS),
    (
        SURROGATES,
        "gap = row_mean(advantage, mask) - tau",
        "gap = row_mean(advantage, mask) + tau",
        LOSS_TESTS,
    ),
    (DIVERGENCES, "bounded_exp(-x) - 1 + x", "bounded_exp(x) - 1 - x", LOSS_TESTS),
    (OBJECTIVE, "loss - self.entropy", "loss + self.entropy", LOSS_TESTS),
    (OBJECTIVE, "loss + self.coefficient", "loss - self.coefficient", LOSS_TESTS),
    (RATIOS, "apply_mask(logp - old_logp, mask)", "apply_mask(old_logp - logp, mask)", LOSS_TESTS),
    (CORRECTIONS, "(old_logp - sampler_logp)", "(sampler_logp - old_logp)", LOSS_TESTS),
    (
        "algorithms/advantages/penalty.py",
        "rewards - coefficient",
        "rewards + coefficient",
        ADVANTAGE_TESTS,
    ),
    # min and max
    (SURROGATES, "-torch.minimum(ratio * a", "-torch.maximum(ratio * a", LOSS_TESTS),
    (SURROGATES, "torch.minimum(loss, -bound * a)", "torch.maximum(loss, -bound * a)", LOSS_TESTS),
    (
        SURROGATES,
        "x.clamp(max=high), x.clamp(min=-low)",
        "x.clamp(min=-low), x.clamp(max=high)",
        LOSS_TESTS,
    ),
    (SOFTRANK, "max(tau, 1.0)", "min(tau, 1.0)", ADVANTAGE_TESTS),
    # clip sides
    (
        SURROGATES,
        "ratio.clamp(1 - low, 1 + high) * a",
        "ratio.clamp(1 - high, 1 + low) * a",
        LOSS_TESTS,
    ),
    (SURROGATES, "moved <= high, moved >= -low", "moved >= -low, moved <= high", LOSS_TESTS),
    # masks
    (MASKING, "return torch.where(mask, values, 0)", "return values * mask", LOSS_TESTS),
    (
        MASKING,
        "values.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()",
        "values.exp()",
        LOSS_TESTS,
    ),
    (
        SURROGATES,
        "return -apply_mask(advantage, mask) * apply_mask(logp, mask)",
        "return -advantage * logp",
        LOSS_TESTS,
    ),
    (WEIGHTING, "torch.where(mask, share, 0)", "share.expand(mask.shape)", LOSS_TESTS),
    (BATCH, "counted = mask & v[..., None]", "counted = mask", ADVANTAGE_TESTS),
    (
        STATISTICS,
        "valid[:, None, :] & apart",
        "valid[:, None, :].expand_as(apart[None])",
        ADVANTAGE_TESTS,
    ),
    (
        STATISTICS,
        "torch.where(valid, rewards, 0), valid",
        "torch.nan_to_num(rewards), valid",
        ADVANTAGE_TESTS,
    ),
    # stopped gradients
    (SURROGATES, "clamp(floor, cap).detach()", "clamp(floor, cap)", LOSS_TESTS),
    (CORRECTIONS, "(old_logp - sampler_logp).detach()", "(old_logp - sampler_logp)", LOSS_TESTS),
    (OBJECTIVE, "old = logp.detach() if", "old = logp if", LOSS_TESTS),
    # factors and scales
    (SURROGATES, "(2 * tau * length)", "(tau * length)", LOSS_TESTS),
    (SURROGATES, "* (4 / tau) * a", "* (2 / tau) * a", LOSS_TESTS),
    (
        SOFTRANK,
        "_weights(r, v, tau=tau, ddof=ddof) * r\n\n",
        "_weights(r, v, tau=tau, ddof=ddof)\n\n",
        ADVANTAGE_TESTS,
    ),
    (
        SOFTRANK,
        "tau * (count(v, r) * softmax(r / tau, v) - 1)",
        "count(v, r) * softmax(r / tau, v) - 1",
        ADVANTAGE_TESTS,
    ),
    (BASELINES, "scale = size / (size - 1)", "scale = size / size", ADVANTAGE_TESTS),
    (BEST, "size * (whole - rest)", "whole - rest", ADVANTAGE_TESTS),
    (
        WEIGHTING,
        "1 / (_rows(mask, empty=empty_rows) * length)",
        "1 / (len(mask) * length)",
        LOSS_TESTS,
    ),
    (WEIGHTING, "prompts = (tokens > 0).sum()", "prompts = (tokens >= 0).sum()", LOSS_TESTS),
    # branches
    (
        STATISTICS,
        "(highest - lowest) > tolerance * scale",
        "(highest - lowest) > 0",
        ADVANTAGE_TESTS,
    ),
    (STATISTICS, "max(1e-8, 8 * torch.finfo(values.dtype).eps)", "1e-3", ADVANTAGE_TESTS),
    (
        BASELINES,
        "(count(v, r) == 1) & v, r / (1 + eps)",
        "(count(v, r) == 1) & v, 0 * r",
        ADVANTAGE_TESTS,
    ),
    ("algorithms/filters.py", "~torch.isnan(correct) | ~v", "~torch.isnan(correct)", LOSS_TESTS),
    # defaults and rows
    (SOFTRANK, "tau: float = 0.5", "tau: float = 1.0", ADVANTAGE_TESTS),
    (BASELINES, "ddof: int = 0", "ddof: int = 1", ADVANTAGE_TESTS),
    (SURROGATES, "high: float = 0.2", "high: float = 0.28", LOSS_TESTS),
    (ROWS, "low=3e-4, high=4e-4", "low=4e-4, high=3e-4", TABLE_TESTS),
    (ROWS, 'filter=spec("spread")', 'filter=spec("all")', TABLE_TESTS),
    (BINDING, 'if name == "k1" and row.divergence_in == "loss"', "if False", TABLE_TESTS),
    (BINDING, 'beta * data["kl"]', 'data["kl"]', TABLE_TESTS),
    # figures
    (
        "training/monitor/metrics.py",
        "(a < 0) & (ratio < low)",
        "(a > 0) & (ratio < low)",
        FIGURE_TESTS,
    ),
    ("training/monitor/metrics.py", "torch.expm1(-x) + x", "torch.expm1(x) - x", FIGURE_TESTS),
    # token reward models
    (CLONING, "2 * torch.sigmoid(running) - 1", "torch.sigmoid(running)", ADVANTAGE_TESTS),
    (
        CLONING,
        "scores.cumsum(-1) / mask.cumsum(-1)",
        "scores.cumsum(-1) / mask.sum(-1, keepdim=True)",
        ADVANTAGE_TESTS,
    ),
    (CLONING, "own[..., 0] > 0", "own[..., 0] != 0", ADVANTAGE_TESTS),
    (
        "algorithms/losses/outcomes.py",
        "torch.where(mask, scores, 0).sum(-1)",
        "scores.sum(-1)",
        ("golden/test_critic_values.py",),
    ),
]


def survives(file: str, before: str, after: str, tests: tuple[str, ...], folder: Path) -> bool:
    """Whether the tests pass on a copy of the package with the text replaced."""
    copy = folder / "groupwise"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    source = (copy / file).read_text()
    (copy / file).write_text(source.replace(before, after))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", str(folder), "--import-mode=importlib"),
            *(str(ROOT / "tests" / test) for test in tests),
        ],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


def test_every_mutant_still_has_its_place() -> None:
    for file, before, _, _ in MUTANTS:
        assert before in (PACKAGE / file).read_text(), f"{file} no longer has {before!r}"


@pytest.mark.verify
@pytest.mark.parametrize(
    ("file", "before", "after", "tests"),
    MUTANTS,
    ids=[f"{i}-{mutant[0]}" for i, mutant in enumerate(MUTANTS)],
)
def test_mutant_is_noticed(
    file: str, before: str, after: str, tests: tuple[str, ...], tmp_path: Path
) -> None:
    assert not survives(file, before, after, tests, tmp_path), f"{before!r} -> {after!r}"


@pytest.mark.verify
@pytest.mark.parametrize("tests", [ADVANTAGE_TESTS, LOSS_TESTS, TABLE_TESTS, FIGURE_TESTS])
def test_the_unchanged_package_passes(tests: tuple[str, ...], tmp_path: Path) -> None:
    assert survives("errors.py", "import difflib", "import difflib", tests, tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main(["-m", "verify", "-q", __file__]))

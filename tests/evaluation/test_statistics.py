"""Figures, intervals, tests and sentences: hand-derived numbers, statsmodels, simulation."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from rich.console import Console

from groupwise.errors import UsageError
from groupwise.evaluation import (
    Contrast,
    CurveSummary,
    Estimate,
    Figure,
    best_of_k,
    compare_curves,
    equivalence,
    figure_table,
    holm,
    item_verdict,
    majority_at_k,
    mcnemar,
    paired_items,
    paired_seeds,
    paired_verdicts,
    pass_at_k,
    prompt_mean,
    reflection_rates,
    seed_mean,
    sentence,
    smooth,
    summarise,
    summarise_arm,
    terminal_table,
    wilson,
)

# Numbers marked (sm) are printed by statsmodels 0.15.0: proportion_confint(method="wilson"),
# multipletests(method="holm"), mcnemar(exact=True), DescrStatsW(...).tconfint_mean / ttest_mean.


@pytest.mark.parametrize(
    ("successes", "trials", "level", "low", "high"),
    [
        (9, 30, 0.95, 0.16664748268243793, 0.4787578745871496),  # (sm)
        (0, 20, 0.95, 0.0, 0.1611251580528194),  # (sm)
        (955, 1319, 0.99, 0.6912684814396434, 0.7545556300976636),  # (sm)
    ],
)
def test_wilson_equals_statsmodels(successes, trials, level, low, high):
    found = wilson(successes, trials, level=level)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert found.value == successes / trials


def test_wilson_refuses_impossible_counts():
    for successes, trials in ((3, 2), (-1, 5), (0, 0)):
        with pytest.raises(UsageError, match="successes"):
            wilson(successes, trials)


def test_seed_mean_is_students_interval():
    # m = .6, s = .070711 (n−1), t(9, .975) = 2.262157: ± .050583
    found = seed_mean([0.7, 0.5, 0.6, 0.55, 0.65, 0.6, 0.7, 0.5, 0.6, 0.6])
    expected = (0.6, 0.5494166280819515, 0.6505833719180483)  # (sm)
    # SciPy 1.15 and 1.17 give quantiles of t that differ by 3e-12.
    assert (found.value, found.low, found.high) == pytest.approx(expected, abs=1e-11)


def test_one_seed_and_equal_seeds_have_no_interval():
    for values in ([0.8], [0.1 + 0.2, 0.3, 0.3]):
        found = seed_mean(values)
        assert not found.known and not found.excludes(0.0)
        assert found.as_dict() == {"value": pytest.approx(found.value), "low": None, "high": None}


def test_seed_mean_refuses_what_is_not_a_number():
    for values in ([], [0.5, math.nan], [math.inf, 0.1]):
        with pytest.raises(UsageError, match="finite"):
            seed_mean(values)


def test_prompt_mean_resamples_prompts_not_samples():
    # 20 prompts of 50 samples each, half of the prompts always right: the spread is that of 20
    # values, ± 1.96·.5/√20 = ± .22; samples taken for independent would give ± .03.
    answers = np.repeat([[1.0], [0.0]], 10, axis=0) * np.ones((20, 50))
    found = prompt_mean(answers)
    assert found.value == 0.5
    assert 0.35 < found.high - found.low < 0.5


def test_prompt_mean_is_reproducible_and_never_certain():
    values = [0.0, 1.0, 0.5, 0.25, 0.75, 1.0]
    assert prompt_mean(values, seed=3) == prompt_mean(values, seed=3)
    solved = prompt_mean([1.0] * 30)
    assert (solved.value, solved.low, solved.high) == pytest.approx((1.0, wilson(30, 30).low, 1.0))
    assert not prompt_mean([0.4]).known


PASS_AT_K = [  # n, c, k, unbiased
    (10, 3, 1, 0.3),
    (10, 3, 2, 0.533333),  # 1 − C(7,2)/C(10,2) = 1 − 21/45
    (10, 3, 5, 0.916667),  # 1 − C(7,5)/C(10,5) = 1 − 21/252
    (10, 3, 8, 1.0),  # 7 wrong samples cannot fill 8 places
    (10, 0, 5, 0.0),
    (5, 5, 2, 1.0),
    (100, 1, 10, 0.1),
]


@pytest.mark.parametrize(("n", "c", "k", "unbiased"), PASS_AT_K)
def test_pass_at_k(n, c, k, unbiased):
    assert pass_at_k(n, c, k=k) == pytest.approx(unbiased, abs=1e-6)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    samples = [1, 0, 0, 1, 0, 0, 0]
    for k in range(1, 8):
        subsets = [any(s) for s in itertools.combinations(samples, k)]
        assert pass_at_k(7, 2, k=k) == pytest.approx(np.mean(subsets))
    with pytest.raises(UsageError, match="k = 8"):
        pass_at_k(7, 2, k=8)


def vote(answers, correct):
    """Majority vote over one subset, ties shared, by counting."""
    counts = {a: answers.count(a) for a in answers if a is not None}
    if not counts:
        return 0.0
    winners = [a for a in counts if counts[a] == max(counts.values())]
    share = {
        a: np.mean([c for b, c in zip(answers, correct, strict=True) if b == a]) for a in winners
    }
    return sum(share.values()) / len(winners)


def test_majority_is_the_mean_over_all_subsets():
    answers = ["7", "7", "8", None, "9", "8", None, "7"]
    correct = [1, 1, 0, 0, 0, 0, 0, 1]
    for k in range(1, 9):
        subsets = itertools.combinations(range(8), k)
        expected = np.mean(
            [vote([answers[i] for i in s], [correct[i] for i in s]) for s in subsets]
        )
        assert majority_at_k(answers, correct, k=k) == pytest.approx(expected), k


def test_majority_of_three_coin_flips():
    # iid p = .6: p³ + 3p²(1−p) = .216 + .432 = .648, as the sum over the 8 outcomes of 3 samples
    total = 0.0
    for outcome in itertools.product([1, 0], repeat=3):
        answers = ["right" if right else "wrong" for right in outcome]
        chance = math.prod(0.6 if right else 0.4 for right in outcome)
        total += chance * majority_at_k(answers, outcome, k=3)
    assert total == pytest.approx(0.648)


def test_majority_counts_silent_samples_and_refuses_uneven_input():
    assert majority_at_k([None, None, "7"], [0, 0, 1], k=1) == pytest.approx(1 / 3)
    assert majority_at_k([None, None], [0, 0], k=2) == 0.0
    with pytest.raises(UsageError, match="must match"):
        majority_at_k(["7"], [1, 0], k=1)


def test_best_of_k_is_the_mean_over_all_subsets():
    rewards, correct = [0.9, 0.5, 0.5, 0.1, 0.9], [0, 1, 0, 1, 1]
    for k in range(1, 6):
        expected = []
        for subset in itertools.combinations(range(5), k):
            best = max(rewards[i] for i in subset)
            expected.append(np.mean([correct[i] for i in subset if rewards[i] == best]))
        assert best_of_k(rewards, correct, k=k) == pytest.approx(np.mean(expected)), k


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(40, 25, 0.08168153394154003), (3, 0, 0.25), (7, 7, 1.0), (12, 30, 0.007915897334896727)],
)
def test_mcnemar_equals_statsmodels(b, c, p):
    assert mcnemar(b, c) == pytest.approx(p, abs=1e-12)  # (sm)
    assert mcnemar(0, 0) == 1.0


def test_holm_equals_statsmodels():
    assert holm([0.01, 0.04, 0.03, 0.005, 0.2]) == pytest.approx(
        [0.04, 0.09, 0.09, 0.025, 0.2]
    )  # (sm)
    assert holm([]) == []


def test_paired_seeds_equals_statsmodels():
    found = paired_seeds([0.71, 0.68, 0.74, 0.70, 0.73], [0.66, 0.69, 0.70, 0.69, 0.67])
    d = found.difference
    expected = (0.03, -0.006200415215437072, 0.06620041521543708)  # (sm)
    assert (d.value, d.low, d.high) == pytest.approx(expected, abs=1e-12)
    assert found.p == pytest.approx(0.0828574280831087, abs=1e-12)  # (sm)
    assert found.effect == pytest.approx(2.3008949665421166 / math.sqrt(5))  # (sm) t / √n


def test_paired_items_pairs():
    # 20 items of very different difficulty; the first solves exactly 4 more, never fewer.
    second = np.array([1] * 8 + [0] * 12)
    first = np.array([1] * 12 + [0] * 8)
    found = paired_items(first, second)
    assert (found.first_only, found.second_only, found.items) == (4, 0, 20)
    assert found.difference.value == pytest.approx(0.2)
    assert found.difference.low > 0
    same = paired_items(second, second)
    assert same.p == 1.0 and same.difference.low < 0 < same.difference.high
    with pytest.raises(UsageError, match="match in length"):
        paired_items([1, 0], [1])


def test_reflection_rates():
    # 10 items, 6 explicit of which 3 right, 4 not explicit of which 1 right
    found = reflection_rates([1, 1, 1, 0, 0, 0, 1, 0, 0, 0], [1] * 6 + [0] * 4)
    assert (found.accuracy, found.explicit) == (0.4, 0.6)
    assert (found.accurate_explicit, found.accurate_implicit) == (0.3, 0.1)


def test_curve_summary():
    steps, values = [10, 20, 40, 60], [0.2, 0.6, 0.4, 0.8]
    found = summarise(steps, values, threshold=0.5, window=1)
    assert found.area == pytest.approx(0.52)  # (4 + 10 + 12) / 50
    assert (found.steps_to_threshold, found.reached) == (20, True)
    assert found.final == 0.8
    assert math.isnan(found.oscillation)
    censored = summarise(steps, values, threshold=0.9, window=1)
    assert (censored.steps_to_threshold, censored.reached) == (60, False)


def test_oscillation_is_measured_around_the_mean_curve_of_the_arm():
    # Two steep curves, .2 apart at the third of four steps: residuals (0, 0, ±.1, 0), differences
    # (0, ±.1, ∓.1), deviation √(.02/2) = .1, times √2 for the run's own part in the mean of two.
    steps, rise = [1, 2, 3, 4], [0.0, 0.1, 0.4, 0.9]
    bent = [0.0, 0.1, 0.6, 0.9]
    two = summarise_arm({7: (steps, rise), 8: (steps, bent)}, threshold=0.5, window=1)
    assert [two[s].oscillation for s in (7, 8)] == pytest.approx([0.1 * math.sqrt(2)] * 2)
    assert two[8].area == summarise(steps, bent, threshold=0.5, window=1).area
    # However steep, curves that are alike do not oscillate; nor does a shift count.
    shifted = [value + 0.05 for value in rise]
    alike = summarise_arm({0: (steps, rise), 1: (steps, shifted)}, threshold=0.5, window=1)
    assert [s.oscillation for s in alike.values()] == pytest.approx([0.0, 0.0], abs=1e-12)
    # Runs of unequal length are compared over the steps that both have.
    short = summarise_arm({0: (steps, rise), 1: (steps[:3], rise[:3])}, threshold=0.5, window=1)
    assert short[0].oscillation == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(summarise_arm({0: (steps, rise)}, threshold=0.5)[0].oscillation)


def test_equality_needs_a_test_of_its_own():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (2, 20))
    close = equivalence(noise[0], noise[1], margin=0.01)
    assert close.equivalent and close.difference.low > -0.01 and close.difference.high < 0.01
    # Three noisy seeds do not differ significantly, and are not equivalent either.
    first, second = [0.5, 0.7, 0.6], [0.6, 0.55, 0.65]
    assert paired_seeds(first, second).p > 0.05
    assert not equivalence(first, second, margin=0.01).equivalent
    # The same side that the interval decides: 90 % interval inside the margin, or not.
    wide = equivalence([0.012 + x for x in noise[0] / 10], [0.0] * 20, margin=0.01)
    assert wide.difference.high > 0.01 and not wide.equivalent and wide.p > 0.5
    with pytest.raises(UsageError, match="margin = 0: must be positive"):
        equivalence([0.1, 0.2], [0.1, 0.3], margin=0)


@pytest.mark.verify
def test_equivalence_is_rarely_claimed_at_the_margin():
    rng = np.random.default_rng(1)
    claims = [
        equivalence(rng.normal(0.01, 0.02, 10), np.zeros(10), margin=0.01).equivalent
        for _ in range(5000)
    ]
    assert np.mean(claims) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 5000)


def test_a_margin_makes_a_verdict_say_whether_equality_was_shown():
    near = [0.001, -0.001, 0.002, 0.0, -0.002, 0.001]
    a = {s: curve(area=0.6 + near[s]) for s in range(6)}
    b = {s: curve(area=0.6) for s in range(6)}
    pair = {"A": a, "B": b}
    shown = compare_curves(pair, against="B", threshold=0.6, margin=0.01)
    assert "; equivalent within ±1 pp, p < .001" in " ".join(shown.verdicts)
    tight = compare_curves(pair, against="B", threshold=0.6, margin=0.0005)
    assert "; not shown to be equivalent within ±0.05 pp" in " ".join(tight.verdicts)
    assert "equivalent" not in " ".join(compare_curves(pair, against="B", threshold=0.6).verdicts)
    kinds = {c["figure"]: c["equivalent"] for c in shown.as_dict()["contrasts"]}
    assert kinds["area"] is True and kinds["final"] is None


def test_smoothing_keeps_straight_lines_and_area_keeps_noise():
    assert smooth(np.arange(9.0), window=5) == pytest.approx(np.arange(9.0))
    noisy = summarise([0, 1, 2], [0.0, 1.0, 0.0], threshold=0.9, window=3)
    assert noisy.reached is False and noisy.area == pytest.approx(0.5)
    for bad in ([1, 1], [2, 1]):
        with pytest.raises(UsageError, match="ascend"):
            summarise(bad, [0.1, 0.2], threshold=0.5)


def curve(steps=20.0, area=0.6, final=0.9, reached=True, oscillation=0.02):
    return CurveSummary(
        area=area,
        steps_to_threshold=steps,
        reached=reached,
        final=final,
        oscillation=oscillation,
    )


def test_a_verdict_claims_what_its_interval_carries():
    # steps: differences −9, −10, −8, −9, −9 → −9, s = .7071, ± 2.776·.3162 = ± .878
    jitter = [0.00, 0.01, -0.01, 0.005, -0.005]
    swap = [0.01, -0.01, 0.01, -0.01, 0.005]
    a = {s: curve(steps=20.0 + [0, -1, 1, 0, 0][s], final=0.9 + jitter[s]) for s in range(5)}
    b = {s: curve(steps=29.0, final=0.9 + swap[s], area=0.6 + jitter[s]) for s in range(5)}
    found = compare_curves({"A": a, "B": b}, against="B", threshold=0.6)
    assert found.verdicts[0] == "A reaches 60 % earlier than B by 9 [8.1, 9.9] steps."
    assert found.verdicts[1].startswith("A and B are not distinguishable in mean accuracy")
    assert "final training accuracy (" in found.verdicts[1]
    assert [c["distinct"] for c in found.as_dict()["contrasts"]] == [True, False, False, False]


def test_a_verdict_turns_round_with_its_order():
    jitter = [0.00, 0.01, -0.01, 0.005, -0.005]
    high = {s: curve(final=0.9 + jitter[s]) for s in range(5)}
    low = {s: curve(final=0.8) for s in range(5)}
    up = compare_curves({"A": high, "B": low}, against="B", threshold=0.6).verdicts[0]
    down = compare_curves({"A": low, "B": high}, against="B", threshold=0.6).verdicts[0]
    assert up == "A ends at a higher training accuracy than B by 10 [9, 11] pp."
    assert down == "A ends at a lower training accuracy than B by 10 [9, 11] pp."


def test_correction_takes_back_a_lone_small_p():
    # p = .044 for the final value alone (.04/.01378 = 2.902, 4 degrees of freedom), not after four
    a = {s: curve(final=0.90 + [0.0, 0.05, 0.05, 0.02, 0.08][s]) for s in range(5)}
    b = {s: curve(final=0.90) for s in range(5)}
    found = compare_curves({"A": a, "B": b}, against="B", threshold=0.6)
    final = next(c for c in found.contrasts if c.figure.key == "final")
    assert final.result.difference.excludes(0.0) and not final.distinct
    assert "alone, " in found.verdicts[0] and "higher" not in found.verdicts[0]


def test_a_difference_needs_its_interval_and_its_test():
    wide = paired_seeds([0.9, 0.8, 0.7], [0.8, 0.8, 0.8])
    final = Figure(key="final", name="final value", more="is above", less="is below")
    lucky = Contrast(figure=final, first="A", second="B", result=wide, p_holm=0.01)
    assert not lucky.distinct and "not distinguishable" in sentence(lucky)


def test_censored_runs_are_named():
    a = {s: curve(steps=20.0 + s) for s in range(3)}
    b = {s: curve(steps=[60.0, 80.0, 80.0][s], reached=s == 0) for s in range(3)}
    text = " ".join(compare_curves({"A": a, "B": b}, against="B", threshold=0.6).verdicts)
    assert "(not reached by B in 2 of 3 seeds; counted as the last step)" in text
    never = {s: curve(steps=80.0, reached=False, final=0.1 * s) for s in range(3)}
    found = compare_curves({"A": never, "B": never}, against="B", threshold=0.6)
    assert all(c.figure.key != "steps_to_threshold" for c in found.contrasts)
    assert found.verdicts[-1] == "No run reaches the threshold."


def test_one_seed_is_called_an_illustration():
    found = compare_curves(
        {"A": {0: curve()}, "B": {0: curve(final=0.1)}}, against="B", threshold=0.6
    )
    assert found.contrasts == ()
    assert found.verdicts[0].startswith("One seed is an illustration, not a comparison")
    for word in ("higher", "earlier", "better", "gains"):
        assert word not in " ".join(found.verdicts)


def test_two_seeds_support_no_verdict():
    """Differences of 10 and 10.1 pp: Student's interval over two of them excludes 0 by far."""
    a = {s: curve(final=[0.9, 0.901][s]) for s in range(2)}
    b = {s: curve(final=0.8, reached=s == 0) for s in range(2)}
    found = compare_curves({"A": a, "B": b}, against="B", threshold=0.6)
    assert found.contrasts and not any(contrast.distinct for contrast in found.contrasts)
    assert found.verdicts == (
        "2 seeds are an illustration, not a comparison: A ended at 90.1 %, B at 80 % (training "
        "accuracy, mean of the last tenth).",
        "60 % was reached by A after 20 steps, B after 20 steps in 1 of 2 seeds. Other seeds may "
        "order them differently.",
    )
    pair = paired_seeds([0.9, 0.901], [0.8, 0.8])
    assert pair.difference.excludes(0.0)
    figure = Figure.named("accuracy")
    assert not Contrast(figure=figure, first="A", second="B", result=pair, p_holm=0.01).distinct


def test_differences_equal_up_to_rounding_support_no_verdict():
    """.2 pp in every seed up to a hundredth: the interval [.2, .2] says nothing of the spread."""
    a = {s: curve(final=0.8, oscillation=0.022 + 1e-6 * s) for s in range(4)}
    b = {s: curve(final=0.8, oscillation=0.020) for s in range(4)}
    found = compare_curves({"A": a, "B": b}, against="B", threshold=0.6)
    oscillation = next(c for c in found.contrasts if c.figure.key == "oscillation")
    assert oscillation.result.difference.excludes(0.0) and oscillation.p_holm < 0.001
    assert not oscillation.distinct
    assert "the same in every seed up to rounding" in " ".join(found.verdicts)
    # Rewards have no resolution of their own, steps that of the logged curve.
    later = {s: curve(steps=20.0 + s / 10) for s in range(4)}
    steps = compare_curves(
        {"A": later, "B": {s: curve(steps=30.0) for s in range(4)}}, against="B", threshold=0.6
    ).contrasts[0]
    assert steps.figure.key == "steps_to_threshold" and not steps.distinct


def test_every_figure_of_a_pair_of_models_has_a_verdict():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 3, 60) / 4
    better = base + 0.25 * rng.integers(0, 3, 60)
    figures = {
        Figure.named("sampled accuracy"): (better.tolist(), base.tolist()),
        Figure.named("pass@4"): (rng.permutation(base).tolist(), base.tolist()),
    }
    claim, rest = paired_verdicts("trained", "base", figures)
    assert claim.startswith("trained has a higher sampled accuracy than base by 2")
    assert rest.startswith("trained and base are not distinguishable in pass@4 (")


def test_only_shared_seeds_are_paired():
    a = {s: curve(final=0.9) for s in (0, 1, 2)}
    b = {s: curve(final=0.8) for s in (1, 2, 3)}
    assert compare_curves({"A": a, "B": b}, against="B", threshold=0.6).seeds == (1, 2)
    apart = compare_curves({"A": {0: curve()}, "B": {1: curve()}}, against="B", threshold=0.6)
    assert apart.verdicts == ("The runs share no seed, so there is nothing to pair.",)
    with pytest.raises(UsageError, match="did you mean grpo"):
        compare_curves({"grpo": a}, against="gpro", threshold=0.6)


def test_item_verdict_needs_both_tests():
    clear = item_verdict("trained", "base", paired_items([1] * 30 + [0] * 30, [0] * 60))
    assert clear.startswith("On the same 60 items trained gains 50 [")
    assert "30 gained, 0 lost, McNemar p < .001" in clear
    # 4 flips to none: the bootstrap excludes 0 but McNemar's p is .125
    few = item_verdict("trained", "base", paired_items([1] * 4 + [0] * 16, [0] * 20))
    assert "not distinguishable" in few and "p = .125" in few


def test_table_uses_own_interval_for_one_seed_and_students_for_several():
    def evaluation(value):
        return {
            "held_out": {"pass_at_8": Estimate(value=value, low=value - 0.125, high=value + 0.125)}
        }

    values = [0.6, 0.65, 0.7]
    table = figure_table({"base": [evaluation(0.25)], "grpo": [evaluation(v) for v in values]})
    assert table.cells["base", "held_out", "pass_at_8"] == Estimate(
        value=0.25, low=0.125, high=0.375
    )
    assert table.cells["grpo", "held_out", "pass_at_8"] == seed_mean(values)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(table, verdicts=["[red]not markup[/red]"], title="Final"))
    text = console.export_text()
    assert "pass@8 %" in text and "grpo (3 seeds)" in text and "[12.5, 37.5]" in text
    assert "[red]not markup[/red]" in text


def test_the_interval_of_a_share_ends_where_shares_do():
    # m = .8333, s = .2082, t = 4.303: .8333 ± .517; a reward of the same values has no such end.
    runs = [{"held_out": {"greedy": cell(v), "reward": cell(v / 2)}} for v in (0.6, 0.9, 1.0)]
    cells = figure_table({"grpo": runs}).cells
    assert cells["grpo", "held_out", "greedy"].high == 1.0
    assert cells["grpo", "held_out", "greedy"].low == pytest.approx(0.316, abs=1e-3)
    assert cells["grpo", "held_out", "reward"].high == pytest.approx(0.675, abs=1e-3)


def test_losses_and_correlations_below_one_are_no_shares():
    names = ("loss", "perplexity", "margin", "chosen_logp", "squared_error", "score_target")
    runs = [{"held_out": {name: cell(0.5) for name in (*names, "pair_accuracy")}}]
    table = figure_table({"rm": runs})
    assert [name for name in (*names, "pair_accuracy") if table.percent(name)] == ["pair_accuracy"]


def cell(value, *, half=0.05):
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half))


def lines_at(width, table, **more):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal_table(table, **more))
    return console.export_text().splitlines()


def three_models():
    def evaluation(value):
        figures = {"sampled": cell(value), "pass_at_8": cell(1.0)}
        return {"held_out_templates": figures, "larger_numbers": figures}

    models = {"base": 0.25, "softrank": 1.0, "grpo": 0.5}
    return figure_table({name: [evaluation(value)] for name, value in models.items()})


def test_a_table_of_three_models_has_one_line_per_figure_in_80_columns():
    lines = lines_at(80, three_models(), verdicts=["A sentence."])
    # Models; then for each split its heading and two figures; then the sentence after a gap.
    assert len(lines) == 1 + 2 * 3 + 2 and max(map(len, lines)) <= 80
    assert lines[1].strip() == "held-out templates" and lines[-1] == "A sentence."
    assert lines[2].split() == (
        "sampled % 25.0 [20.0, 30.0] 100.0 [95.0, 100.0] 50.0 [45.0, 55.0]".split()
    )
    assert lines[2].rstrip().endswith("55.0]") and lines[3].startswith("  pass@8 %")
    # The same columns in every section, whose tables are separate.
    assert lines[2] == lines[5]


def test_a_narrow_terminal_folds_cells_and_loses_nothing():
    lines = lines_at(50, three_models())
    assert max(map(len, lines)) <= 50
    # Every word of the wide table is there, in whatever order the folds put it.
    wide = sorted(" ".join(lines_at(120, three_models())).split())
    assert sorted(" ".join(lines).split()) == wide


def test_a_reward_that_is_the_accuracy_has_no_row():
    def rows(*rewards):
        runs = [{"held_out": {"sampled": cell(0.5), "reward": cell(r)}} for r in rewards]
        return [figure for _, figure in figure_table({"base": runs[:1], "grpo": runs[1:]}).rows]

    assert rows(0.5, 0.5) == ["sampled"]
    # One model whose reward says something else is enough to show it for all.
    assert rows(0.5, 0.7) == ["sampled", "reward"]
    only = figure_table({"base": [{"held_out": {"reward": cell(0.5)}}]})
    assert [figure for _, figure in only.rows] == ["reward"]


def coverage(seeds, *, experiments, rng):
    """Share of simulated paired experiments whose interval holds the true difference."""
    # Runs share a seed effect (common random numbers) that pairing must remove.
    shared = rng.normal(0.8, 0.1, (experiments, seeds))
    first = shared + rng.normal(0.02, 0.03, (experiments, seeds))
    second = shared + rng.normal(0.0, 0.03, (experiments, seeds))
    results = [paired_seeds(a, b) for a, b in zip(first, second, strict=True)]
    held = np.mean([r.difference.low <= 0.02 <= r.difference.high for r in results])
    width = np.mean([r.difference.high - r.difference.low for r in results])
    return held, width


def test_paired_intervals_cover_quickly():
    held, width = coverage(5, experiments=1500, rng=np.random.default_rng(0))
    assert 0.93 <= held <= 0.97
    # Pairing: s of the difference is .0424, so the width is 2·2.776·.0424·.94/√5 ≈ .099, not .27.
    assert width < 0.12


@pytest.mark.verify
@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_paired_intervals_cover(seeds):
    held, _ = coverage(seeds, experiments=10_000, rng=np.random.default_rng(seeds))
    assert 0.93 <= held <= 0.97


@pytest.mark.verify
@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_an_algorithm_against_itself_is_rarely_called_different(seeds):
    rng = np.random.default_rng(seeds)
    called, experiments = 0, 10_000
    for _ in range(experiments):
        runs = {
            name: {
                s: curve(
                    steps=float(np.round(rng.normal(30, 4))),
                    area=float(rng.normal(0.6, 0.02)),
                    final=float(rng.normal(0.9, 0.01)),
                    oscillation=float(rng.gamma(9, 0.002)),
                )
                for s in range(seeds)
            }
            for name in ("A", "B")
        }
        found = compare_curves(runs, against="B", threshold=0.6)
        called += any(contrast.distinct for contrast in found.contrasts)
    assert called / experiments <= 0.05

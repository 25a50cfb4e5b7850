"""Verdicts: sentences about paired comparisons that claim only what the intervals support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.evaluation.curves import CurveSummary
from groupwise.evaluation.paired import (
    Equivalence,
    ItemDifference,
    SeedDifference,
    equivalence,
    holm,
    paired_seeds,
)

SIGNIFICANCE = 0.05
MIN_SEEDS = 3
"""Minimum number of seeds for a claim."""
NAMED = 4
"""Most undecided figures that a sentence names; the table of contrasts has all of them."""
SHARE_RESOLUTION = 0.001


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A compared figure and its wording.

    Attributes:
        key: name in results ("final", "held_out.greedy").
        name: object of "not distinguishable in …".
        more, less: verb phrases for a first value above or below the second.
        unit: "pp" (shares, shown in percentage points), "steps", or "" for plain numbers.
        resolution: smallest difference between two values; shares are reported in tenths of a
            percentage point.
    """

    key: str
    name: str
    more: str
    less: str
    unit: str = "pp"
    resolution: float = 0.0

    @classmethod
    def named(cls, name: str, *, unit: str = "pp") -> Figure:
        """A figure whose name is its key, and which is higher or lower."""
        more, less = f"has a higher {name} than", f"has a lower {name} than"
        return cls(key=name, name=name, more=more, less=less, unit=unit)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One figure of two algorithms over paired seeds.

    Attributes:
        first, second: the algorithms; the difference is first minus second.
        p_holm: p corrected for all contrasts of the comparison.
        unreached: for steps to a threshold, seeds in which first and second never reached it.
        equivalence: test of a margin that was fixed beforehand; None without one.
    """

    figure: Figure
    first: str
    second: str
    result: SeedDifference
    p_holm: float
    unreached: tuple[int, int] = (0, 0)
    equivalence: Equivalence | None = None

    @property
    def distinct(self) -> bool:
        """Whether a difference may be claimed.

        Interval and corrected test must exclude 0, over at least `MIN_SEEDS` seeds whose
        differences vary by more than rounding.
        """
        return (
            self.result.difference.excludes(0.0)
            and self.p_holm <= SIGNIFICANCE
            and self.result.seeds >= MIN_SEEDS
            and not self.within_rounding
        )

    @property
    def within_rounding(self) -> bool:
        """Whether the differences agree up to rounding, so that their interval is too narrow."""
        shares = SHARE_RESOLUTION if self.figure.unit == "pp" else 0.0
        # Rounding two values to a resolution of 1 gives their difference a deviation of √(2/12).
        return self.result.deviation < max(self.figure.resolution, shares) * math.sqrt(1 / 6)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        effect = self.result.effect
        return {
            "figure": self.figure.key,
            "name": self.figure.name,
            "unit": self.figure.unit,
            "first": self.first,
            "second": self.second,
            "difference": self.result.difference.as_dict(),
            "p": self.result.p,
            "p_holm": self.p_holm,
            "effect": effect if effect == effect else None,
            "distinct": self.distinct,
            "unreached": list(self.unreached),
            "equivalent": None if self.equivalence is None else self.equivalence.equivalent,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All contrasts of paired algorithms, and their verdicts."""

    algorithms: tuple[str, ...]
    against: str
    seeds: tuple[int, ...]
    threshold: float
    metric: str
    contrasts: tuple[Contrast, ...] = ()
    verdicts: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}
        return values | {"contrasts": [contrast.as_dict() for contrast in self.contrasts]}


Curves = Mapping[str, Mapping[int, CurveSummary]]
Finals = Mapping[str, Mapping[str, Mapping[int, float]]]


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Values of one figure by algorithm and seed."""

    figure: Figure
    values: Mapping[str, Mapping[int, float]]
    unreached: Mapping[str, int] = field(default_factory=dict)


def compare_curves(
    curves: Curves,
    *,
    against: str,
    threshold: float,
    metric: str = "accuracy",
    finals: Finals | None = None,
    axis: str = "steps",
    margin: float | None = None,
) -> Comparison:
    """Compare every algorithm with a reference over the seeds that all of them share.

    Args:
        curves: summary of each run's learning curve, by algorithm and seed.
        against: the reference algorithm.
        threshold: level of `steps_to_threshold`, as a share.
        metric: name of the learning curve in the sentences.
        finals: further shares after training, by figure ("held-out greedy accuracy"), algorithm
            and seed; where an algorithm has no curve, they alone are compared.
        axis: unit of the x-axis.
        margin: difference of the area below which two algorithms count as equivalent; None claims
            no equivalence.

    Returns:
        Contrasts with Holm's correction over all of them, and verdicts. With fewer than `MIN_SEEDS`
        seeds the verdicts only describe; with one there are no contrasts.

    Raises:
        UsageError: `against` is not among the algorithms.

    Example:
        >>> def run(steps, final):
        ...     return CurveSummary(area=.5, steps_to_threshold=steps, reached=True, final=final,
        ...                         oscillation=.0)
        >>> runs = {"a": {0: run(20.0, .9)}, "b": {0: run(30.0, .8)}}
        >>> print(compare_curves(runs, against="b", threshold=.6).verdicts[0].partition(": ")[2])
        a ended at 90 %, b at 80 % (training accuracy, mean of the last tenth).

    Source: paired Student t and Holm 1979; claims require intervals that exclude 0.
    """
    if against not in curves:
        raise UsageError(
            f"against = {against!r}: must be one of the algorithms; {suggest(against, curves)}"
        )
    names = tuple(curves)
    trained = all(curves.values())  # a finished model has no curve, only final figures
    final_seeds = {n: {s for by in (finals or {}).values() for s in by.get(n, ())} for n in names}
    known = (set(by_seed) or final_seeds[name] for name, by_seed in curves.items())
    seeds = tuple(sorted(set.intersection(*known)))
    found = Comparison(
        algorithms=names, against=against, seeds=seeds, threshold=threshold, metric=metric
    )
    if not seeds or len(names) < 2:
        reason = "The runs share no seed" if len(names) > 1 else "There is one algorithm"
        return replace(found, verdicts=(f"{reason}, so there is nothing to pair.",))
    few = _illustration(curves, found, axis) if len(seeds) < MIN_SEEDS and trained else ()
    if len(seeds) == 1:
        return replace(found, verdicts=few)
    figures = [
        *(_curve_figures(curves, seeds, threshold, metric, axis) if trained else ()),
        *_final_figures(finals or {}, names, seeds),
    ]
    contrasts = _contrasts(figures, names, against, seeds, margin)
    note = (
        f"{len(seeds)} paired seeds. Intervals: 95 %, Student's t over the paired differences. "
        f"A difference is claimed only where its interval excludes 0 and Holm's p over all "
        f"{len(contrasts)} contrasts is at most .05."
    )
    verdicts = few or _verdicts(contrasts, curves, seeds)
    return replace(found, contrasts=contrasts, verdicts=verdicts, note=note)


def sentence(contrast: Contrast) -> str:
    """One contrast in words: a difference with its interval, or that none can be claimed.

    Example:
        >>> steps = Figure(key="steps", name="steps to 60 %", more="is later than",
        ...                less="is earlier than", unit="steps")
        >>> d = paired_seeds([20, 22, 24, 21, 23], [30, 31, 32, 31, 31])
        >>> sentence(Contrast(figure=steps, first="a", second="b", result=d, p_holm=d.p))
        'a is earlier than b by 9 [7.8, 10.2] steps'

    Source: claims require intervals that exclude 0.
    """
    if not contrast.distinct:
        pair = f"{contrast.first} and {contrast.second}"
        return f"{pair} are not distinguishable in {_undecided(contrast)}"
    value, low, high, unit = _scaled(contrast)
    verb = contrast.figure.more if value > 0 else contrast.figure.less
    low, high = (low, high) if value > 0 else (-high, -low)
    size = f"{_rounded(abs(value))} [{_rounded(low)}, {_rounded(high)}]{unit}"
    return f"{contrast.first} {verb} {contrast.second} by {size}{_not_reached(contrast)}"


def item_verdict(first: str, second: str, result: ItemDifference) -> str:
    """Greedy accuracy of two models on the same items in words.

    Example:
        >>> from groupwise.evaluation.paired import paired_items
        >>> pair = paired_items([1] * 9 + [0] * 91, [0] * 8 + [1] * 2 + [0] * 90)
        >>> print(item_verdict("trained", "base", pair).replace(" (", "\\n("))
        On the same 100 items trained gains 7 [2, 13] pp of greedy accuracy over base
        (8 gained, 1 lost, McNemar p = .039).

    Source: exact McNemar and paired bootstrap; a difference is claimed only where both agree.
    """
    d = result.difference
    value, low, high = (100 * x for x in (d.value, d.low, d.high))
    flips = f"{result.first_only} gained, {result.second_only} lost, McNemar {_p(result.p)}"
    head = f"On the same {result.items} items {first}"
    if d.excludes(0.0) and result.p <= SIGNIFICANCE:
        verb, low, high = ("gains", low, high) if value > 0 else ("loses", -high, -low)
        against = "over" if value > 0 else "against"
        size = f"{_rounded(abs(value))} [{_rounded(low)}, {_rounded(high)}] pp"
        return f"{head} {verb} {size} of greedy accuracy {against} {second} ({flips})."
    return (
        f"{head} and {second} are not distinguishable in greedy accuracy "
        f"({_signed(value)} [{_signed(low)}, {_signed(high)}] pp; {flips})."
    )


def paired_verdicts(
    first: str, second: str, values: Mapping[Figure, tuple[Sequence[float], Sequence[float]]]
) -> list[str]:
    """What differs between two models in several figures measured on the same items.

    Args:
        first, second: names of the models.
        values: of both models by figure, one per item in the same order.

    Returns:
        At most two sentences: the differences that can be claimed, and the rest.

    Example:
        >>> solved = [1.0, 0.5, 1.0, 0.75, 1.0, 0.5], [0.0, 0.0, 0.25, 0.0, 0.25, 0.0]
        >>> print(*paired_verdicts("trained", "base", {Figure.named("sampled accuracy"): solved}))
        trained has a higher sampled accuracy than base by 70.8 [51.1, 90.6] pp.

    Source: paired Student t over items; Holm 1979 over the figures.
    """
    results = [paired_seeds(a, b) for a, b in values.values()]
    contrasts = [
        Contrast(figure=figure, first=first, second=second, result=result, p_holm=p)
        for figure, result, p in zip(values, results, holm([r.p for r in results]), strict=True)
    ]
    return _pair_verdicts(contrasts)


def _curve_figures(
    curves: Curves, seeds: tuple[int, ...], threshold: float, metric: str, axis: str
) -> list[_Values]:
    level, unit = _level(threshold, metric), _unit(metric)
    spacing = max(runs[seed].spacing for runs in curves.values() for seed in seeds)
    wordings = {
        "steps_to_threshold": (
            f"{axis} to {level}", f"reaches {level} later than", f"reaches {level} earlier than"
        ),
        "area": (
            f"mean {metric} over training",
            *(f"has a {size} mean {metric} over training than" for size in ("higher", "lower")),
        ),
        "final": (
            f"final training {metric}",
            *(f"ends at a {size} training {metric} than" for size in ("higher", "lower")),
        ),
        "oscillation": ("oscillation", "oscillates more than", "oscillates less than"),
    }  # fmt: skip
    unreached = {
        name: sum(not runs[seed].reached for seed in seeds) for name, runs in curves.items()
    }
    if all(count == len(seeds) for count in unreached.values()):
        del wordings["steps_to_threshold"]
    return [
        _Values(
            figure=Figure(
                key=key,
                name=name,
                more=more,
                less=less,
                unit=axis if key == "steps_to_threshold" else unit,
                resolution=spacing if key == "steps_to_threshold" else 0.0,
            ),
            values={
                curve: {s: getattr(runs[s], key) for s in seeds} for curve, runs in curves.items()
            },
            unreached=unreached if key == "steps_to_threshold" else {},
        )
        for key, (name, more, less) in wordings.items()
    ]


def _final_figures(finals: Finals, names: tuple[str, ...], seeds: tuple[int, ...]) -> list[_Values]:
    """Figures that every run has, so that the same seeds are compared."""
    return [
        _Values(figure=Figure.named(key), values=values)
        for key, values in finals.items()
        if all(seed in values.get(name, {}) for name in names for seed in seeds)
    ]


def _contrasts(
    figures: Sequence[_Values],
    names: tuple[str, ...],
    against: str,
    seeds: tuple[int, ...],
    margin: float | None,
) -> tuple[Contrast, ...]:
    pairs = [(item, name) for name in names if name != against for item in figures]
    values = [
        ([item.values[name][s] for s in seeds], [item.values[against][s] for s in seeds])
        for item, name in pairs
    ]
    results = [paired_seeds(*both) for both in values]
    corrected = holm([result.p for result in results])
    return tuple(
        Contrast(
            figure=item.figure,
            first=name,
            second=against,
            result=result,
            p_holm=p,
            unreached=(item.unreached.get(name, 0), item.unreached.get(against, 0)),
            equivalence=equivalence(*both, margin=margin)
            if margin is not None and item.figure.key == "area"
            else None,
        )
        for (item, name), both, result, p in zip(pairs, values, results, corrected, strict=True)
    )


def _verdicts(
    contrasts: Sequence[Contrast], curves: Curves, seeds: tuple[int, ...]
) -> tuple[str, ...]:
    sentences = []
    for first in dict.fromkeys(contrast.first for contrast in contrasts):
        sentences += _pair_verdicts([each for each in contrasts if each.first == first])
    trained = all(curves.values())
    if trained and not any(runs[seed].reached for runs in curves.values() for seed in seeds):
        sentences.append("No run reaches the threshold.")
    return tuple(sentences)


def _pair_verdicts(contrasts: Sequence[Contrast]) -> list[str]:
    """What differs between two algorithms, then what is not distinguishable."""
    claims = [sentence(contrast) for contrast in contrasts if contrast.distinct]
    rest = [_undecided(contrast) for contrast in contrasts if not contrast.distinct]
    sentences = [f"{'; '.join(claims)}."] if claims else []
    if rest:
        pair = f"{contrasts[0].first} and {contrasts[0].second}"
        more = f"; and in {len(rest) - NAMED} more figures" if len(rest) > NAMED else ""
        named = "; ".join(rest[:NAMED])
        sentences.append(f"{pair} are not distinguishable in {named}{more}.")
    return sentences


def _undecided(contrast: Contrast) -> str:
    """A figure without a claim, and what is known about it."""
    value, low, high, unit = _scaled(contrast)
    if not contrast.result.difference.known:
        return f"{contrast.figure.name} ({_signed(value)}{unit} in every seed, so no interval)"
    text = f"{_signed(value)} [{_signed(low)}, {_signed(high)}]{unit}"
    if contrast.within_rounding:
        text += ", the same in every seed up to rounding"
    elif contrast.result.difference.excludes(0.0):
        text += f", {_p(contrast.result.p)} alone, {_p(contrast.p_holm)} after correction"
    if (test := contrast.equivalence) is not None:
        scale = 100 if contrast.figure.unit == "pp" else 1
        word = "equivalent" if test.equivalent else "not shown to be equivalent"
        text += f"; {word} within ±{_rounded(scale * test.margin)}{unit}, {_p(test.p)}"
    return f"{contrast.figure.name} ({text}){_not_reached(contrast)}"


def _scaled(contrast: Contrast) -> tuple[float, float, float, str]:
    """Value, low and high in their display unit, and that unit."""
    unit, d = contrast.figure.unit, contrast.result.difference
    scale = 100 if unit == "pp" else 1
    return scale * d.value, scale * d.low, scale * d.high, f" {unit}" if unit else ""


def _not_reached(contrast: Contrast) -> str:
    """Runs that never reached the threshold, whose steps are censored."""
    missed = [
        f"{name} in {count} of {contrast.result.seeds} seeds"
        for name, count in zip((contrast.first, contrast.second), contrast.unreached, strict=True)
        if count
    ]
    return f" (not reached by {', '.join(missed)}; counted as the last step)" if missed else ""


def _illustration(curves: Curves, found: Comparison, axis: str) -> tuple[str, ...]:
    """A description of runs over too few seeds for a claim."""
    level, metric, seeds = _level(found.threshold, found.metric), found.metric, found.seeds
    runs = {name: [by_seed[seed] for seed in seeds] for name, by_seed in curves.items()}
    finals = {name: _level(fmean(run.final for run in own), metric) for name, own in runs.items()}
    (first, end), *others = finals.items()
    ends = [f"{first} ended at {end}", *(f"{name} at {value}" for name, value in others)]
    reached = [f"{name} {_when_reached(own, axis)}" for name, own in runs.items()]
    count = "One seed is" if len(seeds) == 1 else f"{len(seeds)} seeds are"
    return (
        f"{count} an illustration, not a comparison: {', '.join(ends)} (training {metric}, mean of "
        "the last tenth).",
        f"{level} was reached by {', '.join(reached)}. Other seeds may order them differently.",
    )


def _when_reached(runs: Sequence[CurveSummary], axis: str) -> str:
    reached = [run.steps_to_threshold for run in runs if run.reached]
    if not reached:
        return "not at all"
    some = "" if len(reached) == len(runs) else f" in {len(reached)} of {len(runs)} seeds"
    return f"after {fmean(reached):g} {axis}{some}"


def _unit(metric: str) -> str:
    """Percentage points for shares; a reward has no unit."""
    return "" if metric.startswith("reward") else "pp"


def _level(value: float, metric: str) -> str:
    return f"{_rounded(100 * value)} %" if _unit(metric) else _rounded(value)


def _rounded(value: float) -> str:
    """One decimal, more below a tenth, so that no end is rounded to 0."""
    if abs(value) >= 0.1 or not value:
        return f"{value:.1f}".removesuffix(".0").replace("-", "−")
    return (f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.1g}").replace("-", "−")


def _signed(value: float) -> str:
    return f"+{_rounded(value)}" if value > 0 else _rounded(value)


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("= 0.", "= .")

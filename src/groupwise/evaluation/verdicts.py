"""Sentences made from numbers only: what paired runs show, no more than their intervals allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.evaluation.curves import CurveSummary
from groupwise.evaluation.paired import ItemDifference, SeedDifference, holm, paired_seeds

SIGNIFICANCE = 0.05
# A sentence that lists more figures than this is not read; all of them are in the contrasts.
NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What is compared, and the words for it.

    Attributes:
        key: name in results ("final", "held_out.greedy").
        name: object of "not distinguishable in …".
        more, less: verb phrases for a first that is above or below the second.
        unit: "pp" (shares, shown in percentage points), "steps", or "" for plain numbers.
    """

    key: str
    name: str
    more: str
    less: str
    unit: str = "pp"


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One figure of two algorithms over paired seeds.

    Attributes:
        first, second: the algorithms; the difference is first minus second.
        p_holm: p corrected for every contrast of the comparison.
        unreached: for steps to a threshold, seeds in which first and second never got there.
    """

    figure: Figure
    first: str
    second: str
    result: SeedDifference
    p_holm: float
    unreached: tuple[int, int] = (0, 0)

    @property
    def distinct(self) -> bool:
        """Whether a difference may be claimed: interval and corrected test both exclude 0."""
        return self.result.difference.excludes(0.0) and self.p_holm <= SIGNIFICANCE

    def as_dict(self) -> dict[str, Any]:
        """The contrast as plain JSON values."""
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
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired algorithms: every contrast, and the sentences that follow from them."""

    algorithms: tuple[str, ...]
    against: str
    seeds: tuple[int, ...]
    threshold: float
    metric: str
    contrasts: tuple[Contrast, ...] = ()
    verdicts: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        plain = {key: value for key, value in vars(self).items() if key != "contrasts"}
        plain |= {key: list(plain[key]) for key in ("algorithms", "seeds", "verdicts")}
        return plain | {"contrasts": [contrast.as_dict() for contrast in self.contrasts]}


Curves = Mapping[str, Mapping[int, CurveSummary]]
Finals = Mapping[str, Mapping[str, Mapping[int, float]]]


@dataclass(frozen=True, kw_only=True)
class _Values:
    """One figure's values by algorithm and seed."""

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
) -> Comparison:
    """Compare every algorithm with one of them over the seeds that all of them share.

    Args:
        curves: summary of each run's learning curve, by algorithm and seed.
        against: the algorithm that the others are compared with.
        threshold: level that `steps_to_threshold` of the summaries stands for, as a share.
        metric: what the curves show, for the sentences.
        finals: further shares at the end of training, by figure ("held-out greedy accuracy"),
            algorithm and seed.
        axis: what the curves are drawn over.

    Returns:
        Contrasts corrected together (Holm) and verdicts; with one seed no contrast, and verdicts
        that only describe.

    Raises:
        UsageError: `against` is not among the algorithms.

    Example:
        >>> def run(steps, final):
        ...     return CurveSummary(area=.5, steps_to_threshold=steps, reached=True, final=final,
        ...                         oscillation=.0, draw_down=.0)
        >>> runs = {"a": {0: run(20.0, .9)}, "b": {0: run(30.0, .8)}}
        >>> print(compare_curves(runs, against="b", threshold=.6).verdicts[0].partition(": ")[2])
        a ended at 90 %, b at 80 % (training accuracy, mean of the last tenth).

    Source: paired Student t and Holm 1979; the rule that claims follow intervals.
    """
    if against not in curves:
        raise UsageError(
            f"against = {against!r}: must be one of the algorithms; {suggest(against, curves)}"
        )
    names = tuple(curves)
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in curves.values()))))
    found = Comparison(
        algorithms=names, against=against, seeds=seeds, threshold=threshold, metric=metric
    )
    if not seeds or len(names) < 2:
        reason = "The runs share no seed" if len(names) > 1 else "There is one algorithm"
        return replace(found, verdicts=(f"{reason}, so there is nothing to pair.",))
    if len(seeds) == 1:
        return replace(found, verdicts=_illustration(curves, seeds[0], found, axis))
    figures = [
        *_curve_figures(curves, seeds, threshold, metric, axis),
        *_final_figures(finals or {}, names, seeds),
    ]
    contrasts = _contrasts(figures, names, against, seeds)
    note = (
        f"{len(seeds)} paired seeds. Intervals: 95 %, Student's t over the paired differences. "
        f"A difference is called only where its interval excludes 0 and Holm's p over all "
        f"{len(contrasts)} contrasts is at most .05."
    )
    return replace(
        found, contrasts=contrasts, verdicts=_verdicts(contrasts, curves, seeds), note=note
    )


def sentence(contrast: Contrast) -> str:
    """One contrast in words: a difference with its interval, or that there is none to be claimed.

    Example:
        >>> steps = Figure(key="steps", name="steps to 60 %", more="is later than",
        ...                less="is earlier than", unit="steps")
        >>> d = paired_seeds([20, 22, 24, 21, 23], [30, 31, 32, 31, 31])
        >>> sentence(Contrast(figure=steps, first="a", second="b", result=d, p_holm=d.p))
        'a is earlier than b by 9 [7.8, 10.2] steps'

    Source: the rule that claims follow intervals.
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
    """Two models on the same items in words, from the flips and the interval.

    Example:
        >>> from groupwise.evaluation.paired import paired_items
        >>> pair = paired_items([1] * 9 + [0] * 91, [0] * 8 + [1] * 2 + [0] * 90)
        >>> print(item_verdict("trained", "base", pair).replace(" (", "\\n("))
        On the same 100 items trained gains 7 [2, 13] pp over base
        (8 gained, 1 lost, McNemar p = .039).

    Source: exact McNemar and paired bootstrap; a difference is called only where both agree.
    """
    d = result.difference
    value, low, high = (100 * x for x in (d.value, d.low, d.high))
    flips = f"{result.first_only} gained, {result.second_only} lost, McNemar {_p(result.p)}"
    head = f"On the same {result.items} items {first}"
    if d.excludes(0.0) and result.p <= SIGNIFICANCE:
        verb, low, high = ("gains", low, high) if value > 0 else ("loses", -high, -low)
        against = "over" if value > 0 else "against"
        size = f"{_rounded(abs(value))} [{_rounded(low)}, {_rounded(high)}] pp"
        return f"{head} {verb} {size} {against} {second} ({flips})."
    return (
        f"{head} and {second} are not distinguishable "
        f"({_signed(value)} [{_signed(low)}, {_signed(high)}] pp; {flips})."
    )


def _curve_figures(
    curves: Curves, seeds: tuple[int, ...], threshold: float, metric: str, axis: str
) -> list[_Values]:
    level, unit = _level(threshold, metric), _unit(metric)
    figures = {
        "steps_to_threshold": Figure(
            key="steps_to_threshold",
            name=f"{axis} to {level}",
            more=f"reaches {level} later than",
            less=f"reaches {level} earlier than",
            unit=axis,
        ),
        "area": Figure(
            key="area",
            name=f"mean {metric} over training",
            more=f"has a higher mean {metric} over training than",
            less=f"has a lower mean {metric} over training than",
            unit=unit,
        ),
        "final": Figure(
            key="final",
            name=f"final training {metric}",
            more=f"ends at a higher training {metric} than",
            less=f"ends at a lower training {metric} than",
            unit=unit,
        ),
        "oscillation": Figure(
            key="oscillation",
            name="oscillation",
            more="oscillates more than",
            less="oscillates less than",
            unit=unit,
        ),
    }
    unreached = {
        name: sum(not runs[seed].reached for seed in seeds) for name, runs in curves.items()
    }
    if all(count == len(seeds) for count in unreached.values()):
        del figures["steps_to_threshold"]
    return [
        _Values(
            figure=figure,
            values={
                name: {s: getattr(runs[s], key) for s in seeds} for name, runs in curves.items()
            },
            unreached=unreached if key == "steps_to_threshold" else {},
        )
        for key, figure in figures.items()
    ]


def _final_figures(finals: Finals, names: tuple[str, ...], seeds: tuple[int, ...]) -> list[_Values]:
    """Figures that every run has; one without some seed would compare different seeds."""
    return [
        _Values(
            figure=Figure(
                key=key,
                name=key,
                more=f"has a higher {key} than",
                less=f"has a lower {key} than",
            ),
            values=values,
        )
        for key, values in finals.items()
        if all(seed in values.get(name, {}) for name in names for seed in seeds)
    ]


def _contrasts(
    figures: Sequence[_Values], names: tuple[str, ...], against: str, seeds: tuple[int, ...]
) -> tuple[Contrast, ...]:
    pairs = [(item, name) for name in names if name != against for item in figures]
    results = [
        paired_seeds(
            [item.values[name][s] for s in seeds], [item.values[against][s] for s in seeds]
        )
        for item, name in pairs
    ]
    corrected = holm([result.p for result in results])
    return tuple(
        Contrast(
            figure=item.figure,
            first=name,
            second=against,
            result=result,
            p_holm=p,
            unreached=(item.unreached.get(name, 0), item.unreached.get(against, 0)),
        )
        for (item, name), result, p in zip(pairs, results, corrected, strict=True)
    )


def _verdicts(
    contrasts: Sequence[Contrast], curves: Curves, seeds: tuple[int, ...]
) -> tuple[str, ...]:
    """For every pair of algorithms what differs, then what cannot be told apart."""
    sentences = []
    for first in dict.fromkeys(contrast.first for contrast in contrasts):
        mine = [contrast for contrast in contrasts if contrast.first == first]
        told = [sentence(contrast) for contrast in mine if contrast.distinct]
        rest = [_undecided(contrast) for contrast in mine if not contrast.distinct]
        sentences += [f"{'; '.join(told)}."] if told else []
        pair = f"{first} and {mine[0].second}"
        more = f"; and in {len(rest) - NAMED} more figures" if len(rest) > NAMED else ""
        named = "; ".join(rest[:NAMED])
        sentences += [f"{pair} are not distinguishable in {named}{more}."] if rest else []
    if not any(runs[seed].reached for runs in curves.values() for seed in seeds):
        sentences.append("No run reaches the threshold.")
    return tuple(sentences)


def _undecided(contrast: Contrast) -> str:
    """A figure that decides nothing, with what is known of it."""
    value, low, high, unit = _scaled(contrast)
    if not contrast.result.difference.known:
        return f"{contrast.figure.name} ({_signed(value)}{unit} in every seed, so no interval)"
    text = f"{_signed(value)} [{_signed(low)}, {_signed(high)}]{unit}"
    if contrast.result.difference.excludes(0.0):
        text += f", {_p(contrast.result.p)} alone, {_p(contrast.p_holm)} after correction"
    return f"{contrast.figure.name} ({text}){_not_reached(contrast)}"


def _scaled(contrast: Contrast) -> tuple[float, float, float, str]:
    """Value, low and high in the unit they are shown in, and that unit."""
    unit, d = contrast.figure.unit, contrast.result.difference
    scale = 100 if unit == "pp" else 1
    return scale * d.value, scale * d.low, scale * d.high, f" {unit}" if unit else ""


def _not_reached(contrast: Contrast) -> str:
    """Who never got to the threshold: a censored time, so the difference is restricted."""
    missed = [
        f"{name} in {count} of {contrast.result.seeds} seeds"
        for name, count in zip((contrast.first, contrast.second), contrast.unreached, strict=True)
        if count
    ]
    return f" (not reached by {', '.join(missed)}; counted as the last step)" if missed else ""


def _illustration(curves: Curves, seed: int, found: Comparison, axis: str) -> tuple[str, ...]:
    level, metric = _level(found.threshold, found.metric), found.metric
    ends = [f"{name} ended at {_level(runs[seed].final, metric)}" for name, runs in curves.items()]
    ends[1:] = [end.replace(" ended at ", " at ") for end in ends[1:]]
    reached = [
        f"{name} after {runs[seed].steps_to_threshold:g} {axis}"
        if runs[seed].reached
        else f"{name} not at all"
        for name, runs in curves.items()
    ]
    return (
        f"One seed is an illustration, not a comparison: {', '.join(ends)} (training {metric}, "
        "mean of the last tenth).",
        f"{level} was reached by {', '.join(reached)}. Another seed may order them otherwise.",
    )


def _unit(metric: str) -> str:
    """Differences of shares are percentage points; a reward has no unit."""
    return "" if metric.startswith("reward") else "pp"


def _level(value: float, metric: str) -> str:
    return f"{_rounded(100 * value)} %" if _unit(metric) else _rounded(value)


def _rounded(value: float) -> str:
    """One digit after the point, more below a tenth, so that no end is rounded to 0."""
    if abs(value) >= 0.1 or not value:
        return f"{value:.1f}".removesuffix(".0").replace("-", "−")
    return (f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.1g}").replace("-", "−")


def _signed(value: float) -> str:
    return f"+{_rounded(value)}" if value > 0 else _rounded(value)


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("= 0.", "= .")

"""The small pipelines of the papers: which lack results, what a finished one has shown, their page.

python studies/papers/collect.py todo                # pipelines without up-to-date results
python studies/papers/collect.py store NAME FOLDER   # the figures of a finished run, as JSON
python studies/papers/collect.py page                # docs/papers.md, from all results
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError
from groupwise.evaluation import paired_seeds, title_of
from groupwise.evaluation.intervals import Estimate
from groupwise.evaluation.tables import is_share
from groupwise.pipelines import packaged_pipelines, plan_table, read_pipeline
from groupwise.pipelines.eval_stage import sections_of
from groupwise.pipelines.over_seeds import combined
from groupwise.pipelines.summary import table_lines
from groupwise.rundir.files import replace_text

HERE = Path(__file__).parent
TWINS, RESULTS = HERE / "twins.toml", HERE / "results"
PAGE = HERE.parents[1] / "docs" / "papers.md"
SEEDS = 3
SHOWN = (
    *("greedy", "sampled", "length", "length_right", "length_wrong", "truncated"),
    *("length_deviation", "length_rmse", "calls", "reward", "corrected", "said_so"),
    *("seed_deviation",),
    *("korean_exact", "korean_reason", "korean_score", "context_pick"),
)
"""Figures of the page; the results hold all."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a paper says, as a difference that can be measured.

    Attributes:
        claim: in words.
        figure: of an evaluation, or of a stage: a metric, averaged over the steps of training, or
            one of its own figures.
        of: the model, or the stage.
        against: the same to compare with; None compares with `bound`.
        bound: a number.
        expected: the sign of the difference.
        section, against_section: headings of the tables with `of` and `against`; None stands for
            a metric, and for the section of `of`.
    """

    claim: str
    figure: str
    of: str
    against: str | None = None
    bound: float = 0.0
    expected: str = "higher"
    section: str | None = "table"
    against_section: str | None = None

    def differences(self, seeds: Mapping[str, Any]) -> Estimate:
        """The mean difference, with Student's t interval over paired seeds; NaN where a seed lacks
        the figure, as it does the length of wrong answers of a model that gave none."""
        first = self._values(seeds, self.of, self.section)
        second: list[float | None] = [self.bound] * len(first)
        if self.against is not None:
            section = self.against_section or self.section
            second = self._values(seeds, self.against, section)
        if None in first or None in second:
            return Estimate(value=math.nan, low=math.nan, high=math.nan)
        return paired_seeds(first, second).difference

    def _values(
        self, seeds: Mapping[str, Any], name: str, section: str | None
    ) -> list[float | None]:
        """The figure of a model or stage in every seed.

        Raises:
            UsageError: there is no such model or stage, or nothing has that figure.
        """
        places = [
            run["metrics"] if section is None else run["figures"].get(section, {})
            for run in seeds.values()
        ]
        named = all(name in place for place in places)
        if not named or not any(self.figure in of for place in places for of in place.values()):
            where = "metrics" if section is None else section
            raise UsageError(f"{where}: have no {self.figure!r} of {name!r}.")
        return [place[name].get(self.figure) for place in places]

    def verdict(self, difference: Estimate) -> str:
        """Whether the interval has the expected sign."""
        if math.isnan(difference.value):
            return "not measured in every seed"
        if not difference.known:
            return "no interval"
        below, above = difference.high < 0, difference.low > 0
        if self.expected == "lower":
            below, above = above, below
        return "shown" if above else "the opposite" if below else "not shown"


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A small pipeline.

    Attributes:
        paper: name and number.
        rows: of docs/coverage.md.
        remark: what a reader should know of the result.
        effects: what the paper says of it.
    """

    paper: str
    rows: Sequence[int]
    effects: Sequence[Effect]
    remark: str = ""


def twins(path: Path = TWINS) -> dict[str, Twin]:
    """The twins by the name of their pipeline.

    Raises:
        UsageError: a name that is no packaged pipeline, or an impossible effect.
    """
    found = {}
    for name, values in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if name not in packaged_pipelines():
            raise UsageError(f"{path.name}: {name!r} is no packaged pipeline.")
        effects = [
            Effect(**(each | ({"section": None} if each.pop("metric", False) else {})))
            for each in values.pop("effects")
        ]
        for each in effects:
            if each.expected not in ("higher", "lower"):
                raise UsageError(f"{name}: expected = {each.expected!r}: must be higher or lower.")
        found[name] = Twin(**values, effects=effects)
    return found


def keys(name: str) -> dict[str, str]:
    """The hashes of a pipeline's stages for its first seed."""
    pipeline = read_pipeline(name, seed=first_seed(name))
    return {state.stage.name: state.key for state in plan_table(pipeline)}


def first_seed(name: str) -> int:
    """The seed from which a pipeline counts."""
    return read_pipeline(name).seed or 0


def result(name: str) -> dict[str, Any] | None:
    """The stored result of a pipeline."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def todo() -> list[str]:
    """The pipelines without results of enough seeds, or with results of other settings."""
    missing = []
    for name in twins():
        stored = result(name)
        if stored is None or len(stored["seeds"]) < SEEDS or stored["keys"] != keys(name):
            missing.append(name)
    return missing


def collect(name: str, folder: Path, twin: Twin) -> dict[str, Any]:
    """The figures of every finished seed in `folder/seed-N`.

    Raises:
        UsageError: no seed is finished, stages of other settings, or a figure that an effect needs
            is not there.
    """
    metrics = {
        (stage, each.figure)
        for each in twin.effects
        for stage in (each.of, each.against)
        if each.section is None and stage is not None
    }
    seeds: dict[str, Any] = {}
    start = first_seed(name)
    for number in range(start, start + len([*folder.glob("seed-*")])):
        pipeline = read_pipeline(name, output=folder / f"seed-{number}", seed=number)
        states = plan_table(pipeline)
        if unfinished := [each.stage.name for each in states if each.state != "done"]:
            print(f"{folder / f'seed-{number}'}: {unfinished[0]} is not up to date; left out")
            continue
        figures: dict[str, Any] = {}
        for state in states:
            text = (pipeline.output / state.stage.name / "stage.json").read_text(encoding="utf-8")
            for section, models in sections_of(
                json.loads(text)["figures"], state.stage.name
            ).items():
                figures[section] = {
                    model: {key: rounded(cell["value"]) for key, cell in cells.items()}
                    for model, cells in models.items()
                }
        means: dict[str, dict[str, float]] = {}
        for stage, metric in sorted(metrics):
            means.setdefault(stage, {})[metric] = mean_metric(pipeline.output / stage, metric)
        minutes = round(sum(seconds(pipeline.output).values()) / 60, 1)
        seeds[str(number)] = {"minutes": minutes, "figures": figures, "metrics": means}
    if not seeds:
        raise UsageError(f"{folder}: holds no finished seed of {name}.")
    for each in twin.effects:
        each.differences(seeds)
    return {"pipeline": name, "keys": keys(name), "seeds": seeds}


def mean_metric(stage: Path, metric: str) -> float:
    """The mean of a metric over the steps of a training stage; a figure of another stage."""
    record = json.loads((stage / "stage.json").read_text(encoding="utf-8"))
    if metric in record["figures"]:
        return float(record["figures"][metric])
    lines = (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [row[metric] for row in map(json.loads, lines) if row.get(metric) is not None]
    if not values:
        raise UsageError(f"{stage}: its metrics have no {metric!r}.")
    return round(sum(values) / len(values), 6)


def rounded(value: float | None) -> float | None:
    """A figure as it is stored."""
    return None if value is None else round(value, 6)


def seconds(output: Path) -> dict[str, float]:
    """How long each stage took; an interrupted one counts from its last start."""
    lines = (output / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["stage"]: row["seconds"] for row in map(json.loads, lines)}


def page(known: Mapping[str, Twin], results: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The page: one line per effect, then the figures of every pipeline."""
    lines = [
        "# Claims of papers on small models",
        "",
        "Each pipeline on this page tests claims of a paper on a model that trains in minutes on "
        f"two cores. `groupwise pipeline NAME --seeds {SEEDS}` runs one of them; it starts from "
        "the bundled model with 0.7 million parameters or from a model that its first stage "
        f"trains. `make papers` runs all of them over {SEEDS} seeds and writes this page. It can "
        "be interrupted, and skips pipelines whose results are up to date.",
        "",
        "Differences are means over paired seeds with 95 % Student t intervals. All seeds answer "
        "the same held-out prompts, so the intervals describe training and sampling, not the "
        "choice of prompts. An effect is **shown** if the whole interval has the expected sign. "
        f"*Not shown* does not mean that there is no effect: intervals over {SEEDS} seeds are "
        "wide. They are not corrected for the number of effects on this page.",
        "",
        "| pipeline | claim | measured | difference | result |",
        "|---|---|---|---|---|",
    ]
    for name, twin in known.items():
        stored = results.get(name)
        for each in twin.effects:
            if stored is None:
                cells = ["–", "not run yet"]
            else:
                difference = each.differences(stored["seeds"])
                cells = [shown(each, difference, stored["seeds"]), each.verdict(difference)]
                count = len(stored["seeds"])
                cells[1] += "" if count >= SEEDS else f" ({count} of {SEEDS} seeds)"
            lines.append(
                f"| [`{name}`](#{name}) | {each.claim} | {measured(each)} | {' | '.join(cells)} |"
            )
    for name, twin in known.items():
        stored = results.get(name)
        rows = ", ".join(map(str, twin.rows))
        covered = f"Coverage: [row{'s' if len(twin.rows) > 1 else ''} {rows}](coverage.md)."
        lines += [
            "",
            f"## {name}",
            "",
            " ".join(filter(None, (f"{twin.paper}.", twin.remark, covered))),
        ]
        if stored is not None:
            lines += ["", *of_seeds(stored["seeds"])]
    return "\n".join(lines) + "\n"


def measured(effect: Effect) -> str:
    """What a difference is of, in words."""
    accuracy = " accuracy" if effect.figure in ("greedy", "sampled") else ""
    figure = title_of(effect.figure) + accuracy
    if effect.against is None:
        return f"{figure} of {effect.of}" + (f" − {effect.bound:g}" if effect.bound else "")
    places = [effect.section, effect.against_section or effect.section]
    names = [effect.of, effect.against]
    if places[0] != places[1]:
        names = [f"{name} ({place})" for name, place in zip(names, places, strict=True)]
    elif places[0] not in (None, "table"):
        figure += f" ({places[0]})"
    return f"{figure}: {names[0]} − {names[1]}"


def shown(effect: Effect, difference: Estimate, seeds: Mapping[str, Any]) -> str:
    """A difference with its unit and as many decimals as its interval supports."""
    if math.isnan(difference.value):
        return "–"
    values = effect._values(seeds, effect.of, effect.section)
    share = is_share(effect.figure, values) and effect.section is not None
    scale, unit = (100, " points") if share else (1, "")
    if not difference.known:
        return f"{scale * difference.value:+.3g}{unit}".replace("-", "−")
    half = scale * (difference.high - difference.low) / 2
    decimals = max(1, 1 - math.floor(math.log10(half))) if half and not share else 1
    value, low, high = (
        f"{scale * each:+.{decimals}f}"
        for each in (difference.value, difference.low, difference.high)
    )
    return f"{value} [{low}, {high}]{unit}".replace("-", "−")


def of_seeds(seeds: Mapping[str, Any]) -> list[str]:
    """The figures of all models over seeds, a table per section."""
    minutes = [run["minutes"] for run in seeds.values()]
    lines = [
        f"{len(seeds)} seeds; {min(minutes):g} to {max(minutes):g} minutes each, on a shared "
        "machine."
    ]
    sections = next(iter(seeds.values()))["figures"]
    for section, models in sections.items():
        if not all(section in run["figures"] for run in seeds.values()):
            continue  # Not every seed has wrong answers to recover from.
        cells = [
            {
                model: {
                    key: {"value": value}
                    for key, value in run["figures"][section][model].items()
                    if key in SHOWN
                }
                for model in models
            }
            for run in seeds.values()
        ]
        stage, _, part = section.partition(": ")
        of_part = f", {part.replace('_', ' ')}" if part else ""
        heading = [] if len(sections) == 1 else ["", f"Stage `{stage}`{of_part}:"]
        lines += [*heading, "", *table_lines(combined(cells)[0])]
    return lines


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["todo"]:
            print("\n".join(todo()))
        case ["store", name, folder]:
            values = collect(name, Path(folder), twins()[name])
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{name}.json"
            replace_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
            print(path)
        case ["page"]:
            known = twins()
            replace_text(PAGE, page(known, {name: result(name) for name in known}))
            print(PAGE)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

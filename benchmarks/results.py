"""Writes RESULTS.md from the figures in results/*.json and the notes in notes.md.

    python benchmarks/results.py

It draws bounds.png as well. Figures of runs with --quick are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bounds
import cluster
import critic_step
import kernel_gains
import memory
import preferences
import rollouts
import scaling
import start
import step
import tools
import update
from harness import HERE, show, table

TITLES = {
    "step": "A whole step, against TRL",
    "rollouts": "Rollouts, against transformers and vLLM",
    "update": "The update and the decoding step, against the machine",
    "kernels": "What each kernel gains",
    "scaling": "How a step grows",
    "start": "Start and stop",
    "memory": "The plan of a run's memory, against the run",
    "preferences": "Preferences and reward models, against TRL",
    "critic_step": "The cost of a critic",
    "tools": "Tools inside rollouts, against requests that continue",
    "cluster": "Several processes on Ray",
}
COLUMNS = {
    "step": step.COLUMNS,
    "rollouts": rollouts.COLUMNS,
    "update": update.COLUMNS,
    "kernels": kernel_gains.COLUMNS,
    "scaling": scaling.COLUMNS,
    "start": start.COLUMNS,
    "memory": memory.COLUMNS,
    "preferences": preferences.COLUMNS,
    "critic_step": critic_step.COLUMNS,
    "tools": tools.COLUMNS,
    "cluster": cluster.COLUMNS,
}
ABOUT = {"step": step.__doc__, "rollouts": rollouts.__doc__, "update": update.__doc__,
         "kernels": kernel_gains.__doc__, "scaling": scaling.__doc__,
         "start": start.__doc__,
         "memory": memory.__doc__, "preferences": preferences.__doc__,
         "critic_step": critic_step.__doc__, "tools": tools.__doc__,
         "cluster": cluster.__doc__}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that a case must reach: at least or at most `value`, or what another case has."""

    benchmark: str
    case: str
    figure: str
    value: float = float("nan")
    at_least: bool = True
    peer: str | None = None
    of_case: str | None = None

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value


AGAINST = {
    "step": "TRL", "memory": "", "scaling": "", "preferences": "TRL",
    "critic_step": "no critic", "tools": "see below", "cluster": "one process",
    "first_over_later": "later steps",
}  # fmt: skip
"""What a figure or the figures of a benchmark are held against."""
WIDEST = 7
"""Most columns of a table that a page of the site shows without scrolling."""
HALF_MB = {"fp32": 9500.0, "recommended": 9500.0, "lora": 3000.0}
"""Memory of half a billion parameters, by case."""


GOALS = {
    "embedded": 6.0,
    "embedded@8-rows": 6.0,
    "medium-fp32": 5.3,
    "medium-recommended": 8.0,
    "cpu-0.5b-fp32": 6.5,
    "cpu-0.5b-recommended": 9.0,
    "cpu-0.5b-lora": 9.0,
}
"""Of whole steps where there is AVX-512: times as fast as TRL."""


def _targets() -> list[Target]:
    def least(benchmark: str, case: str, value: float, peer: str | None = None) -> Target:
        return Target(benchmark=benchmark, case=case, figure="speedup", value=value, peer=peer)

    def most(benchmark: str, case: str, figure: str, value: float) -> Target:
        return Target(benchmark=benchmark, case=case, figure=figure, value=value, at_least=False)

    return [
        least("rollouts", "small-equal", 3.0, "generate"),
        least("rollouts", "small-equal", 3.0, "vllm"),
        least("rollouts", "embedded-queue", 6.0, "generate"),
        least("rollouts", "medium-fp32", 2.5, "generate"),
        least("rollouts", "medium-bf16", 2.5, "generate"),
        *(least("step", case, value) for case, value in GOALS.items()),
        *(
            least("step", f"{case}@one-pass", GOALS[case])
            for case in ("medium-fp32", "medium-recommended")
        ),
        *(
            most("step", f"cpu-0.5b-{case}", "ours_peak_mb", limit)
            for case, limit in HALF_MB.items()
        ),
        *(least("preferences", f"{what}-2", 3.0) for what in ("dpo", "reward")),
        least("preferences", "reward-8", 12.0),
        most("critic_step", "one-epoch", "cost", 1.8),
        *(least("tools", f"{of}-24", 2.0) for of in ("prompt", "alone")),
        *(least("tools", f"{of}-300", 3.5) for of in ("prompt", "alone")),
        least("tools", "slow-tool", 0.8),
        least("tools", "stragglers", 2.0),
        least("step", "long-prompt-fp32", 6.0),
        least("step", "long-prompt-recommended", 8.0),
        *(most("step", f"medium-fp32{of}", "memory_ratio", 1 / 6) for of in ("", "@one-pass")),
        *(
            most("step", f"medium-recommended{of}", "memory_ratio", 1 / 3)
            for of in ("", "@one-pass")
        ),
        most("update", "update-fp32", "over_bound", 1.2),
        most("update", "update-bf16", "over_bound", 1.25),
        most("update", "long-prompt-fp32", "with_attention", 1.25),
        most("update", "long-prompt-bf16", "with_attention", 1.35),
        most("update", "decode-fp32", "over_bound", 1.35),
        most("update", "decode-bf16", "over_bound", 1.8),
        most("update", "vocab-152k", "logits_peak_mb", 300.0),
        # Slowed down no more than the peer.
        Target(benchmark="step", case="embedded beside 2", figure="speedup", of_case="embedded"),
        *(
            most("step", case, "first_over_later", 1.3)
            for case in ("embedded", "medium-fp32", "cpu-0.5b-recommended", "cpu-0.5b-lora")
        ),
        most("memory", "cpu-0.5b-8bit", "resident_mb", 6500.0),
        most("memory", "cpu-0.5b-nf4", "resident_mb", 2000.0),
        *(most("scaling", axis, "growth", 1.1) for axis in scaling.AXES),
        most("cluster", "demo", "ratio", 1.10),
        most("cluster", "medium", "ratio", 1.03),
        *(least("cluster", case, 1.3, "in turn") for case in ("ahead", "streaming")),
    ]


def _targets_with(speedups: dict[str, float]) -> list[Target]:
    """Those of other processors: speed against TRL, and what the stages and the growth must reach
    everywhere."""
    return [
        *(
            Target(benchmark="step", case=case, figure="speedup", value=value)
            for case, value in speedups.items()
        ),
        *(
            each
            for each in _targets()
            if each.benchmark in ("update", "scaling") or each.of_case == "embedded"
        ),
    ]


Found = dict[str, list[dict[str, Any]]]
"""The runs of every benchmark: its cases may be measured a few at a time."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Figures of another processor than that of the first tables, AMD's Zen 5.

    Attributes:
        folder: of `results`.
        speedups: targets by case.
    """

    folder: str
    title: str
    about: str
    speedups: dict[str, float]

    def section(self, found: Found) -> str:
        """Its targets and all runs."""
        runs = [_run(name, content) for name, contents in found.items() for content in contents]
        targets = against_targets(found, _targets_with(self.speedups))
        return "\n\n".join([f"## {self.title}", self.about, targets, *runs])


PROCESSORS = (
    Processor(
        folder="zen-4",
        title="AMD, Zen 4",
        about="The same benchmarks on two cores of Zen 4, which computes instructions of AVX-512 "
        "in two halves: large products run at 200 GFLOP/s in float32, where those of the first "
        "tables ran at 390. Medium steps of TRL, much of whose time is not products, take 1.2 to "
        "1.7 times as long as there; ours, of whose time products are most, twice as long.",
        speedups=GOALS,
    ),
    Processor(
        folder="with-amx",
        title="Intel, with AMX",
        about="The same benchmarks on two cores of a Xeon with AMX, whose products of bfloat16 are "
        "six times as fast as those of float32, and whose memory moves 20 GB/s. What is not a "
        "product, and the reading of weights, weighs more there.",
        speedups=GOALS,
    ),
    Processor(
        folder="without-avx512",
        title="Without AVX-512",
        about="The same benchmarks on a processor that has AVX2 and neither AVX-512 nor products "
        "of bfloat16. PyTorch multiplies bfloat16 there at a seventh of the speed of float32 or "
        "less, so TRL computes in float32, its fastest setting, where our side computes in "
        "bfloat16, and the bound of bfloat16 is the rate of our own products.",
        speedups={"embedded": 5.0, "medium-fp32": 4.0, "medium-recommended": 6.0},
    ),
)


PICTURE = """![Time of each stage against its bound](bounds.png)

A bar is the time of a stage over its bound, as the section on the update defines it; with long
prompts, the products of attention are in the bound."""


def read(folder: Path) -> Found:
    """Figures by benchmark; those of --quick runs say nothing and are left out."""
    found: Found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("quick"):
            print(f"{path.name}: left out, made with --quick", file=sys.stderr)
            continue
        found.setdefault(content.get("benchmark", path.stem), []).append(content)
    order = [*TITLES, *sorted(found.keys() - TITLES.keys())]
    return {name: found[name] for name in order if name in found}


def against_targets(found: Found, targets: Sequence[Target]) -> str:
    """Every target with what was measured."""
    rows = []
    for target in targets:
        if target.of_case is not None:
            other = _measured(replace(target, case=target.of_case), found)
            target = replace(target, value=float("nan") if other is None else _middle(other))
        measured = _measured(target, found)
        sign = "≥" if target.at_least else "≤"
        rows.append(
            {
                "benchmark": target.benchmark,
                "case": target.case,
                "figure": target.figure.replace("_", " "),
                "against": target.peer
                or AGAINST.get(target.figure)
                or AGAINST.get(target.benchmark, "bound"),
                "measured": measured if measured is not None else "not measured",
                "target": f"{sign} {show(target.value)}",
                "met": _verdict(target, measured),
            }
        )
    columns = ("benchmark", "case", "figure", "against", "measured", "target", "met")
    return table(rows, columns)


def _measured(target: Target, found: Found) -> Any:
    """The figure of a target, of the first run that has it; for growth, the largest exponent of
    time on the axis. None where there is none."""
    rows = [
        row
        for run in found.get(target.benchmark, [])
        for row in run.get("cases", [])
        if row["case"] == target.case and target.peer in (None, row.get("peer"))
    ]
    if target.figure == "growth":
        return max((row["growth"]["time"] for row in rows if row["growth"]), default=None)
    return rows[0].get(target.figure) if rows else None


def _middle(measured: Any) -> float:
    return float(measured["median"] if isinstance(measured, dict) else measured)


def _verdict(target: Target, measured: Any) -> str:
    if measured is None:
        return ""
    return "yes" if target.met(_middle(measured)) else "no"


def section(name: str, contents: list[dict[str, Any]]) -> str:
    """One benchmark: what it does, and of each of its runs how to repeat it, where it ran, its
    figures."""
    lines = [f"## {TITLES.get(name, name)}", ""]
    if ABOUT.get(name):
        lines += [_prose(ABOUT[name] or ""), ""]
    return "\n".join(lines) + "\n" + "\n\n".join(_run(name, content) for content in contents)


def _run(name: str, content: dict[str, Any]) -> str:
    cases = content.get("cases")
    if cases is None:
        figures = [{"figure": key, "value": value} for key, value in content.items()]
        return table(figures, ("figure", "value"))
    columns = COLUMNS.get(name) or tuple(key for key in cases[0] if key != "repeats")
    lines = ["```sh", content["command"], "```", ""] if "command" in content else []
    lines += [f"- {line}" for line in _surroundings(content)]
    lines += ["", _figures(cases, columns)]
    return "\n".join(lines)


def _figures(cases: list[dict[str, Any]], columns: Sequence[str]) -> str:
    """The figures of the cases: one row each, or, where that is wider than a page, one column."""
    columns = [name for name in columns if any(case.get(name) is not None for case in cases)]
    if len(columns) <= WIDEST:
        return table(cases, columns)
    named = {
        f"{case['case']}, {case['peer']}" if "peer" in case else case["case"]: case
        for case in cases
    }
    figures = [name for name in columns if name not in ("case", "peer")]
    turned = [
        {
            "figure": key.replace("_", "\N{NO-BREAK SPACE}"),
            **{name: case.get(key) for name, case in named.items()},
        }
        for key in figures
    ]
    names = [*named]
    starts = range(0, len(names), WIDEST - 2)
    parts = [("figure", *names[start : start + WIDEST - 2]) for start in starts]
    return "\n\n".join(table(turned, part) for part in parts)


def _prose(doc: str) -> str:
    """A module's docstring without its command line, which stands below with its options."""
    parts = [part for part in doc.strip().split("\n\n") if not part.startswith("    python ")]
    return "\n\n".join(
        part if part.startswith("    ") else " ".join(part.split()) for part in parts
    )


def _surroundings(content: dict[str, Any]) -> list[str]:
    machine = content.get("hardware", {})
    lines = []
    if machine:
        lines.append(
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
            f"{machine['system']}" + (f", {machine['card']}" if "card" in machine else "")
            + f"; threads {content.get('threads')}, load {show(machine['load_before'])} before"
        )  # fmt: skip
    if "commit" in content:
        lines.append(f"commit {content['commit']}")
    if "remark" in content:
        lines.append(content["remark"])
    for side, versions in content.get("versions", {}).items():
        lines.append(f"{side}: " + ", ".join(f"{name} {v}" for name, v in versions.items()))
    if "repeats" in content:
        lines.append(f"{content['repeats']} repeats; a figure with brackets is median (low–high)")
    return lines


def page(found: Found, notes: str, *, others: Sequence[str] = ()) -> str:
    """RESULTS.md.

    Args:
        others: the sections of other processors.
    """
    parts = [
        "# Speed and memory",
        "Generated by `python benchmarks/results.py` from `benchmarks/results/*.json`. Ratios are "
        "taken repeat by repeat between processes that take turns on one machine; seconds of "
        "different machines, or of different files here, are not comparable.",
        "To compare two commits on one machine, in alternating turns of one run: "
        "`python benchmarks/compare_commits.py BEFORE [AFTER]` (embedded step, medium step in "
        "float32 and bfloat16, small rollout; `--help` lists the options).",
        "## Against the targets",
        against_targets(found, _targets()),
        PICTURE,
        *(section(name, contents) for name, contents in found.items()),
        *others,
        notes.strip(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    found = read(HERE / "results")
    others = [
        each.section(runs) for each in PROCESSORS if (runs := read(HERE / "results" / each.folder))
    ]
    notes = (HERE / "notes.md").read_text(encoding="utf-8")
    measured = [row for run in found.get("update", []) for row in run["cases"]]
    targets = {target.case: target.value for target in _targets() if target.case in bounds.STAGES}
    bounds.draw(bounds.bars(measured, targets), HERE / "bounds.png")
    (HERE / "RESULTS.md").write_text(page(found, notes, others=others), encoding="utf-8")
    print(f"benchmarks/RESULTS.md: {', '.join(found) or 'no figures yet'}")


if __name__ == "__main__":
    main()

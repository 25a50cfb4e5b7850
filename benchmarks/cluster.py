"""What several processes cost and gain: steps of a run on Ray with one rank and one replica.

    python benchmarks/cluster.py --json benchmarks/results/cluster.json

Against one process: both sides take the same steps of the recipe `word-problems` and take turns,
ten steps at a time (`medium`: one). A run does not pause between its steps; after a pause several
processes take longer to wake up than one. `cpu` is CPU seconds per step by kind of process, Ray's
own among them, and `cpu_ratio` the quotient of their sums: on a busy machine it says more than the
time. The first three turns do not count.

    demo         the recipe as it is
    demo-scorer  with a reward worker on this machine, against one in a scorer process
    medium       with a model of 53 M parameters

Sampling beside the update, against both in turn on the same two processes: each side takes 40 steps
after 10 that do not count, alone on the machine, five times.

    ahead        `ahead = 2`
    streaming    `streaming.max_staleness = 2`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from typing import Any

import harness
from harness import Report, of, ratios, say, spread

COSTS: dict[str, tuple[list[str], list[str]]] = {
    "demo": ([], ["cluster.replicas=1"]),
    "demo-scorer": (["reward_pool.workers=1"], ["cluster.replicas=1", "cluster.scorers=1"]),
    "medium": ([], ["cluster.replicas=1"]),
}
"""Settings of the run in one process, and those of the run on Ray."""
GAINS = {"ahead": "ahead=2", "streaming": "streaming.max_staleness=2"}
"""How the run on Ray samples beside the update."""
CASES = (*COSTS, *GAINS)
COLUMNS = (
    "case", "cluster_seconds", "alone_seconds", "ratio", "cpu", "alone_cpu", "cpu_ratio", "stages",
    "beside_seconds", "in_turn_seconds", "speedup",
)  # fmt: skip
STEPS = ["steps=10000", "evaluation.every_steps=0", "checkpoint.every_steps=0"]
WARM_UP = 3
TURN = 10
"""Steps that one side takes before the other one."""
BLOCK, BEFORE, BLOCKS = 40, 10, 5
"""Steps that are measured at a time, those before them, and how often."""
MEDIUM = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 7}


def total(answers: list[dict[str, Any]]) -> list[float]:
    """CPU seconds of each step, all processes together."""
    return [sum(answer["cpu"].values()) for answer in answers]


def by_kind(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Mean CPU seconds per step of every kind of process: the clock counts in hundredths."""
    return {kind: statistics.mean(a["cpu"][kind] for a in answers) for kind in answers[-1]["cpu"]}


def save_medium(folder: str) -> str:
    """Write the bundled model, larger and with random weights; returns the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from groupwise.models import load_policy
    from groupwise.models.loading import resolve

    config = AutoConfig.from_pretrained(resolve("bundled"))
    for name, value in MEDIUM.items():
        setattr(config, name, value)
    config.num_attention_heads, config.num_key_value_heads = 12, 6
    config.layer_types = config.layer_types[:1] * config.num_hidden_layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_policy("bundled").tokenizer.save_pretrained(folder)
    return folder


def spec_of(recipe: str, settings: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The specification of a worker."""
    small = ["sampling.max_tokens=8", "guards.silent_rewards='say'"] if options.quick else []
    return {
        "recipe": recipe,
        "settings": [*STEPS, *settings, *small],
        "threads": options.threads,
    }


def cost(case: str, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """A case against one process."""
    settings = dict(zip(("alone", "cluster"), COSTS[case], strict=True))
    recipes = {"alone": "word-problems", "cluster": "word-problems-ray"}
    with ExitStack() as stack:
        workers, more, repeats = {}, list[str](), WARM_UP + options.repeats
        count = 1 if options.quick or case == "medium" else TURN
        if case == "medium":
            folder = save_medium(stack.enter_context(tempfile.TemporaryDirectory()))
            noise = harness.HERE / "ours" / "noise.py"
            more = [f"model.path={folder}", f"imports=['{noise}']", "rewards=[{name='noise'}]"]
            repeats = WARM_UP + max(1, options.repeats // 5)
        for name, recipe in recipes.items():
            spec = spec_of(recipe, [*settings[name], *more], options)
            workers[name], versions = harness.start(stack, "ours/demo.py", spec)
            report.version("ours", versions)
        sides = {
            name: lambda _, name=name: workers[name].ask("steps", count=count) for name in workers
        }
        answers = harness.turns(sides, repeats=repeats)
    alone, cluster = (answers[name][WARM_UP:] for name in ("alone", "cluster"))
    return {
        "cluster_seconds": spread(of(cluster, "seconds")),
        "alone_seconds": spread(of(alone, "seconds")),
        "ratio": ratios(of(cluster, "seconds"), of(alone, "seconds")),
        "cpu": by_kind(cluster),
        "alone_cpu": statistics.mean(total(alone)),
        "cpu_ratio": statistics.mean(total(cluster)) / statistics.mean(total(alone)),
        "stages": harness.stages(cluster),
        "repeats": {"cluster": cluster, "alone": alone},
    }


def gain(case: str, options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """A case of sampling beside the update, against both in turn."""
    given = ["cluster.replicas=1", "algorithm.correction={name='tis'}"]

    def block(*more: str) -> dict[str, Any]:
        spec = spec_of("word-problems-ray", [*given, *more], options)
        with ExitStack() as stack:
            worker, versions = harness.start(stack, "ours/demo.py", spec)
            report.version("ours", versions)
            worker.ask("steps", count=1 if options.quick else BEFORE)
            return worker.ask("steps", count=2 if options.quick else BLOCK)

    sides = {"in_turn": lambda _: block(), "beside": lambda _: block(GAINS[case])}
    answers = harness.turns(sides, repeats=1 if options.quick else BLOCKS)
    in_turn, beside = (of(answers[name], "seconds") for name in ("in_turn", "beside"))
    return {
        "peer": "in turn",
        "in_turn_seconds": spread(in_turn),
        "beside_seconds": spread(beside),
        "speedup": ratios(in_turn, beside),
        "repeats": answers,
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(CASES))
    parser.set_defaults(repeats=30, threads=1)
    options = parser.parse_args()
    report = Report("cluster", options)
    for case in harness.chosen(options, list(CASES), list(CASES)):
        say(case)
        measure = cost if case in COSTS else gain
        report.add({"case": case, **measure(case, options, report)})
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

"""What a critic costs: a step of PPO against one of the same recipe without a critic.

    python benchmarks/critic_step.py --threads 1 --repeats 20

The recipe is `word-problems-ppo`. The step without a critic is that of `reinforce++`, whose
advantages are whitened over the batch, so that it learns from every completion as PPO does. Cases:

    one-epoch    the critic makes one pass over the batch; its first minibatch gives the values
    two-epochs   it makes two, as the recipe does

Both sides take turns, step by step, from the same start. Times are CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from groupwise.config import load
from groupwise.training.monitor.progress import PlainProgress
from groupwise.training.prepare import Prepared, prepare
from harness import Report, arguments, chosen, ratios, spread

SIDES = {
    "plain": ["algorithm.name=reinforce++", "critic="],
    "one-epoch": ["critic.epochs=1"],
    "two-epochs": ["critic.epochs=2"],
}
CASES = ("one-epoch", "two-epochs")
COLUMNS = ("case", "ppo_seconds", "plain_seconds", "cost")
WARM = 2
"""First steps, which are not counted: they load kernels and fill caches."""


def run(name: str, folder: Path) -> Prepared:
    """A run of the recipe, whose critic is pretrained on one batch only."""
    settings = [*SIDES[name], "threads=1", f"output={folder / name}"]
    if name != "plain":
        settings.append("critic.pretraining.batches=1")
    config = load("word-problems-ppo", settings)
    return prepare(config, progress=PlainProgress({}, stream=sys.stderr))


def cpu_seconds(prepared: Prepared) -> float:
    """CPU time of the next step."""
    start = time.process_time()
    prepared.trainer.step()
    return time.process_time() - start


def main() -> None:
    options = arguments(__doc__ or "", CASES).parse_args()
    if options.quick:
        options.repeats = 1
    torch.set_num_threads(1)
    report = Report("critic_step", options)
    names = ["plain", *chosen(options, CASES, CASES)]
    found: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = {name: run(name, folder) for name in names}
        for prepared in runs.values():
            stack.callback(prepared.close)
        for _ in range(WARM + options.repeats):
            for name, prepared in runs.items():
                found[name].append(cpu_seconds(prepared))
    plain = found["plain"][WARM:]
    for name in names[1:]:
        seconds = found[name][WARM:]
        report.add(
            {
                "case": name,
                "ppo_seconds": spread(seconds),
                "plain_seconds": spread(plain),
                "cost": ratios(seconds, plain),
            }
        )
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

"""What a pretrained critic explains of the returns, beside the most that any critic could.

    python benchmarks/critic.py word-problems-ppo --set threads=1

The critic is pretrained as the recipe says; then the policy as it starts answers prompts that
pretraining did not see in this order. The ceiling is the share of the variance of the returns
that the text so far can tell: answers of a group that are equal up to a token have one value
there, so their variance (with Bessel's correction) is lost to every critic. Text that one answer
alone has is taken to tell its return, so the ceiling is a little high.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algorithms.losses.values import explained_variance
from groupwise.config import load
from groupwise.training.monitor.progress import PlainProgress
from groupwise.training.prepare import Prepared, prepare
from groupwise.types import Batch
from groupwise.updates import sequences

PARTS = 4
"""Parts of an answer, by its tokens."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Every token that the policy wrote: [tokens] each.

    Attributes:
        part: which quarter of its answer it is in.
        last: whether it is the last one.
        unknown: variance of the returns of the answers that are equal up to it.
    """

    values: Tensor
    returns: Tensor
    part: Tensor
    last: Tensor
    unknown: Tensor

    def row(self, chosen: Tensor) -> tuple[float, float]:
        """Explained variance of some tokens, and its ceiling."""
        spread = float(self.returns[chosen].double().var(correction=0))
        ceiling = 1 - float(self.unknown[chosen].double().mean()) / spread
        return explained_variance(self.values, self.returns, chosen), ceiling


def unknown(batch: Batch, returns: Tensor) -> Tensor:
    """Variance of the returns over the answers of a group that are equal up to a token."""
    equal = defaultdict(list)
    for row, (group, tokens) in enumerate(
        zip(batch.group.tolist(), batch.tokens.tolist(), strict=True)
    ):
        for time in range(int(batch.length[row])):
            equal[(group, *tokens[:time])].append((row, time))
    found = torch.zeros(batch.mask.shape)
    for places in equal.values():
        if len(places) > 1:
            rows, times = torch.tensor(places).T
            found[rows, times] = returns[rows, times].var(correction=1)
    return found


def measured(prepared: Prepared, *, batches: int) -> Tokens:
    """The tokens of some batches of rollouts, with the values of the run's critic."""
    trainer = prepared.trainer
    found = defaultdict(list)
    for step in range(batches):
        scored = trainer.source.take(prepared.config.prompts_per_step, step=step)
        batch = sequences(scored)
        values = trainer.learners["critic"].evaluate(batch, {"values"})["values"].float()
        returns = batch.mask * scored.scores.total.flatten()[:, None].float()
        time = torch.arange(batch.mask.shape[1]).expand_as(batch.mask)
        length = batch.length[:, None]
        columns = {
            "values": values,
            "returns": returns,
            "part": (PARTS * time // length).clamp(max=PARTS - 1),
            "last": time == length - 1,
            "unknown": unknown(batch, returns),
        }
        for name, column in columns.items():
            found[name].append(column[batch.mask])
    return Tokens(**{name: torch.cat(parts) for name, parts in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description="explained variance of a pretrained critic")
    parser.add_argument("recipe", nargs="?", default="word-problems-ppo")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, default=20, help="of rollouts to judge by")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load(given.recipe, [*given.set, f"output={folder}/run"])
        prepared = prepare(config, progress=PlainProgress({}, stream=sys.stderr))
        try:
            found = measured(prepared, batches=given.batches)
        finally:
            prepared.close()
    chosen = {"all tokens": torch.ones_like(found.last)}
    chosen |= {f"quarter {part + 1}": found.part == part for part in range(PARTS)}
    chosen["last token"] = found.last
    print("explained variance and its ceiling")
    for name, tokens in chosen.items():
        value, ceiling = found.row(tokens)
        print(f"{name:<12} {value:6.3f} {ceiling:6.3f}")


if __name__ == "__main__":
    main()

"""A custom advantage: a registered function, and a row of the table that names it.

A_i = r_i − median(r). One outstanding answer does not give all others a negative advantage.
Keyword-only parameters are settings: recipes, `--set` and error messages know them as soon as the
function is registered.

    python examples/own_advantage.py [STEPS] [FOLDER]
"""

import sys

import torch

from groupwise import ADVANTAGES, ALGORITHMS, train
from groupwise.algorithms import Algorithm
from groupwise.registry import spec


@ADVANTAGES.register
def median_centered(
    rewards: torch.Tensor, valid: torch.Tensor | None = None, *, scale: float = 1.0
) -> torch.Tensor:
    """scale · (r − median(r)) within each group, [prompt, group]; 0 where not judged."""
    valid = ~rewards.isnan() if valid is None else valid
    middle = rewards.masked_fill(~valid, torch.nan).nanmedian(-1, keepdim=True).values
    return torch.where(valid, scale * (rewards - middle), 0.0)


ALGORITHMS.register(
    Algorithm(
        name="median",
        paper="none: an example",
        advantage=spec("median_centered", scale=2.0),
        weighting=spec("batch_token_mean"),
    )
)


def right(text: str, answer: str) -> float:
    """1 for the right answer."""
    return float(f"<answer>{answer}</answer>" in text)


def main(steps: int = 20, folder: str = "runs/own-advantage"):
    """Train the model in the package with it."""
    run = train(
        "bundled",
        "word_problems",
        right,
        algorithm="median",
        steps=steps,
        output=folder,
        sampling={"max_tokens": 48},
        optimizer={"learning_rate": 2e-4},
        evaluation={"prompts": 20},
        threads=1,
    )
    print(f"reward: {run.metrics[0]['reward']:.3f} → {run.metrics[-1]['reward']:.3f}")
    return run


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:3]))

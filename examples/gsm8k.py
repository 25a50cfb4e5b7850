"""GSM8K from files, with the bundled model: supervised warm-up on the format, RL, evaluation.

    python examples/gsm8k.py TRAIN.jsonl TEST.jsonl [SETTING=VALUE ...]

The recipe is gsm8k-offline: the bundled model, a few minutes on a CPU. A model of this size learns
the format and solves few problems; on a GPU use a real model and its recipe:

    groupwise train gsm8k-softrank-qwen2.5-3b
"""

import sys

from groupwise.config import load
from groupwise.evaluation.evaluate import evaluate
from groupwise.training.run import train_config


def main(train: str, test: str, *settings: str):
    """Train, then measure before and after on the same test problems."""
    config = load("gsm8k-offline", [f"data.train={train}", f"data.eval={test}", *settings])
    run = train_config(config)
    # One table, strict answers and an interval beside every figure. (`groupwise eval` prints it.)
    found = evaluate(config, [config.model.path, str(run.folder / "final")])
    for model, measurement in found.measurements.items():
        for name, figure in measurement.figures.items():
            print(f"{model}: {name} {figure}")
    return run


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python examples/gsm8k.py TRAIN.jsonl TEST.jsonl [SETTING=VALUE ...]")
    main(*sys.argv[1:])

"""GSM8K from its files, from a model that has never seen it: supervised format, then RL, then eval.

    python examples/gsm8k.py TRAIN.jsonl TEST.jsonl [SETTING=VALUE ...]

The recipe is gsm8k-offline: the model in the package, a few minutes on a CPU. A model of this size
learns the format and solves few problems; on a card take a real one, whose recipe says the rest:

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

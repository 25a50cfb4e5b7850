"""How far an update moves the parameters, at every learning rate of the fourth part.

    python studies/softrank/moved.py

repeats some runs of the grid and stores the norms in `results/fourth-norms.json`; it takes minutes.
The norm of an update is ‖θ_t − θ_{t−1}‖₂ over all parameters, after clipping, AdamW and warm-up;
what is stored is its mean over the steps of a run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from corrections import at
from fourth_design import GRID_ARMS, GRID_RATES, NORM_SEEDS, rates_plan
from rates import NORMS
from torch import Tensor

from groupwise.config import load
from groupwise.training.callbacks import Callback
from groupwise.training.monitor.progress import NoProgress
from groupwise.training.prepare import prepare
from groupwise.types import Metrics, StepResult


class Moved(Callback):
    """Norms of the updates and accuracies of a run, step by step."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.before: Tensor | None = None
        self.norms: list[float] = []
        self.accuracy: list[float] = []

    def on_step_begin(self, step: int) -> None:
        """Keep the parameters."""
        self.before = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def on_step(self, step: int, result: StepResult) -> None:
        """Compare with the parameters before the step."""
        now = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.norms.append(float(torch.linalg.vector_norm(now - self.before)))

    def should_stop(self, metrics: Metrics) -> bool:
        """Keep the accuracy."""
        self.accuracy.append(metrics["accuracy"])
        return False


def moved(arm: str, rate: float, seed: int) -> Moved:
    """Repeat a run of the grid without its evaluations."""
    plan = rates_plan((rate,), (arm,))
    found = Moved()
    with tempfile.TemporaryDirectory() as folder:
        config = load(
            plan.recipe,
            [
                *plan.overrides(plan.arm(at(arm, rate))),
                f"seed={seed}",
                f"optimizer.learning_rate={rate}",
                "evaluation.prompts=1",
                "evaluation.at_start=false",
                f"output={json.dumps(str(Path(folder) / 'run'))}",
            ],
        )
        prepared = prepare(config, progress=NoProgress(), callbacks=[found])
        found.model = prepared.policy.model
        try:
            prepared.trainer.run()
        finally:
            prepared.close()
    return found


def main() -> int:
    """Measure what is not stored yet."""
    stored = {"steps": 0, "norms": {}, "accuracy": {}}
    if NORMS.exists():
        stored = json.loads(NORMS.read_text(encoding="utf-8"))
    for arm in GRID_ARMS:
        for rate in GRID_RATES:
            norms = stored["norms"].setdefault(arm, {}).setdefault(f"{rate:g}", {})
            accuracy = stored["accuracy"].setdefault(arm, {}).setdefault(f"{rate:g}", {})
            for seed in NORM_SEEDS:
                if str(seed) in norms:
                    continue
                found = moved(arm, rate, seed)
                stored["steps"] = len(found.norms)
                norms[str(seed)] = float(f"{np.mean(found.norms):.4g}")
                accuracy[str(seed)] = float(f"{np.mean(found.accuracy):.6g}")
                NORMS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Preference and reward-model steps of groupwise, each one when it is asked for."""

from __future__ import annotations

import time
from typing import Any

import torch
from channel import Channel, Memory, versions
from policies import PACKAGES, policy_of

from groupwise.models import scorer_of
from groupwise.prompts.preferences import Comparison, Ranking
from groupwise.settings import OptimizerSettings, PreferenceSettings, RewardModelSettings
from groupwise.training.offline.encoding import Encoded
from groupwise.training.offline.preference import PreferenceTask, preference_function
from groupwise.training.offline.reference import Reference
from groupwise.training.offline.reward_model import RewardModelTask, ranking_function
from groupwise.types import Prompt
from groupwise.updates import Score, TorchLearner


class Steps:
    """A learner and its data."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.memory = Memory()
        self.memory.reset()
        scores = spec["what"] == "reward"
        policy = policy_of(spec["model"], precision="float32", endless=True)
        policy = scorer_of(policy) if scores else policy
        learner = TorchLearner(
            policy,
            optimizer=OptimizerSettings(learning_rate=1e-6),
            head=Score(policy.model, reads={"after"}) if scores else None,
            tokens_per_microbatch=2048,
        )
        items = [
            Encoded(
                comparison=Comparison(
                    prompt=Prompt(id=str(place), text="p"),
                    answers=tuple(map(str, range(len(answers)))),
                    rankings=(
                        Ranking(
                            answers=tuple(range(len(answers))), ranks=tuple(range(len(answers)))
                        ),
                    ),
                    labels=(None,) * len(answers),
                    scores=(float("nan"),) * len(answers),
                ),
                prompt=tuple(prompt),
                answers=tuple(map(tuple, answers)),
            )
            for place, (prompt, answers) in enumerate(
                zip(spec["prompts"], spec["answers"], strict=True)
            )
        ]
        self.task: Any
        if scores:
            function = ranking_function(RewardModelSettings(data="here"))
            self.task = RewardModelTask(
                learner=learner, function=function, items=items, held_out=()
            )
        else:
            settings = PreferenceSettings(data="here")
            self.task = PreferenceTask(
                learner=learner,
                function=preference_function(settings),
                settings=settings,
                items=items,
                held_out=(),
                reference=Reference(sums=tuple(torch.zeros(len(i.answers)) for i in items)),
            )

    def step(self) -> dict[str, Any]:
        """One optimizer step on all the data."""
        self.memory.reset()
        start = time.perf_counter()
        batch, objective = self.task.batch(range(len(self.task.items)))
        update = self.task.learner.update(batch, objective)
        return {
            "seconds": time.perf_counter() - start,
            "peak_mb": self.memory.peak(),
            "loss": update.loss,
        }


def main() -> None:
    channel = Channel()
    steps = Steps(channel.spec)
    channel.serve(
        {"hello": lambda: {"versions": versions(*PACKAGES)}, "step": lambda: steps.step()}
    )


if __name__ == "__main__":
    main()

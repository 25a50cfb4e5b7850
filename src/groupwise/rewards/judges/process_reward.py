"""A process reward model as an outcome reward: the scores of the steps as one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.rewards.base import REWARDS, own_worker
from groupwise.rewards.steps import Aggregate

if TYPE_CHECKING:
    from groupwise.types import Group


def load(model: str, device: str = "auto") -> None:
    """Load the model of a folder in the worker that scores with it."""
    from groupwise.rewards.judges.models import scalar_classifier

    scalar_classifier(model, kind="steps", device=device)


@own_worker(load, imports=["groupwise.rewards.judges.models"])
@REWARDS.register
def process_reward(
    group: Group,
    *,
    model: str,
    aggregate: Aggregate = "min",
    step_separator: str = "\n\n",
    device: str = "auto",
) -> list[float | Exception]:
    """The probabilities of the steps of an answer to be right, by a model, as one number.

    How it is gamed: by fewer and vaguer steps; "product" and "min" favour short answers, "last"
        ignores how the answer came about.

    Args:
        group: the completions of a prompt; equal ones are scored once.
        model: folder of a token classifier with one label, such as `groupwise reward-model` leaves
            it with `reward_model.step_separator`.
        aggregate: "min", "mean", "product" or "last" over the steps.
        step_separator: text between two steps.
        device: where it runs; "auto" takes the GPU if there is one.

    Returns:
        From 0 to 1; an exception for a completion that is too long.

    Raises:
        UsageError: a bad model folder, or a head with several labels.

    Source: Let's Verify Step by Step (2305.20050); DeepSeekMath (2402.03300) trains on the steps
        themselves: algorithm.name = "grpo_process".
    Elsewhere: TRL's PRMTrainer trains two labels, right and wrong; here there is one.
    """
    from groupwise.rewards.judges.models import step_scores

    texts = [completion.own_text for completion in group.completions]
    distinct = list(dict.fromkeys(texts))
    found = dict(
        zip(
            distinct,
            step_scores(
                group.prompt,
                distinct,
                model=model,
                separator=step_separator,
                aggregate=aggregate,
                device=device,
            ),
            strict=True,
        )
    )
    return [found[text] for text in texts]

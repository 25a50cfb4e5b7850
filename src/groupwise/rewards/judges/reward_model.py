"""A scalar reward model: a sequence classifier that scores prompt and answer together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from groupwise.rewards.base import REWARDS, own_worker
from groupwise.rewards.builtin.text import final_answer

if TYPE_CHECKING:
    from groupwise.types import Group

Part = Literal["all", "answer"]


def load(model: str, device: str = "auto") -> None:
    """Load the model of a folder in the worker that scores with it."""
    from groupwise.rewards.judges.models import scalar_classifier

    scalar_classifier(model, kind="classifier", device=device)


@own_worker(load, imports=["groupwise.rewards.judges.models"])
@REWARDS.register
def reward_model(
    group: Group, *, model: str, part: Part = "all", device: str = "auto"
) -> list[float | Exception]:
    """The score of a learned reward model for prompt and completion, read at the last token.

    The model reads what it was trained on: the prompt through its chat template with the completion
    as the assistant's turn, or, for a prompt without messages, the texts and the end token.

    How it is gamed: like every learned model, out of its training range; watch length and
        repetition, and keep a KL term.

    Args:
        group: the completions of a prompt; equal ones are scored once.
        model: folder of a sequence classifier with one output.
        part: what of the completion it sees: "all", or the "answer" alone: without the reasoning
            before `</think>`, and of that the last `<answer>` block where there is one. Reasoning
            that was never closed leaves an empty answer.
        device: where it runs; "auto" takes the GPU if there is one.

    Returns:
        Any real number; the scale is the model's own. An exception for a completion that is too
        long.

    Raises:
        UsageError: a bad model folder, or a head with more than one output.

    Source: Ouyang et al. 2022 (InstructGPT); DeepSeek-R1 (2501.12948), section 2.3.4, scores
        helpfulness on the answer alone; the head of transformers'
        `AutoModelForSequenceClassification`.
    Elsewhere: TRL scores a padded batch, for which transformers takes the last token that is not
        the padding id.
    """
    from groupwise.rewards.judges.models import reward_scores

    texts = [completion.own_text for completion in group.completions]
    if part == "answer":
        texts = [final_answer(text) or "" for text in texts]
    distinct = list(dict.fromkeys(texts))
    scores = reward_scores(group.prompt, distinct, model=model, device=device)
    found = dict(zip(distinct, scores, strict=True))
    return [found[text] for text in texts]

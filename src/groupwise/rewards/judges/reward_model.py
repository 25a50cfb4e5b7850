"""A scalar reward model: a sequence classifier that scores prompt and answer together."""

from __future__ import annotations

from groupwise.rewards.base import REWARDS, in_process
from groupwise.rewards.builtin.text import Source, final_answer


@in_process
@REWARDS.register
def reward_model(
    text: str, prompt: str, *, model: str, source: Source = "all", device: str = "cpu"
) -> float:
    """The score of a learnt reward model for prompt and completion, read at the last token.

    How it is gamed: like every learnt model, out of its training range; watch length and
        repetition, and keep a KL term.

    Args:
        text: the completion.
        prompt: the question, given to the model as the user's turn.
        model: folder of a sequence classifier with one output.
        source: what of the completion it sees; "all" is what such models are trained on.
        device: where it runs.

    Returns:
        Any real number; the scale is the model's own.

    Raises:
        UsageError: a bad model folder.
        ModelError: not one output, or too long a conversation.

    Source: Ouyang et al. 2022 (InstructGPT); the head of transformers'
        `AutoModelForSequenceClassification`.
    Elsewhere: TRL scores a padded batch, for which transformers takes the last token that is not
        the padding id.
    """
    from groupwise.rewards.judges.models import reward_scores

    turns = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": final_answer(text, source=source) or ""},
    ]
    return reward_scores([turns], model=model, device=device)[0]

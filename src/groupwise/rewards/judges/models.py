"""Local models that judge: a causal language model asked for a word, and a reward model that gives
a score.

This module imports torch; the rewards import it when they are first called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import ModelError, UsageError
from groupwise.models.loading import Policy, load_policy
from groupwise.rewards.judges.encoders import Loaded, load
from groupwise.rewards.judges.prompt import Judgement


@dataclass(frozen=True, kw_only=True)
class LocalJudge:
    """A language model that is asked for one word; `special` are the strings that its tokenizer
    treats as special tokens."""

    policy: Policy
    special: frozenset[str]

    def judgement(self, question: str, *, yes: str, no: str) -> Judgement:
        """The probabilities of the first tokens of two words as the next token after a question.

        Raises:
            ModelError: the two words begin with the same token, the question is longer than the
                model can read, or the logits are NaN.
        """
        tokenizer = self.policy.tokenizer
        words = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in (yes, no)]
        if words[0] == words[1]:
            raise ModelError(
                f"judge: {yes!r} and {no!r} begin with the same token; choose other words."
            )
        tokens = rendered(tokenizer, [{"role": "user", "content": question}])
        if len(tokens) > self.policy.context:
            raise ModelError(
                f"judge: the question has {len(tokens)} tokens, the model reads "
                f"{self.policy.context}."
            )
        model = self.policy.model
        with torch.inference_mode():
            logits = model(torch.tensor([tokens], device=model.device), logits_to_keep=1).logits[
                0, -1
            ]
        chances = logits.float().softmax(-1)
        if not bool(chances.isfinite().all()):
            raise ModelError("judge: the model's logits are NaN.")
        return Judgement(*(float(x) for x in (*chances[words], chances.max())))


def rendered(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, reply: bool = True
) -> list[int]:
    """Token ids of a conversation by the chat template; without one, the contents, a line each.

    Args:
        tokenizer: of the model.
        messages: turns.
        reply: end where the model is to answer.
    """
    if tokenizer.chat_template:
        return list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=reply, return_dict=False
            )
        )
    text = "\n".join(m["content"] for m in messages) + ("\n" if reply else "")
    return list(tokenizer(text).input_ids)


@functools.lru_cache(maxsize=2)
def local_judge(path: str, device: str) -> LocalJudge:
    """The judge of a folder, loaded once per process.

    Raises:
        UsageError: no such folder, or none that holds a causal language model.
    """
    if not (Path(path).expanduser() / "config.json").is_file():
        raise UsageError(f"model = {path!r}: must be a model folder, with a config.json in it.")
    policy = load_policy(Path(path).expanduser())
    policy.model.eval().to(device)
    added = {str(token) for token in policy.tokenizer.added_tokens_decoder.values()}
    return LocalJudge(
        policy=policy, special=frozenset(added | set(policy.tokenizer.all_special_tokens))
    )


def reward_scores(
    conversations: Sequence[Sequence[dict[str, str]]], *, model: str, device: str = "cpu"
) -> list[float]:
    """The score that a sequence classifier gives each conversation, read at its last token.

    One conversation at a time, without padding: a model that looks for its last token by the
    padding id would otherwise skip a closing end-of-sequence token where the two ids are the same.

    Raises:
        UsageError: a bad model folder.
        ModelError: a head with more than one output, or a conversation longer than the model can
            read.
    """
    loaded = load(model, kind="classifier", device=device)
    if loaded.model.config.num_labels != 1:
        raise ModelError(
            f"model = {model!r}: must have one output, has {loaded.model.config.num_labels}."
        )
    return [_reward_score(loaded, conversation) for conversation in conversations]


def _reward_score(loaded: Loaded, conversation: Sequence[dict[str, str]]) -> float:
    tokens = rendered(loaded.tokenizer, conversation, reply=False)
    if len(tokens) > loaded.limit:
        raise ModelError(f"reward model: {len(tokens)} tokens, but it reads {loaded.limit}.")
    ids = torch.tensor([tokens], device=loaded.model.device)
    with torch.inference_mode():
        head = getattr(loaded.model, "score", None)
        if head is None:
            return float(loaded.model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0])
        states = loaded.model.base_model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return float(head(states[:, -1])[0, 0])

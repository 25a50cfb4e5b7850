"""Local models that judge: a causal language model asked for a word, and a reward model that gives
a score.

This module imports torch; the rewards import it when they are first called.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.errors import ModelError, UsageError
from groupwise.models.devices import device_of
from groupwise.models.loading import Policy, load_policy
from groupwise.prompts.templates import render, template_text
from groupwise.rewards.judges.encoders import Loaded, load
from groupwise.rewards.judges.prompt import Judgement, Token, spoken_judgement
from groupwise.rewards.steps import Aggregate, aggregated, step_ends
from groupwise.types import Prompt

TOP = 20
"""Most probable tokens that are looked at where a reasoned verdict begins."""


@dataclass(frozen=True, kw_only=True)
class LocalJudge:
    """A language model that is asked for one word; `special` are the strings that its tokenizer
    treats as special tokens."""

    policy: Policy
    special: frozenset[str]

    def first_tokens(self, yes: str, no: str) -> list[int]:
        """The first tokens of two words.

        Raises:
            ModelError: they are the same.
        """
        tokenizer = self.policy.tokenizer
        words = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in (yes, no)]
        if words[0] == words[1]:
            raise ModelError(
                f"judge: {yes!r} and {no!r} begin with the same token; choose other words."
            )
        return words

    def judgement(self, question: str, *, yes: str, no: str) -> Judgement:
        """The probabilities of the first tokens of two words as the next token after a question.

        Raises:
            ModelError: the two words begin with the same token, the question is longer than the
                model can read, or the logits are NaN.
        """
        words = self.first_tokens(yes, no)
        tokens, model = self._asked(question), self.policy.model
        with torch.inference_mode():
            logits = model(torch.tensor([tokens], device=model.device), logits_to_keep=1).logits[
                0, -1
            ]
        chances = logits.float().softmax(-1)
        if not bool(chances.isfinite().all()):
            raise ModelError("judge: the model's logits are NaN.")
        return Judgement(*(float(x) for x in (*chances[words], chances.max())))

    def reasoned(self, question: str, *, yes: str, no: str, max_tokens: int) -> Judgement | None:
        """What the judge says of two words at the end of its most probable reply; None where it
        ends without one of them, or has not ended after `max_tokens` tokens.

        Raises:
            ModelError: the question leaves no room for a reply, or the logits are NaN.
        """
        tokens, model = self._asked(question), self.policy.model
        room = min(max_tokens, self.policy.context - len(tokens))
        if room < 1:
            raise ModelError("judge: the question leaves no room for a reply.")
        ids = torch.tensor([tokens], device=model.device)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=list(self.policy.end_tokens),
                pad_token_id=self.policy.tokenizer.pad_token_id,
                output_scores=True,
                return_dict_in_generate=True,
            )
        if any(bool(each.isnan().any()) for each in made.scores):
            raise ModelError("judge: the model's logits are NaN.")
        written = made.sequences[0, len(tokens) :].tolist()
        if written[-1] not in self.policy.end_tokens:
            return None  # Cut off: its last line is not a verdict.
        [reply] = self.policy.tokenizer.batch_decode([written[:-1]])
        said = self._told(written[:-1], made.scores)
        return spoken_judgement(reply, said, yes=yes, no=no)

    def _told(self, written: list[int], scores: Sequence[Tensor]) -> list[Token]:
        """The tokens of a reply, with the most probable ones in their places."""
        texts_of, said = self.policy.tokenizer.batch_decode, []
        for place, token in enumerate(written):
            chances = scores[place][0].float().softmax(-1)
            best = chances.topk(min(TOP, len(chances)))
            top = texts_of([[number] for number in best.indices.tolist()])
            before = written[max(0, place - 1) : place]  # A token alone may lose its space.
            shorter, longer = texts_of([before, [*before, token]])
            chances_of = list(zip(top, best.values.tolist(), strict=True))
            said.append(Token(longer[len(shorter) :], chances_of))
        return said

    def _asked(self, question: str) -> list[int]:
        """The tokens of a question.

        Raises:
            ModelError: there are more than the model can read.
        """
        tokens = rendered(self.policy.tokenizer, [{"role": "user", "content": question}])
        if len(tokens) > self.policy.context:
            raise ModelError(
                f"judge: the question has {len(tokens)} tokens, the model reads "
                f"{self.policy.context}."
            )
        return tokens


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = True
) -> list[int]:
    """Token ids of a conversation by the chat template; without one, the contents, a line each.

    Args:
        tokenizer: of the model.
        messages: turns.
        reply: end where the model is to answer.
    """
    if tokenizer.chat_template:
        whole = template_text(messages, tokenizer, where="judge", add_generation_prompt=reply)
        return list(tokenizer(whole, add_special_tokens=False).input_ids)
    text = "\n".join(m["content"] for m in messages) + ("\n" if reply else "")
    return list(tokenizer(text).input_ids)


def local_judge(path: str, device: str) -> LocalJudge:
    """The judge of a folder or a hub name, loaded once per process.

    Raises:
        UsageError: no such model, or none that is a causal language model.
    """
    return _local_judge(path, device_of(device))


@functools.lru_cache(maxsize=2)
def _local_judge(path: str, device: torch.device) -> LocalJudge:
    folder = Path(path).expanduser()
    hub = not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
    if not hub and not (folder / "config.json").is_file():
        raise UsageError(
            f"model = {path!r}: must be a model folder, with a config.json in it, or a hub name."
        )
    policy = load_policy(path if hub else folder)
    policy.model.eval().to(device)
    added = {str(token) for token in policy.tokenizer.added_tokens_decoder.values()}
    return LocalJudge(
        policy=policy, special=frozenset(added | set(policy.tokenizer.all_special_tokens))
    )


def scalar_classifier(
    model: str, *, kind: Literal["classifier", "steps"], device: str = "auto"
) -> Loaded:
    """The sequence or token ("steps") classifier of a folder, loaded once per process.

    Raises:
        UsageError: a bad model folder, or a head with more than one output.
    """
    loaded = load(model, kind=kind, device=device)
    if loaded.model.config.num_labels != 1:
        raise UsageError(
            f"model = {model!r}: must have one output, has {loaded.model.config.num_labels}."
        )
    return loaded


def step_scores(
    prompt: Prompt,
    answers: Sequence[str],
    *,
    model: str,
    separator: str,
    aggregate: Aggregate,
    device: str = "auto",
) -> list[float | Exception]:
    """One number of the probabilities that a token classifier gives the steps of each answer.

    Raises:
        UsageError: a bad model folder, or a head with more than one output.
    """
    loaded = scalar_classifier(model, kind="steps", device=device)
    found: list[float | Exception] = []
    for answer in answers:
        chances = _step_chances(loaded, prompt, answer, separator)
        found.append(chances if isinstance(chances, Exception) else aggregated(chances, aggregate))
    return found


def _step_chances(
    loaded: Loaded, prompt: Prompt, answer: str, separator: str
) -> list[float] | Exception:
    """The probability that each step of an answer is right, read at its last token."""
    begun = len(render(prompt, loaded.tokenizer))
    tokens = answer_tokens(prompt, answer, loaded.tokenizer)
    while len(tokens) > begun + 1 and tokens[-1] != loaded.tokenizer.eos_token_id:
        tokens = tokens[:-1]  # What the template writes after the end of a turn.
    if len(tokens) > loaded.limit:
        return ModelError(
            f"process reward: the text has {len(tokens)} tokens; the limit is {loaded.limit}."
        )
    ids = torch.tensor([tokens], device=loaded.model.device)
    with torch.inference_mode():
        logits = loaded.model(ids, attention_mask=torch.ones_like(ids)).logits[0, :, 0].float()
    ends = step_ends(tokens[begun:], separator, loaded.tokenizer)
    chances = logits[begun:][torch.tensor(ends, device=logits.device)].sigmoid()
    if not bool(chances.isfinite().all()):
        return ModelError("process reward: a score is NaN.")
    return chances.tolist()


def reward_scores(
    prompt: Prompt, answers: Sequence[str], *, model: str, device: str = "auto"
) -> list[float | Exception]:
    """The score that a sequence classifier gives each answer to a prompt, read at its last token.

    Returns:
        One score per answer; a `ModelError` for one that is too long for the model, or whose score
        is NaN.

    Raises:
        UsageError: a bad model folder, or a head with more than one output.
    """
    loaded = scalar_classifier(model, kind="classifier", device=device)
    return [_reward_score(loaded, answer_tokens(prompt, a, loaded.tokenizer)) for a in answers]


def answer_tokens(prompt: Prompt, answer: str, tokenizer: Any) -> list[int]:
    """A prompt with an answer as a reward model reads them."""
    if prompt.text is None and tokenizer.chat_template:
        return rendered(
            tokenizer, [*prompt.messages, {"role": "assistant", "content": answer}], reply=False
        )
    own = tokenizer(answer, add_special_tokens=False).input_ids
    return [*render(prompt, tokenizer), *own, tokenizer.eos_token_id]


def _reward_score(loaded: Loaded, tokens: Sequence[int]) -> float | Exception:
    """Without padding: a model that looks for its last token by the padding id would otherwise skip
    a closing end-of-sequence token where the two ids are the same."""
    if len(tokens) > loaded.limit:
        return ModelError(
            f"reward model: the text has {len(tokens)} tokens; the limit is {loaded.limit}."
        )
    ids = torch.tensor([list(tokens)], device=loaded.model.device)
    with torch.inference_mode():
        head = getattr(loaded.model, "score", None)
        if head is None:
            score = loaded.model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0]
        else:
            inner = loaded.model.base_model(ids, attention_mask=torch.ones_like(ids))
            score = head(inner.last_hidden_state[:, -1])[0, 0]
    return float(score) if score.isfinite() else ModelError("reward model: the score is NaN.")

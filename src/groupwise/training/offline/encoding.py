"""Comparisons as tokens, and as batches that hold each prompt once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.prompts.preferences import Answer, Comparison
from groupwise.prompts.templates import render, template_text
from groupwise.settings import DatasetSettings
from groupwise.training.stages.sft import learned_batch
from groupwise.types import Batch, Prompt


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A comparison as tokens: those of the prompt once, and those of every answer."""

    comparison: Comparison
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class EncodedData:
    """A data set as tokens.

    Attributes:
        items: prompts with their answers.
        dropped: answers left out and answers cut, and rows left out, by reason.
    """

    items: tuple[Encoded, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: what is there, and what was left out or cut."""
        answers = sum(len(item.answers) for item in self.items)
        tokens = sum(len(item.prompt) + sum(map(len, item.answers)) for item in self.items)
        alone = sum(
            (len(item.prompt) * len(item.answers)) + sum(map(len, item.answers))
            for item in self.items
        )
        said = [f"{len(self.items)} prompts, {answers} answers, {tokens:,} tokens"]
        if tokens:
            said.append(f"{alone / tokens:.2f} times as many if every answer had its own prompt")
        said += [f"{count} × {reason}" for reason, count in self.dropped.items()]
        return "; ".join(said)

    def digest(self) -> str:
        """A name of the tokens that depends on their content and order."""
        found = hashlib.blake2b(digest_size=16)
        for item in self.items:
            found.update(repr((item.prompt, item.answers)).encode())
        return found.hexdigest()


def encode(
    comparisons: Sequence[Comparison],
    policy: Policy,
    settings: DatasetSettings,
    *,
    where: str,
    dropped: Mapping[str, int] | None = None,
    whole_turns: bool = False,
) -> EncodedData:
    """Tokenize comparisons; answers that are too long are refused, dropped or cut, as set.

    Args:
        where: section of the recipe, for messages.
        dropped: rows that reading left out, by reason.
        whole_turns: keep what the chat template writes after the end of an answer.

    Raises:
        UsageError: an answer is too long and is not to be dropped or cut, or nothing is left.
    """
    limit = min(settings.max_tokens or policy.context, policy.context)
    counts = dict(dropped or {})
    items = []
    for comparison in comparisons:
        prompt = tuple(render(comparison.prompt, policy.tokenizer))
        answers: list[tuple[int, ...] | None] = []
        for answer in comparison.answers:
            tokens = answer_tokens(comparison.prompt, answer, policy, whole_turns=whole_turns)
            fitting = _fitting(tokens, limit - len(prompt), settings)
            if fitting is None or len(fitting) < len(tokens):
                _refuse_long(comparison, len(prompt) + len(tokens), limit, settings, where)
                reason = f"answers {'left out' if fitting is None else 'cut'} at {limit} tokens"
                counts[reason] = counts.get(reason, 0) + 1
            answers.append(fitting)
        left = _restricted(comparison, answers)
        if left is not None:
            kept = tuple(a for a in answers if a is not None)
            items.append(Encoded(comparison=left, prompt=prompt, answers=kept))
    if not items:
        raise UsageError(f"{where}.max_tokens = {limit}: leaves no data; raise it.")
    return EncodedData(items=tuple(items), dropped=counts)


def _fitting(
    tokens: tuple[int, ...], room: int, settings: DatasetSettings
) -> tuple[int, ...] | None:
    """What is kept of an answer; None if it is left out."""
    if len(tokens) <= room:
        return tokens
    return tokens[:room] if settings.too_long == "cut" and room > 0 else None


def _refuse_long(
    comparison: Comparison, size: int, limit: int, settings: DatasetSettings, where: str
) -> None:
    if settings.too_long == "refuse":
        raise UsageError(
            f"{where}: prompt {comparison.prompt.id} with an answer has {size} tokens and at most "
            f"{limit} are allowed; set {where}.too_long = 'drop' or 'cut', or raise "
            f"{where}.max_tokens."
        )


def _restricted(
    comparison: Comparison, answers: Sequence[tuple[int, ...] | None]
) -> Comparison | None:
    """A comparison without the answers that were left out; None if nothing is left."""
    if all(a is not None for a in answers):
        return comparison
    place, kept = {}, []
    for old, tokens in enumerate(answers):
        if tokens is not None:
            place[old] = len(kept)
            kept.append(old)
    rankings = []
    for ranking in comparison.rankings:
        both = [
            (place[a], r) for a, r in zip(ranking.answers, ranking.ranks, strict=True) if a in place
        ]
        if len({rank for _, rank in both}) > 1:
            there, ranks = zip(*both, strict=True)
            rankings.append(type(ranking)(answers=there, ranks=ranks, margin=ranking.margin))
    if not kept or (comparison.rankings and not rankings):
        return None
    return Comparison(
        prompt=comparison.prompt,
        answers=tuple(comparison.answers[i] for i in kept),
        rankings=tuple(rankings),
        labels=tuple(comparison.labels[i] for i in kept),
        scores=tuple(comparison.scores[i] for i in kept),
        source=comparison.source,
    )


def answer_tokens(
    prompt: Prompt, answer: Answer, policy: Policy, *, whole_turns: bool = False
) -> tuple[int, ...]:
    """Tokens of an answer as the policy would write it, the token that ends it included.

    Messages go through the chat template, and what follows the last end token is left out, as the
    policy never writes it; reward models read it (`whole_turns`), as those of others do. Prompt and
    answer are tokenized apart, as in generation.

    Raises:
        UsageError: the template changes the prompt once an answer follows.
    """
    tokenizer: Any = policy.tokenizer
    if isinstance(answer, str) and prompt.messages and tokenizer.chat_template:
        answer = ({"role": "assistant", "content": answer},)
    if isinstance(answer, str) or not tokenizer.chat_template:
        text = answer if isinstance(answer, str) else "\n\n".join(m["content"] for m in answer)
    else:
        text = _templated(prompt, answer, tokenizer)
    tokens = list(tokenizer(text, add_special_tokens=False).input_ids)
    ends = [place for place, token in enumerate(tokens) if token in policy.end_tokens]
    if ends and not tokenizer.decode(tokens[ends[-1] + 1 :]).strip():
        return tuple(tokens if whole_turns else tokens[: ends[-1] + 1])
    return (*tokens, int(tokenizer.eos_token_id))


def _templated(prompt: Prompt, answer: Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """The text that the chat template adds to a prompt for an answer."""
    given, where = prompt.messages, f"prompt {prompt.id}"
    head = template_text(given, tokenizer, where=where, add_generation_prompt=True)
    whole = template_text([*given, *answer], tokenizer, where=where)
    if whole.startswith(head):
        return whole[len(head) :]
    # Templates that open a block of thought in the generation prompt close none for an answer.
    bare = template_text(given, tokenizer, where=where)
    if not whole.startswith(bare):
        raise UsageError(
            f"prompt {prompt.id}: is not a prefix of prompt and answer under the chat template; "
            "give prompt and answers as texts."
        )
    raise UsageError(
        f"prompt {prompt.id}: the chat template begins an answer with {head[len(bare) :]!r}, but "
        "this answer does not begin with it; set data.chat_template_kwargs, or give texts."
    )


def batch_of(
    items: Sequence[Encoded],
    *,
    count: int | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Every answer of the items as a row; the rows of a prompt are a group.

    The column `row` numbers the rows, so that a part of the batch knows which ones it holds.

    Args:
        count: what the loss is a mean over; the weight of each row is 1 / count. None: the rows.
        columns: further columns.
    """
    prompts = [item.prompt for item in items]
    answers = [answer for item in items for answer in item.answers]
    sizes = torch.tensor([len(item.answers) for item in items])
    group = torch.arange(len(prompts)).repeat_interleave(sizes)
    learned = [[True] * len(answer) for answer in answers]
    return replace(
        learned_batch(prompts, answers, learned, group=group),
        row_weight=torch.full((len(answers),), 1 / max(1, count or len(answers))),
        columns={"row": torch.arange(len(answers)).float(), **(columns or {})},
    )

"""On-policy distillation: a teacher scores every token that the policy sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.config import Config
from groupwise.config.connect import best_device
from groupwise.errors import UsageError
from groupwise.models import Policy, load_policy
from groupwise.models.scoring import check_same_tokenizer
from groupwise.prompts.templates import render
from groupwise.settings import OptimizerSettings
from groupwise.training.trainer import Trainer
from groupwise.types import Batch, Group, Learner, Prompt, ScoredGroups
from groupwise.updates import TorchLearner

SELF = "self"
"""The policy as its own teacher, with another prompt."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Who scores the tokens of the policy.

    Attributes:
        learner: computes log-probabilities of the teacher; None: the policy itself.
        tokenizer: of the policy, for prompts.
        prompt: the question as the teacher sees it; None: as the policy saw it.
        context: longest sequence that the teacher reads.
    """

    learner: Learner | None
    tokenizer: Any
    prompt: str | None
    context: int

    def logp(
        self, batch: Batch, scored: ScoredGroups, policy: Learner
    ) -> Float[Tensor, "batch time"]:
        """Log-probability of every token under the teacher.

        Raises:
            UsageError: the prompt's template names no column, or the teacher cannot read so long a
                text.
        """
        seen = batch if self.prompt is None else self._as_seen(batch, scored.groups)
        longest = max(map(len, seen.prompts), default=0) + int(batch.length.max())
        if longest > self.context:
            raise UsageError(
                f"distillation.teacher: reads {self.context} tokens, and a prompt with its "
                f"completion has {longest}; lower sampling.max_tokens, or shorten "
                "distillation.prompt."
            )
        return (self.learner or policy).evaluate(seen, {"logp"})["logp"]

    def _as_seen(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        prompts = [
            render(teacher_prompt(g.prompt, str(self.prompt)), self.tokenizer) for g in groups
        ]
        return replace(batch, prompts=tuple(torch.tensor(tokens) for tokens in prompts))


def teacher_prompt(prompt: Prompt, template: str) -> Prompt:
    """A prompt whose question, the last message, is put into a template.

    Raises:
        UsageError: the template names a column that the data lacks.

    Example:
        >>> given = Prompt(id="a", text="2+2=", answer="4")
        >>> teacher_prompt(given, "(It is {answer}.) {prompt}").text
        '(It is 4.) 2+2='
    """
    question = prompt.messages[-1]["content"] if prompt.messages else str(prompt.text)
    known: Mapping[str, Any] = {**prompt.columns, "prompt": question, "answer": prompt.answer}
    try:
        text = template.format_map(known)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(
            f"distillation.prompt = {template!r}: {error} is no column of the data; known: "
            f"{', '.join(sorted(known))}."
        ) from None
    if not prompt.messages:
        return replace(prompt, text=text)
    last = {**prompt.messages[-1], "content": text}
    return replace(prompt, messages=(*prompt.messages[:-1], last))


def make_teacher(config: Config, policy: Policy) -> Teacher:
    """The teacher of a configuration.

    Raises:
        UsageError: there is none, it cannot be loaded, or its tokenizer is not the policy's.
    """
    settings = config.distillation
    assert settings is not None
    if settings.teacher == SELF:
        return Teacher(
            learner=None,
            tokenizer=policy.tokenizer,
            prompt=settings.prompt,
            context=policy.context,
        )
    found = load_policy(
        settings.teacher,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        attention=config.model.attention,
    )
    where = f"distillation.teacher = {settings.teacher!r}"
    check_same_tokenizer(policy.tokenizer, found.tokenizer, where=where)
    found.model.to(best_device())
    learner = TorchLearner(
        found,
        optimizer=OptimizerSettings(),
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        temperature=config.sampling.temperature,
    )
    return Teacher(
        learner=learner,
        tokenizer=policy.tokenizer,
        prompt=settings.prompt,
        context=found.context,
    )


@dataclass(kw_only=True)
class DistillationTrainer(Trainer):
    """A run whose advantages need a teacher.

    Attributes:
        teacher: scores the tokens.
    """

    teacher: Teacher

    def evaluated(self, scored: ScoredGroups) -> Batch:
        """The sequences with the teacher's log-probabilities minus the policy's, as the column
        `teacher_gap`."""
        batch = super().evaluated(scored)
        with self.watch("the teacher"):
            own = batch.old_logp
            if own is None:
                own = self.policy.evaluate(batch, {"logp"})["logp"]
            gap = self.teacher.logp(batch, scored, self.policy) - own
        gap = torch.where(batch.mask, gap, 0).float()
        return replace(batch, columns={**batch.columns, "teacher_gap": gap})

"""On-policy distillation: a teacher scores the sampled tokens, or gives whole distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.binding import POLICY
from groupwise.algorithms.losses.distillation import DistillationObjective
from groupwise.config import Config
from groupwise.config.connect import best_device
from groupwise.errors import UsageError
from groupwise.models import Policy, load_policy
from groupwise.models.scoring import check_same_tokenizer
from groupwise.prompts.templates import render
from groupwise.settings import SELF, OptimizerSettings
from groupwise.training.trainer import Trainer
from groupwise.types import (
    Batch,
    Group,
    Learner,
    Metrics,
    Objective,
    Prompt,
    ScoredGroups,
    StepResult,
)
from groupwise.updates import TorchLearner
from groupwise.updates.top_k import TopK, top_k


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The teacher, which scores the tokens of the policy.

    Attributes:
        learner: computes distributions of the teacher; None: the policy itself.
        tokenizer: of the policy, for prompts.
        prompt: template of the teacher's prompt; None uses the policy's prompt.
        context: longest sequence that the teacher reads.
        vocab: tokens of the policy; a teacher's logits beyond them are not compared.
    """

    learner: Learner | None
    tokenizer: Any
    prompt: str | None
    context: int
    vocab: int

    def logp(
        self, batch: Batch, scored: ScoredGroups, policy: Learner
    ) -> Float[Tensor, "batch time"]:
        """Log-probability of every token under the teacher.

        Raises:
            UsageError: the prompt's template names no column, or the teacher cannot read so long a
                text.
        """
        seen = self._as_seen(batch, scored.groups)
        return (self.learner or policy).evaluate(seen, {"logp"})["logp"]

    def most_likely(self, batch: Batch, scored: ScoredGroups, policy: Learner, *, k: int) -> TopK:
        """The teacher's most likely tokens at every position; errors as in `logp`."""
        learner = self.learner or policy
        assert isinstance(learner, TorchLearner), "logits are read in this process"
        return top_k(learner, self._as_seen(batch, scored.groups), k=k, vocab=self.vocab)

    def _as_seen(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        if self.prompt is not None:
            prompts = [
                render(teacher_prompt(g.prompt, self.prompt), self.tokenizer) for g in groups
            ]
            batch = replace(batch, prompts=tuple(torch.tensor(tokens) for tokens in prompts))
        longest = max(map(len, batch.prompts), default=0) + int(batch.length.max())
        if longest > self.context:
            raise UsageError(
                f"distillation.teacher: reads {self.context} tokens, and a prompt with its "
                f"completion has {longest}; lower sampling.max_tokens, or shorten "
                "distillation.prompt."
            )
        return batch


def teacher_prompt(prompt: Prompt, template: str) -> Prompt:
    """A prompt whose last message is replaced by the filled-in template.

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
            f"distillation.prompt = {template!r}: {error} is not a column of the data; known: "
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
    vocab = vocabulary(policy)
    if settings.top_k is not None and settings.top_k > vocab:
        raise UsageError(
            f"distillation.top_k = {settings.top_k}: the policy has {vocab} tokens; set at most "
            "that many."
        )
    if settings.teacher == SELF:
        return Teacher(
            learner=None,
            tokenizer=policy.tokenizer,
            prompt=settings.prompt,
            context=policy.context,
            vocab=vocab,
        )
    try:
        found = load_policy(
            settings.teacher,
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            attention=config.model.attention,
        )
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "distillation.teacher", 1)) from None
    where = f"distillation.teacher = {settings.teacher!r}"
    check_same_tokenizer(policy.tokenizer, found.tokenizer, where=where)
    known = vocabulary(found)
    if settings.top_k is not None and known < vocab and settings.top_k >= known:
        raise UsageError(
            f"distillation.top_k = {settings.top_k}: the teacher has {known} tokens and the policy "
            f"{vocab}; set fewer than {known}, so that one outcome is left for all others."
        )
    # Weights that are not trained get no float32 masters.
    found.model.requires_grad_(False).to(best_device())
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
        vocab=min(vocab, known),
    )


def vocabulary(policy: Policy) -> int:
    """Size of a model's vocabulary."""
    return len(policy.model.get_output_embeddings().weight)


def teacher_metrics(result: StepResult) -> Metrics:
    """Distance of the policy from the teacher before the update.

    Returns:
        "teacher_kl", the mean of log π − log π_T over the sampled tokens, which estimates
        KL(π‖π_T) in nats per token; NaN where no token was learned from.
    """
    gaps = []
    for batch, update in zip(result.batches, result.updates.get(POLICY, ()), strict=True):
        gap = update.logp[:, : batch.mask.shape[1]] - batch.columns["teacher_token"]
        gaps.append(gap[batch.mask & ~torch.isnan(gap)])
    return {"teacher_kl": float(torch.cat(gaps).mean()) if gaps else float("nan")}


@dataclass(kw_only=True)
class DistillationTrainer(Trainer):
    """A run that learns from a teacher, by its advantages or by its objective.

    Attributes:
        teacher: scores the tokens.
        top_k: number of the teacher's tokens that the objective compares at every position; None
            compares the sampled token, in the advantages.
        beta: of the divergence (`generalized_jsd`).
    """

    teacher: Teacher
    top_k: int | None = None
    beta: float = 1.0

    def step(self) -> StepResult:
        """Train on one batch of rollouts."""
        result = super().step()
        return replace(result, metrics={**result.metrics, **teacher_metrics(result)})

    def evaluated(self, scored: ScoredGroups) -> Batch:
        """The sequences with what the teacher says of them as columns: its log-probabilities
        minus the policy's ("teacher_gap"), or, where the objective compares whole distributions,
        the most likely tokens with theirs."""
        batch, policy = super().evaluated(scored), self.policy
        with self.watch("the teacher"):
            if self.top_k is not None:
                found = self.teacher.most_likely(batch, scored, policy, k=self.top_k)
                columns = {
                    "teacher_ids": found.ids,
                    "teacher_logp": found.logp,
                    "teacher_token": found.token,
                    "teacher_gap": torch.zeros(batch.mask.shape),
                }
                return replace(batch, columns={**batch.columns, **columns})
            own = batch.old_logp
            if own is None:
                own = policy.evaluate(batch, {"logp"})["logp"]
            token = self.teacher.logp(batch, scored, policy)
        gap = torch.where(batch.mask, token - own, 0).float()
        columns = {"teacher_token": token.float(), "teacher_gap": gap}
        return replace(batch, columns={**batch.columns, **columns})

    @property
    def objective(self) -> Objective:
        """That of the algorithm, or with the divergence from the teacher added."""
        own = self.algorithm.objective
        return own if self.top_k is None else DistillationObjective(policy=own, beta=self.beta)


def with_teacher(config: Config, policy: Policy) -> Callable[..., DistillationTrainer]:
    """A function that makes the trainer of a configuration with a teacher, which is loaded now."""
    settings = config.distillation
    assert settings is not None
    return partial(
        DistillationTrainer,
        teacher=make_teacher(config, policy),
        top_k=settings.top_k,
        beta=settings.beta,
    )

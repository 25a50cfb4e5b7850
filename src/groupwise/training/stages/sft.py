"""Supervised fine-tuning on worked examples.

The same learner as in reinforcement learning does the work, so the examples are packed without
padding; the loss is the negative log-likelihood of the completions alone, averaged over all their
tokens in the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from groupwise.algorithms.losses import FunctionObjective
from groupwise.errors import UsageError
from groupwise.models import Policy, load_policy
from groupwise.models import save_policy as save
from groupwise.prompts.examples import Example
from groupwise.prompts.order import PromptOrder
from groupwise.prompts.templates import render
from groupwise.types import Batch, Update
from groupwise.updates import OptimizerSettings, TorchLearner

OnStep = Callable[[int, Update], None]


NEGATIVE_LOG_LIKELIHOOD = FunctionObjective(loss=lambda outputs, batch: -outputs["logp"])
"""Token losses −log π(token): the objective of supervised learning."""


def supervised_batch(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Examples as a batch whose token losses sum to the mean over all completion tokens.

        weight = 1 / Σ_i |o_i|

    The token that ends a completion is learned with it; the prompt and what an environment wrote
    are not, and |o_i| does not count them. Parts of a completion are tokenised one by one, as they
    come in a rollout.

    Raises:
        UsageError: no example, or a tokenizer without an end token.
    """
    if not examples:
        raise UsageError("examples = []: must contain at least one example.")
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UsageError("tokenizer.eos_token: is not set, so no completion could learn to end.")
    completions = [[*_tokens_of(example, tokenizer), (end, True)] for example in examples]
    return learned_batch(
        [render(example.prompt, tokenizer) for example in examples],
        [[token for token, _ in row] for row in completions],
        [[own for _, own in row] for row in completions],
    )


def learned_batch(
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    *,
    group: Tensor | None = None,
) -> Batch:
    """Rows of tokens as a batch whose token losses sum to the mean over all learned tokens.

    Args:
        prompts: each once.
        rows: what follows the prompts.
        masks: True for the tokens of a row that are learned.
        group: place of each row's prompt; None where every row has its own.
    """
    length = torch.tensor([len(row) for row in rows])
    there = torch.arange(int(length.max())) < length[:, None]
    tokens, mask = torch.zeros(there.shape, dtype=torch.long), torch.zeros_like(there)
    tokens[there] = torch.tensor([token for row in rows for token in row])
    mask[there] = torch.tensor([learned for row in masks for learned in row])
    return Batch(
        prompts=tuple(torch.tensor(list(prompt)) for prompt in prompts),
        group=torch.arange(len(prompts)) if group is None else group,
        tokens=tokens,
        length=length,
        mask=mask,
        advantage=torch.zeros(mask.shape),
        weight=mask / mask.sum(),
    )


def _tokens_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, bool]]:
    """The tokens of a completion, each with whether it is learned."""
    for text, own in example.pieces:
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            yield token, own


def fit(
    policy: Policy,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 1e-5,
    warmup_steps: int = 0,
    final_fraction: float = 0.1,
    weight_decay: float = 0.0,
    tokens_per_microbatch: int = 8192,
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> Iterator[Update]:
    """Train a policy in place on worked examples; each item of the iterator takes one optimizer
    step.

    Args:
        examples: any sequence; every epoch goes through it in a new order that `seed` decides.
        steps: optimizer steps; may run over several epochs.
        batch_size: examples of one step.
        learning_rate: the highest; reached by a linear warm-up and followed by a cosine decay.
        final_fraction: share of the learning rate that is left at the last step.
        tokens_per_microbatch: packed tokens of one pass; bounds memory and changes no number.

    Yields:
        What each step did; its `loss` is the mean over completion tokens before the step.

    Raises:
        UsageError: a count below 1, no examples, or one longer than the model's context.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise UsageError(f"sft.{name} = {value}: must be at least 1.")
    order = PromptOrder(len(examples), seed=seed)
    learner = TorchLearner(
        policy,
        optimizer=OptimizerSettings(
            learning_rate=learning_rate,
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            schedule="cosine",
            final_fraction=final_fraction,
        ),
        total_steps=steps,
        tokens_per_microbatch=tokens_per_microbatch,
        gradient_checkpointing=gradient_checkpointing,
    )
    try:
        for _ in range(steps):
            chosen = [examples[i] for i in order.next(batch_size)]
            batch = supervised_batch(chosen, policy.tokenizer)
            _check_length(batch, chosen, policy.context)
            yield learner.update(batch, NEGATIVE_LOG_LIKELIHOOD)
    finally:
        learner.optimizer.remove_hooks()
    policy.model.eval()


def sft(
    model: str | Path | Policy,
    examples: Sequence[Example],
    *,
    output: str | Path,
    on_step: OnStep | None = None,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 1e-5,
    warmup_steps: int = 0,
    final_fraction: float = 0.1,
    weight_decay: float = 0.0,
    tokens_per_microbatch: int = 8192,
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> Policy:
    """Fine-tune a model on worked examples and save it as a Hugging Face folder.

    Args:
        model: a folder, a hub name, "bundled", or a policy at hand, which is trained in place.
        output: folder that the trained model and its tokenizer are written to.
        on_step: called after each optimizer step with its number, from 1, and what it did.
        steps: and all further settings as in `fit`.

    Returns:
        The trained policy.
    """
    policy = model if isinstance(model, Policy) else load_policy(model)
    updates = fit(
        policy,
        examples,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        final_fraction=final_fraction,
        weight_decay=weight_decay,
        tokens_per_microbatch=tokens_per_microbatch,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
    )
    for step, update in enumerate(updates, start=1):
        if on_step is not None:
            on_step(step, update)
    save(policy, output)
    return policy


def _check_length(batch: Batch, examples: Sequence[Example], context: int) -> None:
    for prompt, length, example in zip(batch.prompts, batch.length.tolist(), examples, strict=True):
        if len(prompt) + length > context:
            raise UsageError(
                f"example {example.prompt.id}: has {len(prompt) + length} tokens and the model's "
                f"context holds {context}; shorten or drop it."
            )

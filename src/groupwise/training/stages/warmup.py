"""The supervised warm-up of a run: a model that lacks the format learns it from worked answers."""

from __future__ import annotations

from groupwise.config import Config
from groupwise.config.data import with_transforms
from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.prompts.examples import COMPLETIONS, Example
from groupwise.prompts.sources import load_prompts
from groupwise.registry import spec
from groupwise.settings import SftSettings, WarmupSettings
from groupwise.training.monitor.progress import Progress
from groupwise.training.stages.sft import fit


def warm_up(config: Config, policy: Policy, *, progress: Progress) -> float:
    """Train a policy in place on the worked answers of the training data.

    Returns:
        The mean loss per token over the last tenth of the steps.

    Raises:
        UsageError: the configuration has no warm-up, or its data no worked answers.
    """
    if config.warmup is None:
        raise UsageError("warmup: is not set; add a section [warmup].")
    examples = worked_examples(config, policy)
    every = max(1, config.warmup.steps // 10)
    updates = fit(
        policy,
        examples,
        steps=config.warmup.steps,
        batch_size=config.warmup.batch_size,
        learning_rate=config.warmup.learning_rate,
        warmup_steps=config.warmup.rise_steps,
        tokens_per_microbatch=config.update.tokens_per_microbatch,
        seed=config.seed,
    )
    losses = []
    for step, update in enumerate(updates, start=1):
        losses.append(update.loss)
        if step % every == 0:
            progress.log(f"warm-up {step}/{config.warmup.steps}: loss {update.loss:.3f}")
    return sum(losses[-every:]) / len(losses[-every:])


def worked_examples(
    config: Config, policy: Policy, settings: WarmupSettings | SftSettings | None = None
) -> list[Example]:
    """Prompts of the training data with the completions to learn; those too long are left out.

    Args:
        settings: the column of the completions and its style; None takes the section [warmup].
    """
    data, settings = config.data, settings or config.warmup
    column = (settings.column if settings else None) or data.answer_column or "answer"
    style = COMPLETIONS.bind(spec(settings.style if settings else "as_written"))
    prompts = load_prompts(
        data.train,
        split=data.train_split,
        subset=data.subset,
        revision=data.revision,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        answer_style=data.answer_style,
        system=data.system,
        wording=data.wording,
        chat=data.chat,
        limit=settings.limit if settings else None,
    )
    room = config.sampling.max_tokens
    examples = []
    for prompt in with_transforms(config, prompts):
        # A nested column such as output.answer, and the answers of generators, are not columns.
        other = prompt.answer if column in (data.answer_column, "answer") else None
        completion = style({"text": str(prompt.columns.get(column, other or ""))})
        if completion is not None and len(policy.tokenizer(completion).input_ids) < room:
            examples.append(Example(prompt=prompt, completion=completion))
    if not examples:
        section = "sft" if isinstance(settings, SftSettings) else "warmup"
        raise UsageError(
            f"{section}.column = {column!r}: holds no worked answer of style "
            f"{style.spec.name!r} shorter than sampling.max_tokens = {room}."
        )
    return examples

"""The prompts of a configuration, loaded as its [data] section says and rendered for the model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.models import Policy
from groupwise.prompts.sources import GENERATORS, load_prompts
from groupwise.prompts.templates import Rendered, check_round_trip, render_all
from groupwise.rewards import dropped_tags
from groupwise.types import Prompt


def load_train(config: Config) -> Sequence[Prompt]:
    """The training prompts of a configuration."""
    data = config.data
    return load_source(config, data.train, setting="train", limit=data.limit)


def has_eval(config: Config) -> bool:
    """Whether there are held-out prompts: a file has no split to take them from."""
    return config.data.eval is not None or not Path(config.data.train).is_file()


def load_eval(config: Config) -> Sequence[Prompt]:
    """Held-out prompts; none where the data is one file."""
    data = config.data
    if not has_eval(config):
        return []
    source = data.eval or data.train
    limit = config.evaluation.prompts
    endless = source in GENERATORS
    held_out = load_source(config, source, setting="eval", limit=limit if endless else None)
    return held_out[:limit]


def rendered(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Rendered:
    """Prompts as the model sees them.

    Raises:
        UsageError: a prompt is too long, or an answer does not survive the tokenizer.
    """
    room = policy.context - config.sampling.max_tokens
    if room < 1:
        raise UsageError(
            f"sampling.max_tokens = {config.sampling.max_tokens}: the model's context is "
            f"{policy.context} tokens, which leaves no room for a prompt."
        )
    answers = sorted({p.answer for p in prompts[:100] if p.answer})
    problems = check_round_trip(policy.tokenizer, answers)
    if problems:
        raise UsageError(f"tokenizer: {problems[0]}")
    if tags := dropped_tags(policy.tokenizer):
        warnings.warn(
            f"{', '.join(tags)} are special tokens of this tokenizer: rewards here see them, but "
            "programs that decode with special tokens skipped will not; prefer ordinary tokens.",
            stacklevel=2,
        )
    limit = min(room, config.data.max_prompt_tokens or room)
    return render_all(prompts, policy.tokenizer, limit=limit, too_long=config.data.too_long)


def load_source(
    config: Config,
    source: Any,
    *,
    setting: Literal["train", "eval"] = "train",
    limit: int | None = None,
) -> Sequence[Prompt]:
    """Prompts of any source, read as the section [data] says.

    Args:
        setting: which of its settings names the source; it decides on the split.

    Raises:
        UsageError: as `load_prompts`, naming that setting.
    """
    data = config.data
    try:
        return load_prompts(
            source,
            split=data.train_split if setting == "train" else data.eval_split,
            subset=data.subset,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
            id_column=data.id_column,
            answer_style=data.answer_style,
            system=data.system,
            wording=data.wording,
            chat=data.chat,
            limit=limit,
        )
    except UsageError as error:
        # A reader knows what it reads, but not which setting said so.
        said = str(error).replace("data.split = ", f"data.{setting}_split = ", 1)
        named = setting if getattr(data, setting) is not None else "train"
        raise UsageError(re.sub(r"^data = ", f"data.{named} = ", said)) from error.__cause__

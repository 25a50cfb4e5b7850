"""The prompts of a configuration, loaded as its [data] section says and rendered for the model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Config
from groupwise.environments import Showing, build_environment, by_column, check_column
from groupwise.errors import UsageError, warn
from groupwise.models import Policy
from groupwise.prompts.contamination import question
from groupwise.prompts.lazy import LazySequence
from groupwise.prompts.order import PromptOrder
from groupwise.prompts.orders import (
    CurriculumOrder,
    MixedOrder,
    Order,
    PrioritisedOrder,
    levels_of,
)
from groupwise.prompts.sources import generator_of, load_prompts
from groupwise.prompts.templates import Rendered, check_round_trip, render_all, shows_tools
from groupwise.prompts.transforms import transformed, transforms_of
from groupwise.registry import FunctionSpec
from groupwise.rewards import dropped_tags
from groupwise.settings import EnvironmentSettings
from groupwise.types import Prompt

BUILT_IN = ("search", "no_search", "python", "calculator")
"""Environments that show no functions."""
CHECKED = 10_000
"""Number of prompts whose environment is checked before a run starts."""


def load_train(config: Config) -> Sequence[Prompt]:
    """The training prompts of a configuration."""
    data = config.data
    if not data.sources:
        return with_transforms(
            config, load_source(config, data.train, setting="train", limit=data.limit)
        )
    found: list[Prompt] = []
    for source in data.sources:
        given = source.model_dump(exclude={"name", "data", "share", "limit", "split"})
        own = {key: value for key, value in given.items() if value is not None}
        if source.split is not None:
            own["train_split"] = source.split
        settings = config.model_copy(update={"data": data.model_copy(update=own)})
        prompts = load_source(settings, source.data, setting="train", limit=source.limit)
        found += [
            replace(p, id=f"{source.name}/{p.id}", columns={**p.columns, SOURCE: source.name})
            for p in prompts
        ]
    return with_transforms(config, found)


SOURCE = "source"
"""The column with the name of a prompt's source, for runs with several sources."""


def order_of(config: Config, prompts: Sequence[Prompt]) -> Order:
    """The order in which a run draws its prompts.

    Raises:
        UsageError: a source without prompts, or a prompt without its difficulty.
    """
    data, seed = config.data, config.seed
    if data.sources:
        members: dict[str, list[int]] = {source.name: [] for source in data.sources}
        for place, prompt in enumerate(prompts):
            members[prompt.columns[SOURCE]].append(place)
        return MixedOrder(members, {s.name: s.share for s in data.sources}, seed=seed)
    order = data.order
    if order.name == "curriculum":
        levels = levels_of(prompts, str(order.column), easiest=order.easiest)
        return CurriculumOrder(levels, per_level=order.per_level, seed=seed)
    if order.name == "prioritised":
        return PrioritisedOrder([p.id for p in prompts], floor=order.floor, seed=seed)
    return PromptOrder(len(prompts), seed=seed)


def split_validation(
    prompts: Sequence[Prompt], count: int
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """The prompts to train on, and `count` validation prompts, chosen by a hash of their ids.

    Training prompts whose text is that of a validation prompt are left out.

    Raises:
        UsageError: no training prompt would be left.
    """
    if count >= len(prompts):
        raise UsageError(
            f"evaluation.validation = {count}: leaves none of {len(prompts)} prompts to train on."
        )
    if not count:
        return prompts, ()
    if isinstance(prompts, LazySequence):
        return prompts[:-count], prompts[-count:]
    by_hash = sorted(prompts, key=lambda p: hashlib.blake2b(p.id.encode()).digest())
    chosen = {prompt.id for prompt in by_hash[:count]}
    apart = [prompt for prompt in prompts if prompt.id in chosen]
    texts = {question(prompt) for prompt in apart}
    return [prompt for prompt in prompts if question(prompt) not in texts], apart


def with_transforms(config: Config, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts after the transforms of the section [data]."""
    transforms = transforms_of(config.data.transforms)
    return transformed(prompts, transforms, seed=config.seed) if transforms else prompts


def has_eval(config: Config) -> bool:
    """Whether there are held-out prompts; a single file has no split for them."""
    return config.data.eval is not None or not Path(config.data.train).is_file()


def load_eval(config: Config) -> Sequence[Prompt]:
    """Held-out prompts; none if the data is a single file."""
    data = config.data
    if not has_eval(config):
        return []
    source = data.eval or data.train
    limit = config.evaluation.prompts
    endless = generator_of(source) is not None
    held_out = load_source(config, source, setting="eval", limit=limit if endless else None)
    return with_transforms(config, held_out[:limit])


def rendered(config: Config, policy: Policy, prompts: Sequence[Prompt]) -> Rendered:
    """Prompts rendered for the model.

    Raises:
        UsageError: a prompt is too long, an answer does not survive tokenization, or a prompt has
            no environment.
    """
    if config.environment is not None and config.environment.name == by_column.__name__:
        check_column(prompts[:CHECKED], **config.environment.settings)
    room = policy.context - config.sampling.max_tokens
    if room < 1:
        raise UsageError(
            f"sampling.max_tokens = {config.sampling.max_tokens}: must leave room for a prompt; "
            "the model's context is "
            f"{policy.context} tokens."
        )
    answers = sorted({p.answer for p in prompts[:100] if p.answer})
    problems = check_round_trip(policy.tokenizer, answers)
    if problems:
        raise UsageError(f"tokenizer: {problems[0]}")
    if tags := dropped_tags(policy.tokenizer):
        warn(
            f"{', '.join(tags)} are special tokens of this tokenizer: rewards see them, but "
            "programs that skip special tokens when decoding will not; prefer ordinary tokens."
        )
    limit = min(room, config.data.max_prompt_tokens or room)
    if config.environment is not None and shows_tools(policy.tokenizer):
        prompts = _with_tools(prompts, config.environment)
    return render_all(prompts, policy.tokenizer, limit=limit, too_long=config.data.too_long)


def _with_tools(prompts: Sequence[Prompt], settings: EnvironmentSettings) -> Sequence[Prompt]:
    """Prompts with the schemas of the functions of their environments.

    Raises:
        UsageError: a function that cannot be described.
    """
    given = settings.settings
    if settings.name == by_column.__name__:
        made = {label: _schemas(table) for label, table in given["environments"].items()}
        column = given.get("column", "environment")
    else:
        made, column = {None: _schemas({"name": settings.name, **given})}, ""
    if not any(made.values()):
        return prompts

    def shown(prompt: Prompt) -> Prompt:
        return replace(prompt, tools=made.get(prompt.columns.get(column), ()) or prompt.tools)

    if isinstance(prompts, LazySequence):
        lazy = prompts
        return LazySequence(len(lazy), lambda index: shown(lazy[index]), digest=lazy.digest)
    return tuple(map(shown, prompts))


def _schemas(table: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The schemas of an environment, which is made for that; those of this package show none, and
    an index takes long."""
    settings = dict(table)
    name = settings.pop("name")
    if name in BUILT_IN:
        return ()
    made = build_environment(FunctionSpec(name=name, settings=settings), where="environment")
    return made.schemas if isinstance(made, Showing) else ()


def load_source(
    config: Config,
    source: Any,
    *,
    setting: Literal["train", "eval"] = "train",
    limit: int | None = None,
) -> Sequence[Prompt]:
    """Prompts of any source, read as the section [data] says.

    Args:
        setting: the setting that names the source; it determines the split.

    Raises:
        UsageError: as `load_prompts`, naming that setting.
    """
    data = config.data
    try:
        return load_prompts(
            source,
            split=data.train_split if setting == "train" else data.eval_split,
            subset=data.subset,
            revision=None if setting == "eval" and data.eval is not None else data.revision,
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
        # A reader does not know which setting named the source.
        said = str(error).replace("data.split = ", f"data.{setting}_split = ", 1)
        named = setting if getattr(data, setting) is not None else "train"
        raise UsageError(re.sub(r"^data = ", f"data.{named} = ", said)) from error.__cause__

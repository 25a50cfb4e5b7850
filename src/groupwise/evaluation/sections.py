"""The sections of a suite: each task as it is, at a token budget, for a target length, in a
template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.prompts.transforms import target_length, template
from groupwise.registry import FunctionSpec, parse_spec, spec


@dataclass(frozen=True, kw_only=True)
class Section:
    """One measurement of every model.

    Attributes:
        name: heading in the table.
        config: settings that the models answer under.
        target: length that every prompt asks for, in tokens; None where none is set.
        budgeted: whether the token limit is a budget of the call, not the recipe's.
        line: name without the number that varies along a curve.
        place: that number: the budget, or else the target; None where neither was asked for.
    """

    name: str
    config: Config
    target: int | None = None
    budgeted: bool = False
    line: str = ""
    place: int | None = None


def sections(
    tasks: Mapping[str, Config],
    *,
    budgets: Sequence[int] = (),
    targets: Sequence[int] = (),
    templates: Mapping[str, str | None] | None = None,
) -> list[Section]:
    """Every task in every template, for every target length, at every budget.

    Args:
        tasks: settings by the name of the task.
        budgets: token limits, each in place of `sampling.max_tokens`.
        targets: lengths in tokens, each in place of the bounds of the transform `target_length`.
        templates: by name, a text with {question}, which replaces any other template; None leaves
            the prompts of the recipe.

    Raises:
        UsageError: values that are not different or below 1, budgets or targets above the token
            limit of a recipe, targets for a recipe without `target_length`, a template without
            {question}.
    """
    for option, values in (("--budgets", budgets), ("--target-lengths", targets)):
        if len(set(values)) < len(values) or any(value < 1 for value in values):
            listed = ",".join(map(str, values))
            raise UsageError(f"{option} = {listed}: must be different numbers, at least 1.")
        for task, config in tasks.items():
            limit = config.sampling.max_tokens
            if values and max(values) > limit:
                raise UsageError(
                    f"{option} = {max(values)}: must be at most {limit}, sampling.max_tokens of "
                    f"{task}; --set sampling.max_tokens={max(values)} raises it."
                )
    found = [Section(name=task, config=config) for task, config in tasks.items()]
    if templates:
        found = [_written(each, *given) for each in found for given in templates.items()]
    if targets:
        found = [_targeted(each, n) for each in found for n in sorted(targets)]
    if budgets:
        found = [_limited(each, n) for each in found for n in sorted(budgets)]
    return found


def _limited(section: Section, budget: int) -> Section:
    config = section.config
    sampling = config.sampling.model_copy(update={"max_tokens": budget})
    return replace(
        section,
        name=f"{section.name}, {budget} tokens",
        config=config.model_copy(update={"sampling": sampling}),
        budgeted=True,
        line=section.name,
        place=budget,
    )


def _targeted(section: Section, target: int) -> Section:
    name = target_length.__name__
    given = _transforms(section.config)
    if name not in [each.name for each in given]:
        raise UsageError(
            f"--target-lengths: {section.name} has no transform {name}, which writes the length "
            f"into the prompt; --set 'data.transforms=[\"{name}(low={target}, high={target})\"]' "
            "adds one. Its wording must be the one of training."
        )
    fixed = [
        spec(name, **{**each.settings, "low": target, "high": target})
        if each.name == name
        else each
        for each in given
    ]
    return replace(
        section,
        name=f"{section.name}, target {target}",
        config=_with(section.config, fixed),
        target=target,
        line=section.name,
        place=target,
    )


def _written(section: Section, name: str, text: str | None) -> Section:
    config = section.config
    if text is not None:
        if "{question}" not in text:
            raise UsageError(f"--templates: {name} must contain {{question}}.")
        kept = [each for each in _transforms(config) if each.name != template.__name__]
        config = _with(config, [*kept, spec(template.__name__, text=text)])
    return replace(section, name=f"{section.name}, template {name}", config=config)


def _transforms(config: Config) -> list[FunctionSpec]:
    return [parse_spec(text, where="data.transforms") for text in config.data.transforms]


def _with(config: Config, transforms: Sequence[FunctionSpec]) -> Config:
    """The configuration with other transforms."""
    texts = tuple(map(str, transforms))
    return config.model_copy(update={"data": config.data.model_copy(update={"transforms": texts})})

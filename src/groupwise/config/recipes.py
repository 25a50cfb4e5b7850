"""Recipes: packaged or custom TOML files, with overrides from the command line."""

from __future__ import annotations

import copy
import functools
import importlib.resources
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise import extensions
from groupwise.config.building import build
from groupwise.config.schema import Config, check_known, needs_trust
from groupwise.config.unused import unused_settings
from groupwise.errors import UsageError, suggest, warn
from groupwise.settings.base import CODE

DEFAULT = "default"
COMMAND_LINE = "--set"
DESCRIPTION = ("method", "learned_by")
"""Entries of `config.json` that are not settings: what reports show instead of the algorithm."""
TEXTS = (
    *("path", "model", "models", "teacher", "output", "system", "wording", "stop"),
    *("prompt_column", "answer_column", "id_column", "column"),
)
"""Names of settings whose strings never name a function, even if they look like it."""
DATA = ("train", "eval", "data")
"""Names of settings that accept `generator:task`."""
UNSANDBOXED = "allow_unsandboxed"
"""Setting of rewards that runs programs of a model with the rights of the user."""
_MOST_VALUES = 100_000
RESET = object()
"""The value of an override that restores the default of a setting."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration with the origin of each setting.

    Attributes:
        config: the configuration.
        recipe: name or path of the recipe.
        origins: dotted path → "default", the recipe, or "--set", for every setting.
        derived: quantities computed from the settings: name → value and formula.
    """

    config: Config
    recipe: str
    origins: Mapping[str, str]
    derived: Mapping[str, str]


def load(
    recipe: str | Path, overrides: Sequence[str] = (), *, trust_recipe: bool = False
) -> Config:
    """The configuration of a recipe.

    Args:
        recipe: path of a TOML or YAML file, or the name of a packaged recipe.
        overrides: `section.field=value`; the value is read as TOML, or else as a string. `null` is
            None, and `section.field=` restores the default.
        trust_recipe: accept settings of a recipe file that need trust (`needs_trust`).

    Raises:
        UsageError: no such recipe, not TOML, or a setting that cannot be used or needs trust.

    Example:
        >>> load("word-problems", ["group_size=4"]).group_size
        4
    """
    return resolve(recipe, overrides, trust_recipe=trust_recipe).config


def resolve(
    recipe: str | Path, overrides: Sequence[str] = (), *, trust_recipe: bool = False
) -> Resolved:
    """Like `load`, with the origin of every setting."""
    return _resolved(read(recipe), recipe, overrides, trust_recipe=trust_recipe)


def load_run(
    folder: str | Path, overrides: Sequence[str] = (), *, trust_recipe: bool = False
) -> Config:
    """The configuration that a run was started with, with overrides.

    Args:
        folder: a run directory.
        overrides, trust_recipe: see `load`; trust has to be given again, because the folder may
            come from elsewhere.

    Raises:
        UsageError: the folder has no settings, or this version cannot use them.
    """
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["config"]
        values = {name: value for name, value in found.items() if name not in DESCRIPTION}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"--resume = {str(folder)!r}: has no config.json of a run; name the recipe too: "
            "groupwise train RECIPE --resume DIR."
        ) from None
    from_file = copy.deepcopy(values)  # before overrides are put in
    try:
        return _resolved(values, path, overrides, trust_recipe=trust_recipe).config
    except UsageError as error:
        try:
            build(from_file)
        except UsageError as same:
            if str(same) == str(error):
                raise UsageError(
                    f"{str(path)!r}: {error} If another version began this run, name the recipe "
                    'as well: groupwise train RECIPE --resume DIR ("command" in config.json names '
                    "it)."
                ) from None
        raise


def _resolved(
    values: dict[str, Any], recipe: str | Path, overrides: Sequence[str], *, trust_recipe: bool
) -> Resolved:
    """A configuration of plain values and overrides."""
    given = dict.fromkeys(_leaves(values), str(recipe))
    named = {path: value for path, value in _items(values) if holds_code(path, value)}
    for override in overrides:
        steps, value = parse_override(override)
        _put(values, steps, value, where=".".join(steps))
        path = ".".join(steps)
        given = {k: v for k, v in given.items() if k != path and not k.startswith(path + ".")}
        if value is RESET:
            check_known(steps)
        else:
            given |= dict.fromkeys(_leaves(value, path), COMMAND_LINE)
    from_file = {path for path, origin in given.items() if origin == str(recipe)}
    held = dict(_items(values))
    for setting in sorted(needs_trust().keys() & from_file):
        _check_trust(held[setting], setting, trusted=trust_recipe)
    left = {*strings_in(values)} - {*strings_in([parse_override(o)[1] for o in overrides])}
    for setting, value in named.items():
        if left.intersection(strings_in(value)) or (value is True and setting in from_file):
            _refuse_untrusted(setting, value, CODE, trusted=trust_recipe)
    given |= _import(values)
    config = build(values)
    for line in unused_settings(config):
        warn(line)
    origins = {path: given.get(path, DEFAULT) for path in _leaves(config.model_dump())}
    return Resolved(config=config, recipe=str(recipe), origins=origins, derived=derived(config))


def trusted_overrides(recipe: str | Path) -> list[str]:
    """Settings of a recipe file that can run code, as overrides, so that a plan made from the
    recipe includes them."""
    guarded = needs_trust()
    found = {
        path: value
        for path, value in _items(read(recipe))
        if guarded.get(path, ("",))[0] == CODE or holds_code(path, value)
    }
    for setting, value in found.items():
        if setting in guarded:
            _check_trust(value, setting, trusted=True)
        else:
            _refuse_untrusted(setting, value, CODE, trusted=True)
    return [f"{setting}={json.dumps(found[setting])}" for setting in sorted(found)]


def distrusted(override: str) -> str:
    """Why an untrusted file may not contain an override, such as "can run code"; "" if it may.

    Example:
        >>> distrusted("hub.name=owner/model"), distrusted("steps=5")
        ('sends the model to the hub', '')
    """
    steps, value = parse_override(override)
    setting = ".".join(steps)
    if holds_code(setting, value):
        return CODE
    guarded = needs_trust().items()
    return next((why for path, (why, _) in guarded if f"{path}.".startswith(f"{setting}.")), "")


def _import(values: dict[str, Any]) -> dict[str, str]:
    """Import the modules of the recipe and of `--import`, before names are looked up.

    Returns:
        The origin of `imports` if `--import` has added to it.
    """
    named, more = values.get("imports", ()), extensions.requested()
    if isinstance(named, list | tuple) and all(isinstance(each, str) for each in named):
        extensions.load([*named, *more])
        if more:
            values["imports"] = [*dict.fromkeys([*named, *more])]
            return {"imports": "--import"}
    return {}


def packaged() -> dict[str, Path]:
    """The recipes that ship with the package, by name.

    Example:
        >>> "word-problems" in packaged()
        True
    """
    folder = Path(str(importlib.resources.files("groupwise") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def packaged_pipelines() -> dict[str, Path]:
    """The pipelines that ship with the package, by name.

    Example:
        >>> "long2short-small" in packaged_pipelines()
        True
    """
    folder = Path(str(importlib.resources.files("groupwise") / "recipes" / "pipelines"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read(recipe: str | Path) -> dict[str, Any]:
    """The plain values of a recipe file, TOML or (`.yaml`, `.yml`) YAML.

    Raises:
        UsageError: no such recipe, unreadable, or not TOML or YAML (with line and column).
    """
    path, known = Path(recipe).expanduser(), packaged()
    if (
        not path.is_file() and str(recipe) in known
    ):  # a folder of this name may be a run of the recipe
        path = known[str(recipe)]
    if not path.exists():
        raise UsageError(
            f"recipe = {str(recipe)!r}: is neither a file nor a packaged recipe; "
            + suggest(str(recipe), known)
        )
    if not path.is_file():
        raise UsageError(f"recipe = {str(recipe)!r}: must be a regular file{_what_else(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        return _yaml(text, recipe) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe = {str(recipe)!r}: is not valid TOML: {error}.") from None
    except UsageError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # too large numbers, too deep nesting
        raise UsageError(f"recipe = {str(recipe)!r}: cannot be read: {error}.") from None


def _what_else(path: Path) -> str:
    """What to type instead of a run directory."""
    if not (path / "metrics.jsonl").is_file():
        return "."
    return (
        '; this is a run directory. Give the recipe of the run ("command" in its config.json '
        f"names it); its model is {str(path / 'final')!r}."
    )


def _yaml(text: str, recipe: str | Path) -> dict[str, Any]:
    """A recipe in YAML.

    Raises:
        UsageError: it is not valid YAML, or not a mapping.
    """
    import yaml

    try:
        values = yaml.load(text, Loader=_yaml_loader())
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise UsageError(f"recipe = {str(recipe)!r}: is not valid YAML: {said}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"recipe = {str(recipe)!r}: must be a mapping of settings to values.")
    waiting, count = [values], 0
    while waiting:
        each = waiting.pop()
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += inner
        count += len(inner)
        if count > _MOST_VALUES:
            raise UsageError(
                f"recipe = {str(recipe)!r}: must not contain more than {_MOST_VALUES:,} values; "
                "aliases (*name) count with all that they stand for."
            )
    return values


@functools.cache
def _yaml_loader() -> Any:
    """YAML's safe loader, which reads 1e-6 as a number as TOML and YAML 1.2 do."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def _check_trust(value: Any, setting: str, *, trusted: bool) -> None:
    """Raise an error for a setting that needs trust, or warn if the recipe file is trusted."""
    why, default = needs_trust()[setting]
    if value in (None, default, []) or _asked_for(setting, value):
        return
    _refuse_untrusted(setting, value, why, trusted=trusted)


def _refuse_untrusted(setting: str, value: Any, why: str, *, trusted: bool) -> None:
    """Raise an error for a value that needs trust, or warn if the recipe file is trusted."""
    where = f"{setting} = {str(value)[:200]!r}"
    if not trusted:
        raise UsageError(
            f"{where}: {why}, so a recipe or run directory may not set it; read the file, then set "
            f"{setting} with --set, or trust the file with --trust-recipe."
        )
    warn(f"{where}: set by the recipe, and {why}.")


def _asked_for(setting: str, value: Any) -> bool:
    """Whether `--import` names everything that the file would import."""
    return setting == "imports" and {*strings_in(value)} <= {*extensions.requested()}


def strings_in(value: Any) -> Iterator[str]:
    """The strings of a value, including those in tables and lists.

    Example:
        >>> list(strings_in({"a": ["b", {"c": "d"}], "e": 1}))
        ['b', 'd']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings_in(each)


def parse_override(text: str) -> tuple[list[str], Any]:
    """The path and the value of `section.field=value`; the value is `RESET` if nothing follows the
    `=`.

    Raises:
        UsageError: no "=" or an empty step in the path.

    Example:
        >>> parse_override("optimizer.learning_rate=2e-4")
        (['optimizer', 'learning_rate'], 0.0002)
        >>> parse_override("data.train=my/train.jsonl")
        (['data', 'train'], 'my/train.jsonl')
        >>> parse_override("warmup=null")
        (['warmup'], None)
    """
    path, equals, value = text.partition("=")
    steps = path.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", step) for step in steps):
        raise UsageError(f"--set = {text!r}: must have the form section.field=value.")
    value = value.strip()
    if not value:
        return steps, RESET
    if value == "null":
        return steps, None
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return steps, value
    return steps, parsed["value"] if set(parsed) == {"value"} else value


def derived(config: Config) -> dict[str, str]:
    """Quantities computed from the settings of a run, with their formulas."""
    completions = config.prompts_per_step * config.group_size
    updates = config.update.epochs * config.update.minibatches
    prompt = config.data.max_prompt_tokens
    longest = (
        f"{prompt + config.sampling.max_tokens} = data.max_prompt_tokens + sampling.max_tokens"
        if prompt
        else "the model's context, of which completions get sampling.max_tokens"
    )
    return {
        "completions per step": f"{completions} = prompts_per_step · group_size",
        "completions per optimizer step": f"{completions // config.update.minibatches}"
        " = completions per step / update.minibatches",
        "optimizer steps": f"{config.steps * updates} = steps · update.epochs · update.minibatches",
        "completions of the run": f"{config.steps * completions} = steps · completions per step",
        "longest sequence in tokens": longest,
    }


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values at some dotted paths.

    Raises:
        UsageError: an unknown path, or a value that cannot be used.

    Example:
        >>> with_values(load("word-problems"), {"sampling.max_tokens": 9}).sampling.max_tokens
        9
    """
    plain = config.model_dump(mode="json")
    for path, value in values.items():
        _put(plain, path.split("."), value, where=path)
    return build(plain)


def _put(values: Any, steps: Sequence[str], value: Any, *, where: str) -> None:
    """Set one value in nested tables and lists; `RESET` removes it."""
    *section, last = steps
    for step in section:
        if isinstance(values, dict):
            if values.get(step) is None:  # absent, or null in a file or an earlier override
                values[step] = {}
            values = values[step]
        else:
            values = values[_index(values, step, where=where)]
    if isinstance(values, dict):
        if value is RESET:
            values.pop(last, None)
        else:
            values[last] = value
    else:
        index = _index(values, last, where=where)
        values[index : index + 1] = [] if value is RESET else [value]


def _index(values: Any, step: str, *, where: str) -> int:
    """A part of a path as an index into a list of the recipe."""
    if not isinstance(values, list):
        raise UsageError(f"--set {where}: {step!r} follows a setting that is not a section.")
    if not step.isdecimal() or int(step) >= len(values):
        wanted = f"must be a number from 0 to {len(values) - 1}" if values else "is beyond the end"
        what = "" if step.isdecimal() else ", a place in a list"
        raise UsageError(f"--set {where}: {step!r} {wanted}{what}.")
    return int(step)


def _items(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a table, with its dotted path; numbers are indices of lists of
    tables. An empty recipe is one value without a path."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _items(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list | tuple) and any(isinstance(v, Mapping) for v in values):
        for index, value in enumerate(values):
            yield from _items(value, f"{path}.{index}")
    else:
        yield path, values


def _leaves(values: Any, path: str = "") -> Iterator[str]:
    """The dotted path of every value that is not a table."""
    return (leaf for leaf, _ in _items(values, path))


def holds_code(path: str, value: Any) -> bool:
    """Whether a value contains a name such as `mine.py:right` that could be looked up as a
    function, or lets programs of a model run without a sandbox.

    Example:
        >>> holds_code("sft.style", "mine.py:tagged"), holds_code("model.path", "bundled:search")
        (True, False)
        >>> holds_code("rewards.0.allow_unsandboxed", True)
        True
    """
    return any(
        (last == UNSANDBOXED and each is True)
        or any(
            extensions.names_code(text.partition("(")[0].strip())  # a generator may have settings
            and not (last in DATA and _generates(text))
            for text in strings_in(each)
        )
        for leaf, each in _items(value, path)
        if (last := leaf.rpartition(".")[2]) not in TEXTS
    )


def _generates(text: str) -> bool:
    """Whether a text is a generator of prompts with a task; loads torch."""
    from groupwise.prompts.sources import GENERATORS

    return text.partition(":")[0] in GENERATORS


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted path, in the order of the sections."""
    return dict(_items(config.model_dump(mode="json")))

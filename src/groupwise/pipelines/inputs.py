"""Inputs of a stage that no stage makes: their hashes, and which are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.models.hub import check_on_hub
from groupwise.models.loading import BUNDLED
from groupwise.pipelines.plan import Pipeline, Stage
from groupwise.pipelines.stages import TAKES
from groupwise.prompts.sources import generator_of
from groupwise.rundir.provenance import fingerprint
from groupwise.settings import SELF

OWN_DATA = ("sft", "preference", "reward_model")
"""Sections of a recipe that may name a file of their own."""

AT_A_SERVER = "endpoint"
"""Setting of a reward whose `model` is a name at that address."""


def outside(
    stage: Stage, given: Mapping[str, Any], configs: Mapping[str, Config], pipeline: Pipeline
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Hashes of the inputs from outside, and the names of those that are not on this machine.

    Args:
        stage: of the pipeline.
        given: its settings, with paths in place of "@stage".
        configs: its configurations by the name of the recipe.
        pipeline: whose own outputs are not inputs from outside.
    """
    models, files = _of_settings(given)
    more_models, more_files = list[str](), list[str]()
    for config in configs.values():
        if not {"model", "models"} & given.keys() and given.get("by") != "search":
            models.append(config.model.path)
        if "rows" not in given:
            files.append(config.data.train)
        files += [config.data.eval] if config.data.eval else []
        more_models += _further_models(config)
        more_files += _further_files(config)
    models, files, more_models, more_files = (
        [name for name in dict.fromkeys(names) if not name.startswith(f"{pipeline.output}/")]
        for names in (models, files, more_models, more_files)
    )
    missing = [name for name in [*models, *more_models] if not _has_model(name)]
    missing += [name for name in files if not _has_data(name)]
    missing += [name for name in more_files if not (_has_data(name) or name.isidentifier())]
    hashes = {name: fingerprint(name) for name in [*models, *files]}
    # Names are among the settings; only the content of files is not.
    further = {name: fingerprint(name) for name in [*more_models, *more_files]}
    hashes |= {name: value for name, value in further.items() if value != name}
    hashes = dict(sorted(hashes.items()))
    return hashes, tuple(dict.fromkeys(missing))


def _of_settings(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The models and the files that a stage's own settings name."""
    found: dict[str, list[str]] = {"model": [], "rows": []}
    for key, value in given.items():
        if key in TAKES and value is not None:
            found[TAKES[key]] += map(str, value if isinstance(value, list) else [value])
    return found["model"], found["rows"]


def _further_files(config: Config) -> Iterator[str]:
    """The files of a configuration beside its prompts."""
    yield from (source.data for source in config.data.sources)
    for name in OWN_DATA:
        section = getattr(config, name)
        if section is not None and section.data is not None:
            yield section.data
    if config.environment is not None and (corpus := config.environment.settings.get("corpus")):
        yield str(corpus)


def _further_models(config: Config) -> Iterator[str]:
    """The models of a configuration beside its policy."""
    if config.distillation is not None and config.distillation.teacher != SELF:
        yield config.distillation.teacher
    for section in (config.critic, config.token_reward, config.process):
        if section is not None and section.model is not None:
            yield section.model
    for reward in config.rewards:
        model = reward.settings.get("model")
        if isinstance(model, str) and AT_A_SERVER not in reward.settings:
            yield model


def _has_model(name: str) -> bool:
    if name in BUNDLED or Path(name).expanduser().exists():
        return True
    try:
        check_on_hub(name)
    except UsageError:
        return False
    return True


def _has_data(name: str) -> bool:
    """Whether data is here; names of the hub are looked up when they are loaded."""
    if generator_of(name) is not None or Path(name).expanduser().exists():
        return True
    return not Path(name).suffix and name.count("/") == 1

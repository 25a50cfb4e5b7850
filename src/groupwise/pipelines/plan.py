"""The pipeline file (TOML): stages, their settings, and the outputs they take from each other."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config.recipes import (
    distrusted,
    holds_code,
    packaged_pipelines,
    parse_override,
    strings_in,
)
from groupwise.errors import UsageError, suggest
from groupwise.pipelines.stages import STAGES, Kind, kind_of
from groupwise.registry import FunctionSpec
from groupwise.settings.base import CODE

OF_A_PIPELINE = ("title", "output", "seed", "stages")
OF_A_LOOP = ("name", "rounds", "start", "stages")
MOST_ROUNDS = 1000
_NAME = re.compile(r"[\w+-][\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        name: its folder in the output; those of a loop are `loop-2/name`.
        kind: what it does.
        settings: of the kind's function; a value "@name" is the output of another stage.
        takes: stages whose output it takes, by the reference in the settings.
    """

    name: str
    kind: Kind
    settings: Mapping[str, Any]
    takes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A whole pipeline.

    Attributes:
        title: heading of the report.
        output: folder of all stages.
        seed: set in every recipe; None leaves the recipes' own.
        stages: in the order in which they run.
    """

    title: str
    output: Path
    seed: int | None
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            UsageError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise UsageError(f"stage = {name!r}: no such stage; {suggest(name, names)}")


def read_pipeline(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    output: str | Path | None = None,
    seed: int | None = None,
) -> Pipeline:
    """Read a pipeline and check how its stages fit together.

    Args:
        source: path of a TOML file, or the name of a packaged pipeline.
        overrides: `stage.setting=value`. A name that is not a setting of the stage is one of its
            recipe: `tuned.optimizer.learning_rate=1e-5`. `*` stands for every stage with a recipe.
        output: folder, in place of the file's.
        seed: in place of the file's.

    Raises:
        UsageError: no such pipeline, not TOML, an unknown kind or setting, a loop without an end,
            or a stage that takes the output of a stage that does not precede it.
    """
    values = _read(source)
    _known(values, OF_A_PIPELINE, "pipeline")
    given = values.get("stages")
    if not isinstance(given, list) or not given:
        raise UsageError(f"pipeline = {str(source)!r}: must have a list [[stages]].")
    chosen = seed if seed is not None else values.get("seed")
    if chosen is not None and (not isinstance(chosen, int) or chosen < 0):
        raise UsageError(f"seed = {chosen!r}: must be a whole number, at least 0.")
    stages = _expanded(given)
    if Path(source).expanduser().is_file():
        _refuse_code(stages)
    stages = [_overridden(stage, overrides) for stage in stages]
    _check_used(stages, overrides)
    return Pipeline(
        title=str(values.get("title") or Path(source).stem),
        output=Path(output or values.get("output") or f"runs/{Path(source).stem}").expanduser(),
        seed=chosen,
        stages=tuple(_checked(stage) for stage in stages),
    )


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source).expanduser()
    if not path.is_file():
        known = packaged_pipelines()
        if str(source) not in known:
            raise UsageError(
                f"pipeline = {str(source)!r}: is neither a file nor a packaged pipeline; "
                + suggest(str(source), known)
            )
        path = known[str(source)]
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"pipeline = {str(source)!r}: is not valid TOML: {error}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"pipeline = {str(source)!r}: cannot be read: {error}.") from None


def _known(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in values:
        if name not in names:
            raise UsageError(f"{where}.{name}: no such setting; {suggest(name, names)}")


def _expanded(given: Sequence[Any]) -> list[Stage]:
    """The stages with every loop written out, and their references resolved."""
    stages: list[Stage] = []
    outputs: dict[str, str] = {}
    for number, values in enumerate(given):
        where = f"stages.{number}"
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: must be a table.")
        name = _name_of(values, where)
        if any(each.name == name or _round_of(each.name, name) for each in stages):
            raise UsageError(f"{where}.name = {name!r}: is the name of another stage.")
        if "stages" in values:
            stages += _rounds(values, outputs, where=where, loop=name)
        else:
            stages.append(_stage(values, name, outputs, where=where, own=name))
            outputs[name] = name
    return stages


def _round_of(name: str, loop: str) -> bool:
    """Whether a stage is in a round of a loop."""
    return re.fullmatch(rf"{re.escape(loop)}-\d+/.*", name) is not None


def _rounds(
    loop_values: Mapping[str, Any], outputs: dict[str, str], *, where: str, loop: str
) -> list[Stage]:
    """The stages of a loop, once for every round; the last round's are seen after it."""
    _known(loop_values, OF_A_LOOP, where)
    rounds = loop_values.get("rounds")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 1 <= rounds <= MOST_ROUNDS:
        raise UsageError(
            f"{where}.rounds = {rounds!r}: a loop must end; set 1 to {MOST_ROUNDS} rounds."
        )
    inner = loop_values["stages"]
    if not isinstance(inner, list) or not inner:
        raise UsageError(f"{where}.stages: must be a list of stages.")
    start = loop_values.get("start", {})
    names = [_name_of(values, f"{where}.stages.{n}") for n, values in enumerate(inner)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}.stages: two have the name {twice[0]!r}.")
    for name in start:
        if name not in names:
            raise UsageError(f"{where}.start.{name}: no such stage; {suggest(name, names)}")
    stages: list[Stage] = []
    seen = dict(outputs)
    for number in range(1, rounds + 1):
        for place, values in enumerate(inner):
            name = names[place]
            full = f"{loop}-{number}/{name}"
            first = {key: value for key, value in start.items() if key not in seen}
            spot = f"{where}.stages.{place}"
            settings = {key: _started(value, first) for key, value in values.items()}
            stages.append(_stage(settings, full, seen, where=spot, own=name))
            seen[name] = full
    outputs |= {name: seen[name] for name in names}
    return stages


def _started(value: Any, first: Mapping[str, Any]) -> Any:
    """A setting in the first round: the output of a previous round is replaced by what the loop
    starts from.
    """
    if isinstance(value, list):
        return [_started(each, first) for each in value]
    if isinstance(value, Mapping):
        return {key: _started(each, first) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("@") and value[1:] in first:
        return first[value[1:]]
    return value


def _name_of(values: Mapping[str, Any], where: str) -> str:
    name = values.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}.name = {name!r}: must be given, of letters, digits and -.+_")
    return name


def _stage(
    values: Mapping[str, Any], name: str, outputs: Mapping[str, str], *, where: str, own: str
) -> Stage:
    """One stage with its references; they may only lead to stages before it."""
    kind = values.get("stage")
    if not isinstance(kind, str):
        raise UsageError(f"{where}.stage: must be given. Known: {', '.join(STAGES.names())}.")
    settings = {k: v for k, v in values.items() if k not in ("name", "stage")}
    takes = {}
    for reference in sorted(references(settings)):
        if reference not in outputs:
            hint = (
                "it would take its own output"
                if reference == own
                else "no stage before it has that name; " + suggest(reference, outputs)
            )
            raise UsageError(f"{name}: takes '@{reference}', but {hint}")
        takes[reference] = outputs[reference]
    return Stage(name=name, kind=kind_of(kind), settings=settings, takes=takes)


def references(value: Any) -> set[str]:
    """The stages that a setting names as "@stage"."""
    if isinstance(value, str):
        return {value[1:]} if value.startswith("@") else set()
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(inside, str) or not hasattr(inside, "__iter__"):
        return set()
    return {name for each in inside for name in references(each)}


def _refuse_code(stages: Sequence[Stage]) -> None:
    """Refuse what a file may not set; only the command line may ask for it."""
    for stage in stages:
        for key, value in stage.settings.items():
            if key != "set" and holds_code(key, value):
                raise UsageError(
                    f"{stage.name}.{key} = {str(value)[:200]!r}: {CODE}, so a pipeline file may "
                    f"not set it; read the file, then pass --set '{stage.name}.{key}=…'."
                )
        for override in strings_in(stage.settings.get("set", [])):
            if why := distrusted(override):
                setting = override.partition("=")[0].strip()
                raise UsageError(
                    f"{stage.name}.set = {override[:200]!r}: {why}, so a pipeline file may not set "
                    f"it; read the file, then pass --set '{stage.name}.{setting}=…'."
                )


def _overridden(stage: Stage, overrides: Sequence[str]) -> Stage:
    """The stage with the settings of the command line."""
    known = STAGES.settings(stage.kind.name)
    settings = dict(stage.settings)
    for override in overrides:
        first, _, text = override.partition(".")
        if not _meant(first.strip(), stage, known):
            continue
        steps, value = parse_override(text)
        if len(steps) == 1 and steps[0] in known:
            settings[steps[0]] = value
        else:
            settings["set"] = [*settings.get("set", []), text]
    return replace(stage, settings=settings)


def _meant(name: str, stage: Stage, known: Mapping[str, Any]) -> bool:
    own = stage.name.rpartition("/")[2]
    return name == own or (name == "*" and "recipe" in known)


def _check_used(stages: Sequence[Stage], overrides: Sequence[str]) -> None:
    names = [stage.name.rpartition("/")[2] for stage in stages]
    for override in overrides:
        first = override.partition("=")[0].partition(".")[0].strip()
        if first != "*" and first not in names:
            raise UsageError(
                f"--set = {override!r}: must have the form stage.setting=value; "
                f"{suggest(first, names)}"
            )


def _checked(stage: Stage) -> Stage:
    """Check the names and types of a stage's settings, and what kind of output each takes."""
    chosen = FunctionSpec(name=stage.kind.name, settings=dict(stage.settings))
    STAGES.bind(chosen, where=stage.name)
    return stage

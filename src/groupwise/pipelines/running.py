"""Run a pipeline: finished stages are skipped, interrupted ones continue."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.config import Config
from groupwise.errors import UsageError
from groupwise.pipelines.checks import (
    check_configurations,
    check_models,
    check_overlap,
    check_selection,
    check_settings,
)
from groupwise.pipelines.inputs import outside
from groupwise.pipelines.plan import Pipeline, Stage
from groupwise.pipelines.resolved import configured, resolved, work_of
from groupwise.pipelines.stages import OUTPUTS, STAGES, Kind, clear
from groupwise.pipelines.summary import write_report
from groupwise.registry import FunctionSpec
from groupwise.rundir.files import append_text, replace_text
from groupwise.rundir.lock import RunLock
from groupwise.rundir.provenance import digest, fingerprint
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.stages.recipe import base_phases

RECORD = "stage.json"
DRAFT = f".{RECORD}.new"
"""What a kill may leave of a record."""
LOG = "log.jsonl"
UNTOUCHED = {"output", "logging", "checkpoint", "watchdog", "threads"}
"""Sections of a configuration that change no result. Nor does `evaluation.keep_best`: stages take
the last model."""

REPORTS = ("report.md", "report.json", LOG)
"""What a pipeline writes into its folder beside those of its stages."""

State = Literal["done", "begun", "to do", "other settings", "changed", "foreign"]


@dataclass(frozen=True, kw_only=True)
class StageState:
    """A stage and the state of its output.

    Attributes:
        stage: the stage.
        state: "done" is up to date; "begun" was interrupted; the output of "other settings" and of
            "changed" is there, but not what this pipeline would make; "foreign" files were made
            by no stage, and are never deleted.
        key: hash of everything that its output follows from.
        made_of: what the hash is of: settings, configuration, the hashes of inputs from outside.
        missing: inputs from outside that are not on this machine.
    """

    stage: Stage
    state: State
    key: str
    made_of: Mapping[str, Any]
    missing: tuple[str, ...] = ()


def plan_table(pipeline: Pipeline) -> list[StageState]:
    """The state of every stage, without running anything.

    Raises:
        UsageError: a stage whose settings cannot work.
    """
    found: dict[str, StageState] = {}
    for stage in pipeline.stages:
        given = resolved(stage, pipeline)
        configs = configured(stage, given, pipeline)
        check_settings(stage, given)
        check_configurations(stage, configs)
        hashes, missing = outside(stage, given, configs, pipeline)
        if stage.kind.name == "base":
            hashes["phases"] = digest(base_phases(given["phases"], seed=pipeline.seed))
        made_of = {
            "kind": stage.kind.name,
            "settings": {k: v for k, v in stage.settings.items() if k not in ("recipe", "set")},
            "recipe": _identity(configs, stage, pipeline.output),
            "from": {name: found[taken].key for name, taken in stage.takes.items()},
            "outside": hashes,
        }
        key = digest(made_of)
        found[stage.name] = StageState(
            stage=stage,
            state=_state(pipeline.output / stage.name, key, stage.kind),
            key=key,
            made_of=made_of,
            missing=missing,
        )
    return list(found.values())


def run_pipeline(
    pipeline: Pipeline,
    *,
    first: str | None = None,
    only: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Run the stages that are not up to date.

    Every stage has a folder in `pipeline.output`: a model in `final/`, rows in `rows.jsonl`,
    figures in `figures.json`, and in `stage.json` its settings, its inputs and their hashes. A
    stage that was interrupted continues where its own function can (rows, checkpoints), or starts
    again; either way it leaves the files of an uninterrupted run.

    Args:
        pipeline: from `read_pipeline`.
        first: run this stage and all later ones again, even if they are up to date.
        only: run this stage alone, unless it is up to date; its inputs must be.
        progress: shows lines; None shows them on standard error.

    Returns:
        The report, `report.md`, written after every stage; `report.json` beside it.

    Raises:
        UsageError: before the first stage: an input that is missing or was made by other settings,
            settings that cannot work, models that cannot be averaged, held-out prompts that are
            training prompts.
    """
    states, wanted = checked_plan(pipeline, first=first, only=only)
    pipeline.output.mkdir(parents=True, exist_ok=True)
    begun = any(state.state != "to do" for state in states)
    lock = RunLock(pipeline.output, names=() if begun else REPORTS)
    with closing(lock), closing(progress or show_progress({})) as showing:
        if first is not None:
            for state in wanted:
                clear(pipeline.output / state.stage.name)
        for state in states:
            if state not in wanted:
                if only in (None, state.stage.name):
                    showing.log(f"{_place(pipeline, state.stage)}: up to date")
                continue
            showing.log(f"{_place(pipeline, state.stage)}: {state.stage.kind.shown}")
            _run(pipeline, state)
            write_report(pipeline.title, pipeline.output, _records(pipeline))
        return write_report(pipeline.title, pipeline.output, _records(pipeline))


def checked_plan(
    pipeline: Pipeline, *, first: str | None = None, only: str | None = None
) -> tuple[list[StageState], list[StageState]]:
    """The state of every stage, and the stages to run; writes nothing.

    Raises:
        UsageError: whatever `run_pipeline` refuses before the first stage.
    """
    states = plan_table(pipeline)
    wanted = _wanted(pipeline, states, first=first, only=only)
    _refuse(states, wanted, again=first, only=only)
    for state in wanted:
        check_models(state.stage, pipeline)
        check_overlap(state.stage, pipeline)
        check_selection(state.stage)
    return states, wanted


def _place(pipeline: Pipeline, stage: Stage) -> str:
    number = pipeline.stages.index(stage) + 1
    return f"[{number}/{len(pipeline.stages)}] {stage.name}"


def _identity(configs: Mapping[str, Config], stage: Stage, output: Path) -> dict[str, Any]:
    """The part of the configurations that determines the output, wherever the pipeline's folder
    is."""
    found = {
        name: _without_folder(_identity_of(config, stage), output)
        for name, config in configs.items()
    }
    return found.get("", found)


def _without_folder(values: Any, folder: Path) -> Any:
    """Plain values whose paths inside a folder begin at that folder."""
    if isinstance(values, dict):
        return {key: _without_folder(each, folder) for key, each in values.items()}
    if isinstance(values, list):
        return [_without_folder(each, folder) for each in values]
    return values.removeprefix(f"{folder}/") if isinstance(values, str) else values


def _identity_of(config: Config, stage: Stage) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude_defaults=True, exclude=UNTOUCHED)
    evaluation = values.pop("evaluation", {})
    if kept := {key: value for key, value in evaluation.items() if key != "keep_best"}:
        values["evaluation"] = kept
    if "model" in stage.settings:
        values.get("model", {}).pop("path", None)
    if "rows" in stage.settings:
        values.get("data", {}).pop("train", None)
    if "teacher" in stage.settings:
        values.get("distillation", {}).pop("teacher", None)
    if "reward_model" in stage.settings:
        values["rewards"][-1].pop("model", None)
    return values


def _state(folder: Path, key: str, kind: Kind) -> State:
    record = _record(folder)
    if record is None:
        return "foreign" if folder.exists() and _holds_files(folder) else "to do"
    if record["key"] != key:
        return "other settings"
    if not record.get("finished"):
        return "begun"
    output = folder / OUTPUTS[kind.output]
    return "done" if record["output"] == fingerprint(output) else "changed"


def _holds_files(folder: Path) -> bool:
    """Whether a stage's folder holds more than the draft of a record that a kill left there."""
    return not folder.is_dir() or any(path.name != DRAFT for path in folder.iterdir())


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: is damaged ({error}); delete {folder}.") from None


def _wanted(
    pipeline: Pipeline, states: Sequence[StageState], *, first: str | None, only: str | None
) -> list[StageState]:
    """The stages to run."""
    if first is not None and only is not None:
        raise UsageError("--from: cannot be combined with --only.")
    if only is not None:
        name = pipeline.stage(only).name
        return [state for state in states if state.stage.name == name and state.state != "done"]
    if first is not None:
        start = pipeline.stages.index(pipeline.stage(first))
        return list(states[start:])
    return [state for state in states if state.state != "done"]


def _refuse(
    states: Sequence[StageState],
    wanted: Sequence[StageState],
    *,
    again: str | None,
    only: str | None,
) -> None:
    """Refuse outputs of other settings, and inputs that are not there."""
    by_name = {state.stage.name: state for state in states}
    for state in states if only is None else wanted:
        name = state.stage.name
        if state.state == "foreign":
            raise UsageError(
                f"{name}: its folder contains files that no stage made, which would be deleted; "
                "choose another folder with --output."
            )
        redone = again is not None and state in wanted
        if state.state in ("other settings", "changed") and not redone:
            what = (
                "holds the output of other settings"
                if state.state == "other settings"
                else ("holds an output that was changed after it was made")
            )
            raise UsageError(
                f"{name}: its folder {what}; run it and what follows again with --from {name}, or "
                "choose another folder with --output."
            )
    for state in wanted:
        for taken in state.stage.takes.values():
            if by_name[taken] not in wanted and by_name[taken].state != "done":
                raise UsageError(
                    f"{state.stage.name}: takes the output of {taken}, which is "
                    f"{_in_words(by_name[taken].state)}; run {taken} first."
                )
        if state.missing:
            raise UsageError(
                f"{state.stage.name}: {state.missing[0]!r} is not on this machine and cannot be "
                "loaded from the hub; give a path with --set."
            )


def _in_words(state: State) -> str:
    return {"to do": "not there", "begun": "not finished"}.get(state, "of other settings")


def _run(pipeline: Pipeline, state: StageState) -> None:
    """Run one stage and record it."""
    stage = state.stage
    work = work_of(stage, pipeline)
    given = resolved(stage, pipeline)
    about = {
        "stage": stage.name,
        "kind": stage.kind.shown,
        "key": state.key,
        "settings": dict(stage.settings),
        "recipe": state.made_of["recipe"],
        "outside": state.made_of["outside"],
        "seed": pipeline.seed,
        "inputs": {
            taken: (_record(pipeline.output / taken) or {}).get("output")
            for taken in sorted(set(stage.takes.values()))
        },
    }
    work.folder.mkdir(parents=True, exist_ok=True)
    _write(work.folder / RECORD, about)
    start = time.time()
    function = STAGES.bind(FunctionSpec(name=stage.kind.name, settings=given), where=stage.name)
    figures = function({"work": work})
    output = work.folder / OUTPUTS[stage.kind.output]
    done = {"finished": True, "figures": figures, "output": fingerprint(output)}
    _write(work.folder / RECORD, about | done)
    seconds = round(time.time() - start, 1)
    line = json.dumps({"stage": stage.name, "ended": time.time(), "seconds": seconds})
    append_text(pipeline.output / LOG, line + "\n")


def _records(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The records of the finished stages, in order."""
    found = [_record(pipeline.output / stage.name) for stage in pipeline.stages]
    return [record for record in found if record is not None and record.get("finished")]


def _write(path: Path, values: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

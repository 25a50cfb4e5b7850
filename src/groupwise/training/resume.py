"""Resuming a run: from which checkpoint, and whether with the same settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config, build, free_to_change
from groupwise.errors import UsageError
from groupwise.models import Policy, base_fingerprint, is_adapted
from groupwise.models.adapters import SavedAdapter, config_fingerprint
from groupwise.models.loading import place_fingerprint, resolve
from groupwise.rundir.files import MARK, METRICS, read_lines, surroundings, without_secrets
from groupwise.training.checkpoint import files as checkpoint
from groupwise.training.checkpoint.files import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs from the checkpoint's."""

    path: str
    before: Any
    now: Any
    mathematical: bool

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.before)} → {_shown(self.now)}"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoints that a run continues from.

    Attributes:
        saved: the newest intact checkpoint; None starts the run.
        start: the checkpoint before the first step, if a warm-up or a rollback needs one.
    """

    saved: Checkpoint | None = None
    start: Checkpoint | None = None

    @property
    def step(self) -> int:
        """Finished steps."""
        return 0 if self.saved is None else self.saved.step


def find_resume_point(
    config: Config, allow_changes: bool, *, restart: bool, log: Callable[[str], None]
) -> ResumePoint:
    """The newest intact checkpoint of a run directory, written with the same settings.

    Skipped checkpoints and changed settings are logged. The thread count is set to that of the
    checkpoint unless the configuration sets it, since sums of floating-point numbers depend on it.

    Args:
        allow_changes: accept changed settings that affect results.
        restart: start from step 0 if the run wrote checkpoints and none is intact.

    Raises:
        UsageError: settings that affect results have changed, and that is not allowed; or
            no checkpoint is intact, and the run is not to be restarted.
        RunError: the checkpoint has a format that this version does not know.
    """
    folder = Path(config.output) / "checkpoints"
    if folder.exists():
        checkpoint.tidy(folder)
    for name in ("best", "final"):
        checkpoint.recover_folder(Path(config.output) / name)
    saved, skipped = checkpoint.newest(folder)
    for line in skipped:
        log(f"skipped {line}")
    if saved is None:
        if (lost := _lost(folder, skipped)) and not restart:
            raise UsageError(
                f"--resume: {lost}. Restore one from a copy, or start again from step 0, which "
                "deletes the run's metrics, with --restart."
            )
        log(f"{config.output} has no checkpoint; the run starts at step 0")
        return ResumePoint()
    about = saved.about
    found = (
        changes(_completed(about["config"]), plain_settings(config)) if "config" in about else []
    )
    _refuse(found, step=saved.step, allowed=allow_changes)
    for change in found:
        log(f"changed {change}")
    used = _used(surroundings())
    for name, version in _used(about).items():
        now = used.get(name)
        if now != version:
            log(f"changed {name}: {version} → {now}; results may differ by rounding")
    if config.threads is None and "threads" in about:
        torch.set_num_threads(int(about["threads"]))
    start = folder / "step-000000"
    return ResumePoint(saved=saved, start=checkpoint.load(start) if start.exists() else None)


def _lost(folder: Path, skipped: Sequence[str]) -> str:
    """What happened to the checkpoints of a run that has none; "" if it has written none yet."""
    if skipped:
        return f"none of the {len(skipped)} checkpoints in {folder} is intact ({skipped[0]})"
    written = any((folder.parent / name).exists() for name in (MARK, "final"))
    steps = logged_steps(folder.parent / METRICS) if written else set()
    if not steps:
        return ""
    return (
        f"{folder} has no checkpoint, although the run wrote some and has taken {max(steps)} steps"
    )


def logged_steps(path: Path) -> set[int]:
    """The steps that have a line in a file of the run directory."""
    return {row["step"] for row in read_lines(path)} if path.exists() else set()


def log_lost_lines(
    folder: Path, *, step: int, evaluated: int | None, log: Callable[[str], None]
) -> None:
    """Log which files of a run directory lack lines that a checkpoint includes.

    Args:
        step: of the checkpoint.
        evaluated: the last evaluated step.
    """
    for name, last in ((METRICS, step), ("evaluations.jsonl", evaluated)):
        if last and last not in logged_steps(folder / name):
            log(f"{name} lacks step {last}, which the checkpoint includes: lines were lost")


def _completed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a checkpoint, with the defaults of those that its version did not have."""
    try:
        return plain_settings(build(settings))
    except UsageError:
        return settings


def fingerprints(config: Config, policy: Policy) -> dict[str, str]:
    """Fingerprints of the models that a run begins with and does not train, by setting."""
    return policy_fingerprints(policy) | other_fingerprints(config)


def policy_fingerprints(policy: Policy) -> dict[str, str]:
    """Fingerprints of the model that training starts from; of an adapter, that of its base."""
    base = policy.model.get_base_model() if is_adapted(policy.model) else policy.model
    found = {
        "model.path": base_fingerprint(base),
        "model.path (config.json)": config_fingerprint(base.name_or_path),
    }
    return _known(found)


def other_fingerprints(config: Config) -> dict[str, str]:
    """Fingerprints of the other models of a run: a teacher, a process reward model, what further
    learners start from, and what rewards and judges load. Hub names that are not in the cache have
    none."""
    places: dict[str, Any] = {
        "critic.model": config.critic.model,
        "token_reward.model": config.token_reward.model,
    }
    if config.distillation is not None:
        places["distillation.teacher"] = config.distillation.teacher
    if config.process is not None:
        places["process.model"] = config.process.model
    for index, reward in enumerate(config.rewards):
        places |= {f"rewards.{index}.{name}": value for name, value in reward.settings.items()}
    found = [_of_place(name, value) for name, value in places.items() if isinstance(value, str)]
    return _known({name: value for each in found for name, value in each.items()})


def _of_place(name: str, path: str) -> dict[str, str | None]:
    """Fingerprints of a folder or hub name, and of the model that an adapter there belongs to."""
    if not path or "\n" in path or len(path.encode()) > 255:  # a text, such as a template
        return {}
    place = resolve(os.path.expanduser(path))
    found = {
        name: place_fingerprint(place),
        f"{name} (config.json)": config_fingerprint(place),
    }
    with suppress(UsageError):  # A damaged adapter, which its loader refuses.
        if (adapter := SavedAdapter.at(Path(place))) is not None:
            base = resolve(adapter.base)
            found |= {
                f"{name} (base)": place_fingerprint(base),
                f"{name} (config.json of its base)": config_fingerprint(base),
            }
    return found


def _known(found: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in found.items() if value is not None}


def check_fingerprints(
    saved: Checkpoint | None,
    now: Mapping[str, str],
    *,
    allow_changes: bool,
    log: Callable[[str], None],
) -> None:
    """Check that models are the ones that the run began with.

    Args:
        now: from `policy_fingerprints` or `other_fingerprints`; what an older checkpoint does not
            know is not compared.

    Raises:
        UsageError: one has changed, and changes are not allowed.
    """
    if saved is None:
        return
    before = saved.about.get("models", {})
    changed = [name for name in sorted(now) if before.get(name, now[name]) != now[name]]
    if changed and not allow_changes:
        raise UsageError(
            f"--resume: the model of {', '.join(changed)} has changed since step {saved.step}, "
            "although its name is the same, and training depends on it. Restore the old one (on "
            "the hub: model.revision), or accept the new one with --allow-changes."
        )
    for name in changed:
        log(f"changed {name}: a different model with the same name")


def resume_facts(config: Config, policy: Policy) -> dict[str, Any]:
    """What a checkpoint records for comparison with a resumed run."""
    around = surroundings()
    return {
        "config": plain_settings(config),
        "models": fingerprints(config, policy),
        **{name: around[name] for name in ("kernels", "versions")},
        "threads": torch.get_num_threads(),
    }


def _used(about: Mapping[str, Any]) -> dict[str, str]:
    """Kernels and versions, on which rounding depends."""
    kernels = {"kernels": about["kernels"]} if "kernels" in about else {}
    return {**about.get("versions", {}), **kernels}


def plain_settings(config: Config) -> dict[str, Any]:
    """All settings as plain JSON values, without secrets from environment variables."""
    return json.loads(without_secrets(config.to_json()))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ, and whether each affects results.

    Example:
        >>> found = changes({"steps": 5, "seed": 0}, {"steps": 9, "seed": 1})
        >>> [(str(change), change.mathematical) for change in found]
        [('seed: 0 → 1', True), ('steps: 5 → 9', False)]
    """
    old, new = _flat(before), _flat(now)
    free_paths = free_to_change()
    decays = new.get("optimizer.schedule", "constant") != "constant"
    found = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path) or (path not in old and not before):
            continue
        free = any(path == name or path.startswith(name + ".") for name in free_paths)
        mathematical = not free or (path == "steps" and decays)
        found.append(
            Change(path=path, before=old.get(path), now=new.get(path), mathematical=mathematical)
        )
    return found


def _refuse(found: list[Change], *, step: int, allowed: bool) -> None:
    serious = [change for change in found if change.mathematical]
    if serious and not allowed:
        raise UsageError(
            f"--resume: {len(serious)} settings that affect results differ from the "
            f"checkpoint at step {step}: {'; '.join(map(str, serious))}. Restore them, or "
            "accept the changes with --allow-changes."
        )


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    if isinstance(values, Mapping) and values:
        return {
            inner: value
            for key, each in values.items()
            for inner, value in _flat(each, f"{path}.{key}" if path else str(key)).items()
        }
    if isinstance(values, list) and any(isinstance(value, Mapping) for value in values):
        return _flat({str(place): value for place, value in enumerate(values)}, path)
    return {path: values}


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)

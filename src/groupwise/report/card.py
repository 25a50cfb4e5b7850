"""The model card of a trained model: README.md next to its weights, generated from the run
directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.evaluation.tables import format_cell, title_of
from groupwise.report.comparison import results_table
from groupwise.report.data import RunData
from groupwise.rundir.files import read_lines, replace_text
from groupwise.rundir.overview import learned_by

CARD = "README.md"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SURROUNDINGS = {"commit": "commit of groupwise", "kernels": "kernels"}
"""Entries of `config.json` that a card repeats, and what they are called there."""


def write_model_card(run_dir: str | Path, folder: str | Path, *, merged: bool = False) -> Path:
    """Write the card of a trained model and return its path.

    Args:
        run_dir: the run directory with `config.json` and `evaluations.jsonl`.
        folder: of the model; an existing card is replaced.
        merged: whether the folder holds the model and its adapter as one.
    """
    about = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))
    evaluations = Path(run_dir) / "evaluations.jsonl"
    measured = list(read_lines(evaluations)) if evaluations.exists() else []
    path = Path(folder) / CARD
    replace_text(path, model_card(Path(run_dir).name, about, measured, merged=merged))
    return path


def remove_own_card(folder: str | Path) -> bool:
    """Delete a card of groupwise beside weights that are about to be replaced; whether there was
    one. Cards of others stay."""
    path = Path(folder) / CARD
    if not path.is_file():
        return False
    own = "- groupwise" in path.read_text(encoding="utf-8", errors="replace").splitlines()
    if own:
        path.unlink()
    return own


def write_merged_card(adapter: str | Path, base: str, folder: str | Path) -> Path:
    """Write the card of a model that an adapter was merged into, where no run tells more.

    Args:
        adapter: its folder.
        base: name or folder of the model.
        folder: of the merged model.
    """
    known, own = _public(base), _public(Path(adapter).resolve())
    head = ["---", *_metadata(known, "transformers"), "tags:", "- groupwise", "---"]
    text = f"# {Path(folder).name}\n\n{known}, with the adapter {own} merged into its weights.\n"
    path = Path(folder) / CARD
    replace_text(path, "\n".join([*head, "", text]))
    return path


def _metadata(base: str, library: str) -> list[str]:
    """The lines of the metadata that name the base model and what loads the folder."""
    named = [f"base_model: {base}"] if _HUB_NAME.fullmatch(base) else []
    return [*named, f"library_name: {library}"]


def model_card(
    name: str,
    about: Mapping[str, Any],
    evaluations: list[dict[str, Any]],
    *,
    merged: bool = False,
) -> str:
    """The text of a card, with metadata for the hub.

    Local paths are shortened to their last part.

    Args:
        name: of the model.
        about: settings, versions and commit, as in `config.json`.
        evaluations: as in `evaluations.jsonl`.
        merged: whether the adapter is part of the weights.
    """
    config, versions = about.get("config", {}), about.get("versions", {})
    model = config.get("model", {})
    base, trained_on = _public(model.get("path")), _public(_learned_from(config))
    algorithm = learned_by(config) or ""
    version = versions.get("groupwise", "")
    method = config.get("method", "reinforcement learning")
    scores = method == "reward modelling"
    head = [
        "---",
        *_metadata(base, "peft" if model.get("adapter") and not merged else "transformers"),
        *(["datasets:", f"- {trained_on}"] if _HUB_NAME.fullmatch(trained_on) else []),
        f"pipeline_tag: {'text-classification' if scores else 'text-generation'}",
        "tags:",
        *(f"- {tag}" for tag in ("groupwise", method.replace(" ", "-"), algorithm) if tag),
        "---",
    ]
    text = [
        f"# {name}",
        "",
        f"{base}, trained on {trained_on} by {method} with {algorithm} (groupwise {version}).",
        "",
        "## Evaluation",
        "",
        *_evaluation(config, evaluations),
        "",
        "## Training",
        "",
        *(f"- {what}: {said}" for what, said in _training(config, base, trained_on) if said),
        "",
        "The run directory contains all settings, metrics and rollouts.",
        "",
        "## Versions",
        "",
        *(f"- {package} {number}" for package, number in versions.items()),
        *(f"- {what}: {about[key]}" for key, what in SURROUNDINGS.items() if about.get(key)),
    ]
    return "\n".join([*head, "", *text]) + "\n"


def _learned_from(config: Mapping[str, Any]) -> Any:
    """The data set that a run learned from; of one without, the prompts."""
    section = {
        "preference optimization": "preference",
        "reward modelling": "reward_model",
        "supervised learning": "sft",
    }.get(config.get("method", ""), "")
    found = (config.get(section) or {}).get("data") if section else None
    return found or config.get("data", {}).get("train")


def _public(name: Any) -> str:
    """The public name of a model or data set: of a path, its last part or that of its run."""
    text = str(name or "unnamed")
    path = Path(text)
    if not (path.is_absolute() or text.startswith((".", "~")) or path.exists()):
        return text
    return path.parent.name if path.name == "final" else path.name


def _evaluation(config: Mapping[str, Any], evaluations: list[dict[str, Any]]) -> list[str]:
    """Figures before and after training, as a table with 95 % intervals."""
    run = RunData(label="trained", algorithm="", seed=0, evaluations=evaluations)
    table = results_table([run])
    if not table.rows:
        return ["Not evaluated: the run had no held-out prompts."]
    data, section = config.get("data", {}), config.get("evaluation", {})
    held_out = _public(data.get("eval") or data.get("train"))
    lines = [
        f"Up to {section.get('prompts')} held-out prompts of {held_out}; shares in percent, with "
        "95 % intervals.",
        "",
        f"| split | figure | {' | '.join(table.models)} |",
        f"|---|---|{'---|' * len(table.models)}",
    ]
    for split, figure in table.rows:
        cells = [
            " ".join(
                format_cell(table.cells.get((m, split, figure)), percent=table.percent(figure))
            )
            for m in table.models
        ]
        lines.append(f"| {title_of(split)} | {title_of(figure)} | {' | '.join(cells)} |")
    return lines


def _training(config: Mapping[str, Any], base: str, data: str) -> list[tuple[str, str]]:
    """The main settings and their names."""
    rewards = [
        f"{reward.get('label') or reward.get('name')} × {reward.get('weight', 1.0):g}"
        for reward in config.get("rewards", [])
    ]
    adapter, sampling = config.get("model", {}).get("adapter"), config.get("sampling", {})
    system, warmup = config.get("data", {}).get("system"), config.get("warmup")
    algorithm = {} if "learned_by" in config else config.get("algorithm", {})
    slots = {key: value for key, value in algorithm.items() if isinstance(value, dict) and value}
    return [
        ("base model", base),
        ("adapter", f"LoRA, rank {adapter.get('rank')}" if adapter else ""),
        ("data", data),
        ("supervised warm-up", f"{warmup.get('steps')} steps" if warmup else ""),
        ("system message", json.dumps(system, ensure_ascii=False) if system else ""),
        ("algorithm", learned_by(config) or ""),
        ("algorithm settings", json.dumps(slots, ensure_ascii=False) if slots else ""),
        ("rewards", ", ".join(rewards) or "Python functions"),
        ("steps", str(config.get("steps", ""))),
        (
            "per step",
            f"{config.get('prompts_per_step')} prompts × {config.get('group_size')} completions",
        ),
        (
            "sampling",
            f"temperature {sampling.get('temperature')}, {sampling.get('max_tokens')} tokens",
        ),
        ("learning rate", str(config.get("optimizer", {}).get("learning_rate", ""))),
        ("seed", str(config.get("seed", ""))),
    ]

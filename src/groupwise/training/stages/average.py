"""Several models of one architecture averaged into one (model merging)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from groupwise.errors import UsageError
from groupwise.models import load_policy, save_policy
from groupwise.models.adapters import SavedAdapter
from groupwise.models.loading import ModelSource, Policy, configuration


def average(
    models: Sequence[str | Path], output: str | Path, *, weights: Sequence[float] | None = None
) -> Path:
    """Write the weighted mean of the parameters of several models as a Hugging Face folder.

        θ = Σ_i w_i · θ_i,   Σ_i w_i = 1

    Sums are taken in float32. Kimi k1.5 merges a model of long answers with one of short answers
    this way.

    Args:
        models: folders or hub names; the first gives configuration and tokenizer.
        output: folder of the averaged model; must not exist, or be empty.
        weights: one per model, in any scale; None weighs all equally.

    Raises:
        UsageError: fewer than two models, an adapter, other parameters or another tokenizer than
            the first model's, weights that do not fit, or an output in use.

    Source: Kimi k1.5 (2501.12599), section 2.4; model soups (2203.05482).
    """
    share = shares(models, weights)
    folder = Path(output).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output = {str(folder)!r}: is in use; choose another folder.")
    check_alike([parts_of(path) for path in models])
    first = load_policy(models[0])
    total = {name: share[0] * p.detach().float() for name, p in first.model.named_parameters()}
    for path, weight in zip(models[1:], share[1:], strict=True):
        other = load_policy(path)
        for name, parameter in other.model.named_parameters():
            total[name].add_(parameter.detach().float(), alpha=weight)
    with torch.no_grad():
        for name, parameter in first.model.named_parameters():
            parameter.copy_(total[name])
    save_policy(first, folder)
    return folder


def shares(models: Sequence[str | Path], weights: Sequence[float] | None) -> list[float]:
    """The weights of `average`, adding up to 1.

    Raises:
        UsageError: fewer than two models, or weights that do not fit.
    """
    if len(models) < 2:
        raise UsageError(f"models = {len(models)}: averaging needs at least two.")
    if weights is None:
        return [1 / len(models)] * len(models)
    if len(weights) != len(models):
        raise UsageError(f"--weights = {list(weights)}: give one for each of {len(models)} models.")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise UsageError(f"--weights = {list(weights)}: must be at least 0, and not all 0.")
    return [w / sum(weights) for w in weights]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What models must have in common to be averaged.

    Attributes:
        name: of the model, for messages.
        shapes: of its parameters by name.
        vocabulary: numbers of its tokens.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    vocabulary: Mapping[str, int]


def parts_of(model: str | Path | Policy, *, name: str | None = None) -> Parts:
    """The parts of a loaded model, or of one on disk by its configuration: no weights are read.

    Raises:
        UsageError: an adapter.
    """
    if isinstance(model, Policy):
        network, tokenizer = model.model, model.tokenizer
    else:
        if SavedAdapter.at(Path(model)) is not None:
            raise UsageError(f"{model}: is an adapter; merge it into its base first.")
        with torch.device("meta"):
            network: Any = AutoModelForCausalLM.from_config(configuration(model))
        tokenizer = ModelSource.at(model).tokenizer(trust_remote_code=False)
    return Parts(
        name=name or str(model),
        shapes={name: tuple(p.shape) for name, p in network.named_parameters()},
        vocabulary=tokenizer.get_vocab(),
    )


def check_alike(models: Sequence[Parts]) -> None:
    """Refuse models whose parameters or tokens mean something else than the first model's.

    Raises:
        UsageError: other parameters or another vocabulary.
    """
    first = models[0]
    for other in models[1:]:
        if first.shapes != other.shapes:
            name = min(set(first.shapes.items()) ^ set(other.shapes.items()))[0]
            raise UsageError(
                f"{other.name}: its parameter {name!r} is {other.shapes.get(name, 'missing')}, and "
                f"{first.shapes.get(name, 'missing')} in the first model; only models of one "
                "architecture and size can be averaged."
            )
        if first.vocabulary != other.vocabulary:
            raise UsageError(f"{other.name}: has a different vocabulary from the first model.")

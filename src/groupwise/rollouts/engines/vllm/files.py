"""The policy as files that vLLM reads, and perturbed weights that cannot be mistaken for the
policy's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import RunError, UsageError
from groupwise.models import Policy, is_adapted, without_bars
from groupwise.rollouts.engines.vllm.base import Weights
from groupwise.types import WeightsRef


class WeightFiles:
    """The newest version of a policy on disk, in the folder for temporary files (TMPDIR).

    Args:
        policy: whose weights are written; with an adapter, only the adapter is.
        untied: write a head that is tied to the embedding as a separate matrix. vLLM's build for
            CPUs repacks the head when it loads a model, and leaves a tied one as it was when it
            reads new weights.

    Raises:
        UsageError: the base model of an adapter has no files that vLLM could read.
    """

    def __init__(self, policy: Policy, *, untied: bool) -> None:
        self.policy, self.untied = policy, untied
        self._place = tempfile.TemporaryDirectory(prefix="groupwise-weights-")
        self._newest: Path | None = None
        self._count = 0
        self._base, self._rank = _base(policy.model)

    def write(self, weights: WeightsRef) -> Weights:
        """Write published weights to a new folder."""
        self._count += 1
        folder = Path(self._place.name) / f"{weights.version:06}-{self._count}"
        model = self.policy.model
        state = model_state(model, weights)
        with without_bars():
            if self.untied and self._base is None and model.config.tie_word_embeddings:
                _save_untied(model, folder, state)
            else:
                model.save_pretrained(folder, state_dict=state)
        if self._base is None:
            self.policy.tokenizer.save_pretrained(folder)
        before, self._newest = self._newest, folder
        if before is not None:
            shutil.rmtree(before)
        return Weights(
            folder=folder,
            base=self._base,
            rank=self._rank,
            dtype=str(self.policy.model.dtype).removeprefix("torch."),
            version=weights.version,
        )

    def close(self) -> None:
        """Delete everything."""
        self._place.cleanup()


def model_state(model: Any, weights: WeightsRef) -> dict[str, Tensor]:
    """The model's state with published parameters in place of its own, tied ones included.

    Raises:
        RunError: the published names are not those of the model's parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = dict(weights.tensors())
    if given.keys() != set(names.values()):
        raise RunError(
            f"published weights: have other names than the model's parameters: "
            f"{', '.join(sorted(given.keys() ^ set(names.values()))[:5])}."
        )
    state = model.state_dict(keep_vars=True)
    return {
        key: given[names[id(value)]] if id(value) in names else value
        for key, value in state.items()
    }


def _save_untied(model: Any, folder: Path, state: dict[str, Tensor]) -> None:
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    state[f"{name}.weight"] = state[f"{name}.weight"].clone()
    model.config.tie_word_embeddings = False
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.tie_word_embeddings = True


def _base(model: Any) -> tuple[str | None, int]:
    """The files of the model under an adapter, and the adapter's rank; (None, 0) without one."""
    if not is_adapted(model):
        return None, 0
    config = model.peft_config[model.active_adapter]
    name = str(config.base_model_name_or_path or "")
    if not name:
        raise UsageError(
            "engine.name = 'vllm': the model under the adapter was not loaded from a folder or a "
            "hub name, so vLLM cannot load it; save it first and give its path as model.path."
        )
    return name, int(config.r)


@contextmanager
def disturbed(model: Any) -> Iterator[None]:
    """Context in which every trained parameter has other values; its own are restored exactly.

    Values move on by one place and change sign, which is exact and needs no second copy; a
    parameter that is all 0, such as a new adapter's, is filled.
    """
    learning = [p.detach() for p in model.parameters() if p.requires_grad]
    empty = [not bool(p.any()) for p in learning]
    for values, zero in zip(learning, empty, strict=True):
        if zero:
            values.copy_(torch.linspace(-0.1, 0.1, values.numel()).view_as(values))
        else:
            values.copy_(values.roll(1).neg_())
    try:
        yield
    finally:
        for values, zero in zip(learning, empty, strict=True):
            values.zero_() if zero else values.copy_(values.roll(-1).neg_())

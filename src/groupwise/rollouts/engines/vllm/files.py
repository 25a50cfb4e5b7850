"""The policy as files that vLLM reads, and a copy of it that no one could take for the policy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from groupwise.errors import UsageError
from groupwise.models import Policy, without_bars
from groupwise.rollouts.engines.vllm.contract import Weights


class WeightFiles:
    """The newest version of a policy on disk, in the folder for temporary files (TMPDIR).

    Args:
        policy: whose weights; of a policy with an adapter, the adapter alone is written.
        untied: write the head as a matrix of its own where it is the embedding's. vLLM's build for
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

    def write(self, *, version: int) -> Weights:
        """The weights as they are now, under a path that was not used before."""
        self._count += 1
        folder = Path(self._place.name) / f"{version:06}-{self._count}"
        with without_bars():
            if self.untied and self._base is None and self.policy.model.config.tie_word_embeddings:
                _save_untied(self.policy.model, folder)
            else:
                self.policy.model.save_pretrained(folder)
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
            version=version,
        )

    def close(self) -> None:
        """Delete everything."""
        self._place.cleanup()


def _save_untied(model: Any, folder: Path) -> None:
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    state = {**model.state_dict(), f"{name}.weight": head.weight.detach().clone()}
    model.config.tie_word_embeddings = False
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.tie_word_embeddings = True


def _base(model: Any) -> tuple[str | None, int]:
    """The files of the model under an adapter, and the adapter's rank; (None, 0) without one."""
    if not hasattr(model, "peft_config"):
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
    """Inside, every parameter that learns has other values; afterwards exactly its own again.

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

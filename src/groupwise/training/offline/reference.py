"""Log-probabilities of the reference model: computed once, before the first step, and kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.errors import RunError
from groupwise.training.monitor.progress import Progress, duration
from groupwise.training.offline.encoding import Encoded, batch_of
from groupwise.types import Batch
from groupwise.updates import TorchLearner

KEPT = "reference.safetensors"
"""File of the run directory."""

CHUNK = 64
"""Prompts whose answers are read between two lines of progress."""

EVERY_S = 10.0
"""Seconds between lines of progress."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Σ_t log π_ref(y_t) of every answer, by item."""

    sums: tuple[Float[Tensor, "answers"], ...]

    def of(self, items: Sequence[int]) -> Float[Tensor, "rows"]:
        """The sums of all answers of some items, in the order of the rows of their batch."""
        return torch.cat([self.sums[item] for item in items])


def sequence_sums(learner: TorchLearner, batch: Batch) -> Float[Tensor, "batch"]:
    """Σ_t log π(y_t) of every row under the present weights."""
    logp = learner.evaluate(batch, {"logp"})["logp"]
    return torch.where(batch.mask, logp, 0).sum(1)


def reference_of(
    items: Sequence[Encoded],
    learner: TorchLearner,
    folder: Path,
    *,
    digest: str,
    name: str = "reference",
    recall: bool,
    progress: Progress,
) -> Reference:
    """The sums under the present weights of the learner, which are those of the reference model.

    No second model is held: they are computed before the first step, and a resumed run finds them
    in the run directory.

    Args:
        digest: of tokens and model; sums of others are not recalled.
        name: of this set of answers in the file.
        recall: take them from the run directory where they are.

    Raises:
        RunError: the disk is full.
    """
    path = folder / KEPT.replace("reference", name)
    sizes = [len(item.answers) for item in items]
    found = _recalled(path, digest, sum(sizes)) if recall else None
    if found is None:
        found = _computed(items, learner, progress)
        try:
            save_file({"sums": found}, str(path), metadata={"digest": digest})
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}).") from None
    return Reference(sums=tuple(found.split(sizes)))


def model_digest(learner: TorchLearner) -> str:
    """A name of the present weights that are trained."""
    found = hashlib.blake2b(digest_size=16)
    for name, weight in learner.trained().items():
        found.update(f"{name} {float(weight.double().sum())!r}".encode())
    return found.hexdigest()


def _recalled(path: Path, digest: str, size: int) -> Tensor | None:
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("digest") != digest:
                return None
        sums = load_file(str(path))["sums"]
    except (OSError, SafetensorError, KeyError):
        return None
    return sums if len(sums) == size else None


def _computed(items: Sequence[Encoded], learner: TorchLearner, progress: Progress) -> Tensor:
    sums, start, said = [], time.monotonic(), time.monotonic()
    for first in range(0, len(items), CHUNK):
        sums.append(sequence_sums(learner, batch_of(items[first : first + CHUNK])))
        now, done = time.monotonic(), min(first + CHUNK, len(items))
        if now - said > EVERY_S and done < len(items):
            said = now
            left = (now - start) / done * (len(items) - done)
            progress.log(f"reference: {done}/{len(items)} prompts, left {duration(left)}")
    return torch.cat(sums)

"""Exact nearest neighbours of a query among passages, by the encoder of a local folder."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from groupwise.environments.retrieval.corpus import Hit, Passage
from groupwise.errors import UsageError
from groupwise.rewards.judges.encoders import Loaded, load


class DenseIndex:
    """Finds the passages whose vectors have the largest inner product with that of a query.

        vector = normalised mean of the encoder's last hidden states over the tokens of a text

    The prefixes count as text: E5, for example, was trained with "query: " and "passage: ".

    The search is exact; equal scores are ordered by the passages' place in the corpus.

    Args:
        passages: what is searched; the title counts as text.
        encoder: model folder that `transformers.AutoModel` loads.
        folder: where the vectors are kept and memory-mapped from; None keeps them in memory.
        query_prefix, passage_prefix: put before every query, and before every passage.

    Raises:
        UsageError: no such folder, or a model whose outputs have no hidden states.

    Source: Karpukhin et al. 2020 for retrieval by inner product; Reimers and Gurevych 2019 for the
        mean.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        *,
        encoder: str,
        folder: Path | None = None,
        query_prefix: str = "",
        passage_prefix: str = "",
    ) -> None:
        self.query_prefix = query_prefix
        self.passages, self.encoder = passages, load(encoder, kind="encoder")
        texts = [passage_prefix + f"{p.title} {p.text}".strip() for p in passages]
        if folder is None:
            self._vectors = vectors(texts, self.encoder)
            return
        place = folder / f"{_digest(texts, Path(encoder).expanduser())}.npy"
        if not place.exists():
            _store(vectors(texts, self.encoder).numpy(), place)
        # Copy-on-write, since torch has no read-only tensors.
        self._vectors = torch.from_numpy(np.load(place, mmap_mode="c"))

    def search(self, query: str, *, top_k: int = 3) -> list[Hit]:
        """The best passages, best first."""
        scores = self._vectors @ vectors([self.query_prefix + query], self.encoder)[0]
        best = scores.argsort(descending=True, stable=True)[:top_k].tolist()
        return [Hit(self.passages[place], float(scores[place])) for place in best]


@torch.inference_mode()
def vectors(texts: Sequence[str], encoder: Loaded) -> Float[Tensor, "texts features"]:
    """The vector of each text; texts of like length are encoded together.

    Raises:
        UsageError: the model does not encode texts.
    """
    places = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(places), encoder.batch):
        part = places[start : start + encoder.batch]
        rows = encoder.rows([texts[place] for place in part]).to(encoder.model.device)
        try:
            hidden = encoder.model(**rows).last_hidden_state
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"environment.encoder: {type(encoder.model).__name__} gives no hidden states of a "
                "text; name the folder of an encoder such as BERT."
            ) from error
        mask = rows["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        found |= dict(zip(part, normalize(mean.float(), dim=-1).cpu(), strict=True))
    return torch.stack([found[place] for place in range(len(texts))])


def _digest(texts: Sequence[str], encoder: Path) -> str:
    """Names passages and encoder by their contents."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in encoder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'blake2b').hexdigest()}".encode())
    for text in texts:
        found.update(repr(text).encode())
    return found.hexdigest()


def _store(values: np.ndarray, place: Path) -> None:
    """Write vectors under another name, then rename the file: a reader never sees half of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".vectors-", dir=place.parent, delete=False) as draft:
        np.save(draft, values)
    os.replace(draft.name, place)

"""Encoders and classifiers from a local folder, loaded once per process, and what they say of
texts.

This module imports torch; the rewards import it when they are first called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from groupwise.errors import UsageError, first_line, suggest

Kind = Literal["encoder", "classifier", "steps"]


MAKERS: dict[Kind, Any] = {
    "encoder": AutoModel,
    "classifier": AutoModelForSequenceClassification,
    "steps": AutoModelForTokenClassification,
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in evaluation mode and its tokenizer; `limit` is the longest input in tokens."""

    model: Any
    tokenizer: Any
    limit: int


@functools.lru_cache(maxsize=4)
def load(path: str, *, kind: Kind, device: str = "cpu") -> Loaded:
    """The model of a folder.

    Args:
        path: a folder in Hugging Face form; nothing is fetched.
        kind: "encoder" for hidden states, "classifier" for a score of a text or of a pair, "steps"
            for one of each token.
        device: where it runs, such as "cpu" or "cuda".

    Raises:
        UsageError: no such folder, or none that transformers can load.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        near = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise UsageError(
            f"model = {path!r}: must be a model folder, with a config.json in it; "
            + suggest(folder.name, near)
        )
    maker = MAKERS[kind]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = maker.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = first_line(error)
        raise UsageError(f"model = {path!r}: cannot be loaded as {kind} ({reason}).") from error
    return Loaded(
        model=model.eval().to(device), tokenizer=tokenizer, limit=_limit(model, tokenizer)
    )


def _limit(model: Any, tokenizer: Any) -> int:
    """The longest input: RoBERTa's position table holds two places that no token can take."""
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    if "roberta" in str(getattr(model.config, "model_type", "")):
        positions -= 2
    return int(min(positions, tokenizer.model_max_length))


def greedy_f1(
    said: Float[Tensor, "said features"], wanted: Float[Tensor, "wanted features"]
) -> float:
    """BERTScore of two sequences of token vectors, without idf weights.

    P = mean over said tokens of the best cosine with a wanted token; R the other way round; F1 =
    2·P·R/(P+R)

    Args:
        said: a vector per token.
        wanted: likewise.

    Returns:
        From -1 to 1; 1 for equal sequences, 0 where one is empty or P + R is not positive.

    Example: said (1,0), (0,1); wanted (1,0): P = (1+0)/2, R = 1, F1 = 2/3:
        >>> import torch
        >>> round(greedy_f1(torch.eye(2), torch.tensor([[2.0, 0.0]])), 6)
        0.666667

    Source: Zhang et al. 2020, BERTScore, section 3.
    Elsewhere: bert-score lets a token match [CLS] and [SEP] of the other side too, chooses a layer
        tuned per model, and can rescale by a baseline; here special tokens are left out on both
        sides and nothing is rescaled.
    """
    if not len(said) or not len(wanted):
        return 0.0
    cosines = normalize(said.double(), dim=-1) @ normalize(wanted.double(), dim=-1).T
    precision, recall = float(cosines.amax(1).mean()), float(cosines.amax(0).mean())
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _vectors(
    texts: Sequence[str], encoder: Loaded, layer: int
) -> list[Float[Tensor, "time features"]]:
    """Token vectors of every text, special tokens left out."""
    vectors = []
    for text in texts:
        row = encoder.tokenizer(
            text,
            truncation=True,
            max_length=encoder.limit,
            return_tensors="pt",
            return_special_tokens_mask=True,
        )
        keep = row.pop("special_tokens_mask")[0] == 0
        with torch.inference_mode():
            states = encoder.model(
                **row.to(encoder.model.device), output_hidden_states=True
            ).hidden_states
        vectors.append(states[layer][0, keep.to(states[layer].device)])
    return vectors


def bert_f1(said: str, wanted: str, *, model: str, layer: int = -1, device: str = "cpu") -> float:
    """BERTScore F1 between two texts with the encoder of a local folder; see `greedy_f1`."""
    return greedy_f1(*_vectors((said, wanted), load(model, kind="encoder", device=device), layer))


def pair_score(first: str, second: str, *, model: str, device: str = "cpu") -> float:
    """The first output of a classifier for a pair of texts, cut to what it can read."""
    loaded = load(model, kind="classifier", device=device)
    row = loaded.tokenizer(
        first, second, truncation=True, max_length=loaded.limit, return_tensors="pt"
    )
    with torch.inference_mode():
        return float(loaded.model(**row.to(loaded.model.device)).logits[0, 0])

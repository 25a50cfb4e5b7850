"""Encoders and classifiers from a local folder, loaded once per process, and their scores of texts.

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
from groupwise.models.devices import device_of
from groupwise.models.loading import check_weights

EncoderKind = Literal["encoder", "classifier", "steps"]

BATCH = 32
"""Texts that are encoded together."""


MAKERS: dict[EncoderKind, Any] = {
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

    @property
    def batch(self) -> int:
        """Texts that are read together; one at a time where the tokenizer cannot pad, or pads by
        another token than the model takes for padding: a causal classifier reads the last token
        that is none."""
        padding = self.tokenizer.pad_token_id
        known = getattr(self.model.config, "pad_token_id", None)
        return BATCH if padding is not None and padding == known else 1

    def rows(self, *texts: Sequence[str], **options: Any) -> Any:
        """Token ids and masks of texts or pairs of them, cut to the limit and padded."""
        return self.tokenizer(
            *map(list, texts),
            truncation=True,
            max_length=self.limit,
            padding=self.batch > 1,
            padding_side="right",
            return_tensors="pt",
            **options,
        )


def load(path: str, *, kind: EncoderKind, device: str = "auto") -> Loaded:
    """The model of a folder, loaded once per process.

    Args:
        path: a folder in Hugging Face form; nothing is fetched.
        kind: "encoder" for hidden states, "classifier" for a score of a text or of a pair, "steps"
            for one of each token.
        device: where it runs, such as "cpu" or "cuda"; "auto" takes the GPU if there is one.

    Raises:
        UsageError: no such folder, none that transformers can load, or one without all weights:
            transformers would initialise the missing ones at random.
    """
    return _load(path, kind=kind, device=device_of(device))


@functools.lru_cache(maxsize=4)
def _load(path: str, *, kind: EncoderKind, device: torch.device) -> Loaded:
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
        model, loaded = maker.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = first_line(error)
        raise UsageError(f"model = {path!r}: cannot be loaded as {kind} ({reason}).") from error
    if kind == "encoder":  # hidden states need neither a pooler nor the head of a language model
        loaded["missing_keys"] = {n for n in loaded["missing_keys"] if "pooler" not in n}
        loaded["unexpected_keys"] = ()
    check_weights(loaded, path, where="model")
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


def bert_f1(
    texts: Sequence[str],
    references: Sequence[str],
    *,
    model: str,
    layer: int = -1,
    device: str = "auto",
) -> list[float]:
    """The best BERTScore F1 of each text over all references, by the encoder of a local folder; see
    `greedy_f1`. An empty text has 0."""
    encoder = load(model, kind="encoder", device=device)
    distinct = list(dict.fromkeys(text for text in (*texts, *references) if text))
    vectors = dict(zip(distinct, _vectors(distinct, encoder, layer), strict=True))
    best = {
        text: max(greedy_f1(vectors[text], vectors[gold]) for gold in references if gold)
        for text in set(filter(None, texts))
    }
    return [best.get(text, 0.0) for text in texts]


def _vectors(
    texts: Sequence[str], encoder: Loaded, layer: int
) -> list[Float[Tensor, "time features"]]:
    """Token vectors of every text, special tokens left out; texts of like length are encoded
    together."""
    vectors: dict[int, Tensor] = {}
    for places in _by_length(texts, encoder.batch):
        rows = encoder.rows([texts[place] for place in places], return_special_tokens_mask=True)
        kept = rows.pop("special_tokens_mask") == 0  # padding is special too
        with torch.inference_mode():
            states = encoder.model(
                **rows.to(encoder.model.device), output_hidden_states=True
            ).hidden_states[layer]
        for row, place in enumerate(places):
            vectors[place] = states[row, kept[row].to(states.device)]
    return [vectors[place] for place in range(len(texts))]


def _by_length(texts: Sequence[str], size: int) -> list[list[int]]:
    """Places of texts in batches, shortest texts first."""
    places = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    return [places[start : start + size] for start in range(0, len(places), size)]


def pair_scores(
    texts: Sequence[str], references: Sequence[str], *, model: str, device: str = "auto"
) -> list[float]:
    """The best first output of a classifier for the pairs (reference, text) of each text, cut to
    what it can read. An empty text has 0."""
    loaded = load(model, kind="classifier", device=device)
    pairs = [(gold, text) for text in dict.fromkeys(filter(None, texts)) for gold in references]
    best: dict[str, float] = {}
    for places in _by_length([gold + text for gold, text in pairs], loaded.batch):
        chosen = [pairs[place] for place in places]
        rows = loaded.rows(*zip(*chosen, strict=True))
        with torch.inference_mode():
            scores = loaded.model(**rows.to(loaded.model.device)).logits[:, 0].tolist()
        for (_, text), score in zip(chosen, scores, strict=True):
            best[text] = max(score, best.get(text, score))
    return [best.get(text, 0.0) for text in texts]

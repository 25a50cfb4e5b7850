"""A language model with what is needed to write and to stop, and how it is written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.errors import ModelError, warn
from groupwise.models.adapters import is_adapted, note_base, refuse_virtual_tokens


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A causal language model with what is needed to write and to stop.

    Attributes:
        model: the model, possibly inside an adapter wrapper.
        tokenizer: its tokenizer.
        end_tokens: every id that ends a completion.
        context: the longest sequence the model was made for, in tokens.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    context: int


def make_policy(model: Any, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """A policy of a model and a tokenizer at hand; checks that they belong together."""
    refuse_virtual_tokens(getattr(model, "active_peft_config", None), where="model")
    config, embeddings = model.config.get_text_config(), model.get_input_embeddings()
    embedded = len(embeddings.weight)  # pyright: ignore[reportArgumentType]
    if len(tokenizer) > embedded:
        raise ModelError(
            f"tokenizer: has {len(tokenizer)} tokens but the model embeds only {embedded}; "
            "they do not belong together."
        )
    ends = _end_tokens(model, tokenizer)
    if not ends:
        raise ModelError(
            "tokenizer.eos_token: is not set, so no completion could ever end; set it and save "
            "again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(ends))
    context = getattr(config, "max_position_embeddings", None) or 1 << 30
    return Policy(
        model=model,
        tokenizer=tokenizer,
        end_tokens=ends,
        context=min(int(context), _one_scale(config)),
    )


def _one_scale(config: Any) -> int:
    """The longest sequence whose rotary embedding does not depend on the other rows of a batch.

    The long-rope method (2402.13753) rotates every token of a batch by other angles once its
    longest row exceeds the original context, so the log-probabilities of a sequence would depend on
    its neighbours: sampler, learner and reference would disagree.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [each for each in rope.values() if isinstance(each, Mapping)]
    for each in nested or [rope]:
        if each.get("rope_type", each.get("type")) == "longrope":
            original = each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original:
                warn(
                    f"model: its rotary embedding (longrope) changes for all rows of a batch once "
                    f"one has more than {original} tokens, so log-probabilities would depend on "
                    f"the batch; prompts and completions are limited to {original} tokens."
                )
                return int(original)
    return 1 << 30


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: chat models list several in their generation config."""
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])]
    return frozenset(int(i) for i in ids if isinstance(i, int))


def save_policy(
    policy: Policy, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write model and tokenizer in Hugging Face form: weights, generation config, chat template.

    The generation config names every token that ended completions here, so that other programs stop
    where training did. Of a model with an adapter, the adapter alone is written, with the name and
    the fingerprint of the model that it belongs to.

    Args:
        weights: in place of those of the model, by the names of its state; a sharded model holds
            only a part of each.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    generation = getattr(policy.model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id = sorted(policy.end_tokens)
        generation.pad_token_id = policy.tokenizer.pad_token_id
    with without_bars():
        policy.model.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)
    if is_adapted(policy.model):
        note_base(policy.model, folder)


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, transformers draws no bars of its own; downloads keep theirs, which can take long."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()

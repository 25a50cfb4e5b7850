"""Models and tokenizers from a folder, a hub name, or the one that ships with the package."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from groupwise.errors import ModelError, UsageError

BUNDLED = "bundled"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
"""Names that the files of tokenizers have."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A low-rank adapter (LoRA) that is trained in place of the weights.

    Attributes:
        rank: of the update of each matrix.
        alpha: scale of the update, multiplied by alpha / rank.
        dropout: share of the adapter's inputs dropped while training.
        targets: modules that get one, by name, or "all-linear" for every linear layer but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)


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


def resolve(path: str | Path) -> str:
    """The folder of the bundled model for "bundled", anything else unchanged."""
    if str(path) != BUNDLED:
        return str(path)
    return str(importlib.resources.files("groupwise") / "assets" / "word-problems-base")


def load_policy(
    path: str | Path,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    quantization: str | None = None,
) -> Policy:
    """Load a causal language model and its tokenizer.

    Args:
        path: a folder in Hugging Face form, a hub name, or "bundled".
        dtype: of the weights: float32, bfloat16, float16 or float64.
        trust_remote_code: run Python code that comes with the model. Off unless asked for.
        adapter: train this adapter and leave the weights as they are.
        quantization: "nf4" holds the weights in 4 bits, doubly quantised (QLoRA, 2305.14314).

    Raises:
        UsageError: no such model, a folder without tokenizer, or a tokenizer that cannot be used.
    """
    place = resolve(path)
    if Path(place).exists() and not (Path(place) / "config.json").exists():
        raise UsageError(
            f"model.path = {str(path)!r}: the folder has no config.json, so it is no model folder."
        )
    if Path(place).is_dir() and not any(
        next(Path(place).glob(pattern), None) for pattern in TOKENIZER_FILES
    ):
        # transformers would make an empty tokenizer of the model's kind.
        raise UsageError(
            f"model.path = {str(path)!r}: no tokenizer is there; the folder must hold the "
            "tokenizer's files beside the weights."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        hint = (
            "the folder must hold the tokenizer's files beside the weights."
            if Path(place).exists()
            else "no folder has this path, so it was looked up as a name on the hub."
        )
        raise UsageError(
            f"model.path = {str(path)!r}: no tokenizer could be loaded ({_first_line(error)}); "
            f"{hint}"
        ) from error
    try:
        with without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place,
                dtype=DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                quantization_config=_four_bits(DTYPES[dtype]) if quantization == "nf4" else None,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise UsageError(
            f"model.path = {str(path)!r}: cannot be loaded ({_first_line(error)})."
        ) from error
    policy = make_policy(model, tokenizer)
    return policy if adapter is None else with_adapter(policy, adapter)


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


def with_adapter(policy: Policy, adapter: Adapter) -> Policy:
    """The policy with a fresh low-rank adapter, float32, that alone is trained.

    Raises:
        UsageError: the targets are not modules of this model.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = adapter.targets[0] if adapter.targets == ("all-linear",) else adapter.targets
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        model = get_peft_model(policy.model, config)
    except ValueError as error:
        known = sorted(
            {name.rsplit(".", 1)[-1] for name, _ in policy.model.named_modules() if name}
        )
        raise UsageError(
            f"model.adapter.targets = {list(adapter.targets)!r}: no such modules in this model. "
            f"Known: {', '.join(known)}."
        ) from error
    return replace(policy, model=model)


def _four_bits(compute: torch.dtype) -> Any:
    """QLoRA's storage: normal-float 4 with doubly quantised scales."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "model.quantization = 'nf4': needs bitsandbytes; pip install 'groupwise[quant]'."
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def make_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """A policy of a model and a tokenizer at hand; checks that they belong together."""
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
    return Policy(model=model, tokenizer=tokenizer, end_tokens=ends, context=int(context))


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a completion: chat models list several in their generation config."""
    generation = getattr(model, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])]
    return frozenset(int(i) for i in ids if isinstance(i, int))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

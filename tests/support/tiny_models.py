"""Random models of every architecture that the engine is promised for, small enough for a test.

Weights are scaled up so that distributions are far from uniform and a wrong mask or position shows
in the third digit, not in the seventh.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from groupwise.models import Policy

VOCAB = 97
END = 1
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    # Only layers from max_window_layers on have the window: two kinds of mask in one model.
    "qwen2_window": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **SHAPE,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "multi_query": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "multi_head": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
}
NAMES = sorted(CONFIGS)


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, the same at every call."""
    return random_model(CONFIGS[name](), dtype=dtype)


def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of any configuration, the same at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Every id is one character, so that texts and tokens can be compared at sight."""
    letters = {chr(33 + token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="!", eos_token=chr(33 + END)
    )


def tiny_policy(model: PreTrainedModel, *, ends: tuple[int, ...] = (END,)) -> Policy:
    """A policy of a tiny model; several end tokens make lengths ragged."""
    return Policy(
        model=model, tokenizer=letter_tokenizer(), end_tokens=frozenset(ends), context=512
    )

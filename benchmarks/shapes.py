"""Models of given shapes with random weights, and prompts for them.

Their tokenizer has one word per token, so that text and tokens are the same thing on every side:
<pad> <end> w2 w3 …
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LARGE = 100_000_000
"""Models of more parameters are saved in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2 model with tied embeddings."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    vocab: int
    context: int = 2048


SHAPES = {
    "1m": Shape(hidden=128, feed_forward=512, layers=4, heads=4, key_value_heads=2, vocab=1024),
    "42m": Shape(hidden=512, feed_forward=1536, layers=8, heads=8, key_value_heads=4, vocab=32000),
    "42m-vocab-152k": Shape(
        hidden=512, feed_forward=1536, layers=8, heads=8, key_value_heads=4, vocab=151936
    ),
    "1m-vocab-152k": Shape(
        hidden=128, feed_forward=512, layers=4, heads=4, key_value_heads=2, vocab=151936
    ),
    "qwen2.5-0.5b": Shape(
        hidden=896, feed_forward=4864, layers=24, heads=14, key_value_heads=2, vocab=151936
    ),
    "qwen2.5-1.5b": Shape(
        hidden=1536, feed_forward=8960, layers=28, heads=12, key_value_heads=2, vocab=151936
    ),
    "qwen2.5-3b": Shape(
        hidden=2048, feed_forward=11008, layers=36, heads=16, key_value_heads=2, vocab=151936
    ),
}

ON_A_GPU = {"0.5b": 16384, "1.5b": 8192, "3b": 4096}
"""Qwen2.5's sizes, and tokens per microbatch that 80 GB hold in full fine-tuning."""


def save_model(shape: Shape, folder: str | Path, *, seed: int = 0) -> str:
    """Write a model with random weights and its tokenizer; returns the folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
    if model.num_parameters() > LARGE:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    _save_words(shape.vocab, Path(folder))
    return str(folder)


def _save_words(vocab: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    # No special word is part of another: tokenizers find them inside words, too.
    names = ["<pad>", "<end>", *(f"w{i}" for i in range(2, vocab))]
    words: Any = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))


def random_prompts(shape: Shape, *, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Prompts of equal length; every token but the first two, which are special, may occur."""
    rng = np.random.default_rng(seed)
    return rng.integers(2, shape.vocab, (count, tokens)).tolist()


def as_text(tokens: list[int]) -> str:
    """What tokenises to these tokens."""
    return " ".join(f"w{token}" for token in tokens)


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Word problems as the bundled model sees them."""

    folder: str
    texts: list[str]
    tokens: list[list[int]]
    answers: list[str]
    ends: list[int]
    context: int


def word_problems_of_bundled(count: int) -> Problems:
    """The first training problems, through the chat template of the bundled model."""
    from groupwise.models import load_policy
    from groupwise.models.loading import resolve
    from groupwise.prompts.generators.word_problems import word_problems

    policy = load_policy("bundled")
    prompts = word_problems(count)
    texts: list[str] = [
        str(
            policy.tokenizer.apply_chat_template(
                [dict(m) for m in prompt.messages], tokenize=False, add_generation_prompt=True
            )
        )
        for prompt in prompts
    ]
    return Problems(
        folder=resolve("bundled"),
        texts=texts,
        tokens=[list(policy.tokenizer(text).input_ids) for text in texts],
        answers=[str(prompt.answer) for prompt in prompts],
        ends=sorted(policy.end_tokens),
        context=policy.context,
    )

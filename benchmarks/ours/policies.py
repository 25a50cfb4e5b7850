"""Policies and batches for the workers of this folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tasks import tokenizer_of
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from groupwise.kernels import keep_freed_memory
from groupwise.models import AdapterSettings, Policy, load_policy, make_policy, with_adapter
from groupwise.models.loading import check_four_bits, four_bits, release_file
from groupwise.types import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKAGES = ("torch", "transformers", "groupwise")


def policy_of(
    folder: str,
    *,
    precision: str,
    endless: bool,
    adapter: AdapterSettings | None = None,
    quantized: bool = False,
) -> Policy:
    """The policy of a model folder.

    Args:
        endless: no token that the model can produce ends a completion, so that all have the same
            length.
        adapter: trained in place of the weights.
        quantized: weights in 4 bits.
    """
    keep_freed_memory()  # As every run does.
    if endless:
        policy = _endless(folder, DTYPES[precision], quantized=quantized)
    else:
        policy = load_policy(folder, dtype=precision)
    if not quantized:  # Such a model is on its device already.
        policy.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return policy if adapter is None else with_adapter(policy, adapter)


def _endless(folder: str, dtype: torch.dtype, *, quantized: bool) -> Policy:
    small = {"quantization_config": four_bits(dtype)} if quantized else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **small)
    check_four_bits(model, folder)
    if quantized:
        release_file(model)
    whole: Any = tokenizer_of(folder, endless=True)
    plain = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", pad_token="<pad>", eos_token="<end>"
    )
    policy = make_policy(model, plain)
    return replace(policy, end_tokens=frozenset({whole.eos_token_id}))


def batch_of(prompts: list[list[int]], completions: list[list[int]], *, advantage: Any) -> Batch:
    """A batch of completions of equal length, the same number for every prompt.

    Args:
        advantage: per completion; every token weighs the same.
    """
    tokens = torch.tensor(completions)
    group = len(completions) // len(prompts)
    spread = torch.as_tensor(advantage, dtype=torch.float32)[:, None].expand(tokens.shape)
    return Batch(
        prompts=tuple(torch.tensor(prompt) for prompt in prompts),
        group=torch.arange(len(prompts)).repeat_interleave(group),
        tokens=tokens,
        length=torch.full((len(tokens),), tokens.shape[1]),
        mask=torch.ones(tokens.shape, dtype=torch.bool),
        advantage=spread,
        weight=torch.full(tokens.shape, 1 / tokens.numel()),
    )

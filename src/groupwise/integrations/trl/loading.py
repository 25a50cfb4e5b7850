"""The model of a TRL script as a policy: loaded or given, its tokenizer, its adapter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from groupwise.errors import UsageError
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.settings import dtype, revision, trusts_remote_code, wrong
from groupwise.models import Policy, is_adapted, load_policy, make_policy
from groupwise.models.adapters import quiet_peft, refuse_virtual_tokens
from groupwise.models.loading import check_four_bits
from groupwise.models.seeds import own_random_numbers


def check_place(args: GRPOConfig) -> None:
    """Refuse settings that a single process on its best device cannot follow.

    Raises:
        UsageError: several processes, or a card that is not to be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "WORLD_SIZE: this trainer runs in one process; start the script with python."
        )
    if args.use_cpu and torch.cuda.is_available():
        raise wrong(args, "use_cpu", "hide the GPU from this process with CUDA_VISIBLE_DEVICES=''")


def computes_in_bf16() -> bool:
    """Whether there is a card that computes in bfloat16 itself. Older ones emulate it, slowly."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def policy(
    model: Any, args: GRPOConfig, *, tokenizer: Any = None, peft_config: Any = None
) -> Policy:
    """The policy of the arguments of TRL's trainer.

    Args:
        model: a name or folder, or a model at hand, with an adapter or without.
        args: the settings.
        tokenizer: TRL's `processing_class`; None takes the model's own.
        peft_config: of a new adapter.

    Raises:
        UsageError: the model cannot be loaded or trained as asked.
    """
    found = _named(model, args) if isinstance(model, str) else _at_hand(model, args, tokenizer)
    if tokenizer is not None:
        found = _policy(found.model, tokenizer)
    if peft_config is not None:
        found = _adapted(found, peft_config, seed=args.seed)
    if args.disable_dropout:
        for module in found.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return found


def _named(name: str, args: GRPOConfig) -> Policy:
    return load_policy(
        name,
        revision=revision(args),
        dtype=dtype(args, card=computes_in_bf16()),
        trust_remote_code=trusts_remote_code(args),
    )


def _at_hand(model: Any, args: GRPOConfig, tokenizer: Any) -> Policy:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UsageError(f"model: must be a name or a model of transformers, not {type(model)}.")
    if args.model_init_kwargs:
        raise wrong(args, "model_init_kwargs", "the model is loaded already; load it with them")
    if args.bf16 and model.dtype != torch.bfloat16:
        raise wrong(args, "bf16", f"the model is {model.dtype}; load it with dtype=torch.bfloat16")
    if is_adapted(model) and args.beta and _trained_adapter(model):
        raise wrong(
            args,
            "beta",
            "the adapter has been trained already, and the reference would be the model without "
            "it; merge it first (model.merge_and_unload()) and give a new peft_config",
        )
    place = str(getattr(model.config, "_name_or_path", ""))
    check_four_bits(model, place)
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"processing_class = None: {place!r}, where the model says it comes from, has no "
                "tokenizer; pass it as processing_class."
            ) from error
    return _policy(model, tokenizer)


def _policy(model: Any, tokenizer: Any) -> Policy:
    """A policy of a model that may be inside an adapter."""
    refuse_virtual_tokens(getattr(model, "active_peft_config", None), where="model")
    base = model.get_base_model() if is_adapted(model) else model
    return replace(make_policy(base, tokenizer), model=model)


def _trained_adapter(model: PreTrainedModel | nn.Module) -> bool:
    """Whether an adapter changes the model: a new one of LoRA has second factors of 0."""
    return any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def router_aux_loss(model: Any, args: GRPOConfig) -> float:
    """Coefficient of the load-balancing loss: 0 for a model without experts, or whose configuration
    names none.

    Raises:
        UsageError: a coefficient for a model without experts.
    """
    text, asked = model.config.get_text_config(), args.router_aux_loss_coef
    if asked and not hasattr(text, "output_router_logits"):
        raise wrong(args, "router_aux_loss_coef", "the model is not a mixture of experts")
    return getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked


def _adapted(found: Policy, config: Any, *, seed: int) -> Policy:
    from peft import get_peft_model

    refuse_virtual_tokens(config, where="peft_config")
    if is_adapted(found.model):
        raise UsageError("peft_config: the model has an adapter already; merge it first.")
    with own_random_numbers(seed):
        try:
            with quiet_peft():
                model = get_peft_model(found.model, config)
        except ValueError as error:
            raise UsageError(f"peft_config: does not fit this model ({error}).") from error
    return replace(found, model=model)

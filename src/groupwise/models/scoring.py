"""Models with a scalar output: critics, reward models and token reward models.

They are the sequence and token classifiers of `transformers` with one label, so
`AutoModelForSequenceClassification` or `AutoModelForTokenClassification` loads a folder written
here, and folders of other projects can be loaded here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)

from groupwise.errors import UsageError
from groupwise.models.adapters import SCORE_LAYERS, SavedAdapter, is_adapted, new_adapter
from groupwise.models.backbone import Backbone
from groupwise.models.loading import (
    DTYPES,
    ModelSource,
    check_four_bits,
    check_weights,
    configuration,
    four_bits,
    release_file,
)
from groupwise.models.policy import Policy, make_policy
from groupwise.models.seeds import own_random_numbers
from groupwise.settings import AdapterSettings

ScorerKind = Literal["sequence", "token"]
"""What `transformers` calls a model that gives a number per sequence, or per token."""

CLASSES: dict[ScorerKind, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
SUFFIXES: dict[ScorerKind, str] = {
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
}
"""How the names of their classes end."""

TASKS: dict[ScorerKind, str] = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}
"""The kinds of model as PEFT calls them."""


def load_scorer(
    path: str | Path,
    *,
    kind: ScorerKind = "sequence",
    revision: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    adapter: AdapterSettings | None = None,
    quantization: str | None = None,
    attention: str = "auto",
) -> Policy:
    """Load a model with a scalar output, and its tokenizer.

    The folder of a classifier is loaded as it is. A language model gets a linear head of zeros in
    place of its output projection: every number is 0 until it is trained.

    Args:
        path: a folder in Hugging Face form, a hub name, or "bundled". The folder of an adapter
            gives the model that it belongs to with the adapter.
        kind: of the classifier that a language model becomes.
        adapter: train this adapter and the head, and leave the other weights as they are.
        revision, dtype, trust_remote_code, quantization, attention: as in `load_policy`.

    Raises:
        UsageError: no such model, a head with several labels, or an adapter of a language model.
    """
    source = ModelSource.at(path, revision=revision)
    saved = _kind_of_weights(source, trust_remote_code=trust_remote_code)
    kind = _kind_of_adapter(path, source.adapter) or saved or kind
    tokenizer = source.tokenizer(trust_remote_code=trust_remote_code)
    with _without_report(), own_random_numbers():
        model, loaded = source.read(
            CLASSES[kind],
            num_labels=1,
            dtype=DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            quantization_config=four_bits(DTYPES[dtype]) if quantization == "nf4" else None,
            attn_implementation=None if attention == "auto" else attention,
        )
    layer = score_layer(model)
    if saved is None:
        _zero(layer)
        _leave_out_heads(loaded)
    check_weights(loaded, path)
    check_four_bits(model, path)
    if quantization is not None:
        release_file(model)
    policy = scoring_policy(model, tokenizer)
    if source.adapter is not None:
        return replace(policy, model=source.adapter.attached(model, adapter))
    if adapter is not None:
        return replace(policy, model=new_adapter(model, adapter, task=TASKS[kind]))
    return policy


def scorer_of(policy: Policy, *, kind: ScorerKind = "sequence") -> Policy:
    """A copy of a language model at hand with a linear head of zeros in place of its output
    projection, all of whose weights are trained.

    Raises:
        UsageError: the model has an adapter, or is held in 4 bits.
    """
    if is_adapted(policy.model) or getattr(policy.model, "is_quantized", False):
        raise UsageError(
            "model: has an adapter or is held in 4 bits, so no classifier can be made of it in "
            "memory; name its folder."
        )
    backbone = Backbone.of(policy.model)
    config = copy.deepcopy(backbone.model.config)
    config.num_labels = 1
    with own_random_numbers():
        model = CLASSES[kind].from_config(config, dtype=backbone.model.dtype)
    decoder = Backbone.of(model).decoder
    decoder.load_state_dict(backbone.decoder.state_dict())
    _zero(score_layer(model))
    model.to(backbone.device)
    return scoring_policy(model, policy.tokenizer)


def scoring_policy(model: Any, tokenizer: PreTrainedTokenizerBase) -> Policy:
    """A classifier with its tokenizer, which names a padding token that ends no text.

    A sequence classifier of `transformers` reads the last token that is not the padding token.
    Where this is the end token as well, it would read the state before the end token.
    """
    policy = make_policy(model, copy.deepcopy(tokenizer))
    own = policy.tokenizer
    if own.pad_token_id in policy.end_tokens:
        special = [i for i in own.all_special_ids if i not in policy.end_tokens]
        own.pad_token = own.convert_ids_to_tokens(special[0]) if special else None
    model.config.get_text_config().pad_token_id = own.pad_token_id
    return policy


def score_layer(model: Any) -> nn.Linear:
    """The linear layer of a classifier, adapter or not.

    Raises:
        UsageError: it has none with one output.
    """
    base = model.get_base_model() if is_adapted(model) else model
    for name in SCORE_LAYERS:
        layer: Any = getattr(base, name, None)
        if hasattr(layer, "modules_to_save"):
            layer = layer.modules_to_save[layer.active_adapters[0]]
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return layer
    raise UsageError(
        f"model: a {type(base).__name__} has no linear layer {' or '.join(SCORE_LAYERS)} with one "
        "output, so it cannot be a critic or reward model."
    )


def check_same_tokenizer(
    policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, *, where: str
) -> None:
    """Check that a second model has the tokenizer of the policy.

    Args:
        where: what names the second model, such as "critic.model = 'bundled'".

    Raises:
        UsageError: the tokenizers differ.
    """
    own, found = policy.get_vocab(), other.get_vocab()
    if own == found:
        return
    if len(own) != len(found):
        what = f"{len(found)} tokens, the policy's has {len(own)}"
    else:
        token = min(own.items() - found.items(), key=lambda pair: pair[1])
        what = f"another id for {token[0]!r} than the policy's, {token[1]}"
    raise UsageError(
        f"{where}: its tokenizer has {what}; both models must read the same tokens, so use "
        "a model with the policy's tokenizer."
    )


def _kind_of_weights(source: ModelSource, *, trust_remote_code: bool) -> ScorerKind | None:
    """The kind of classifier that a source holds; None for a language model."""
    config = configuration(
        source.home, revision=source.revision, trust_remote_code=trust_remote_code
    )
    for kind, suffix in SUFFIXES.items():
        if any(name.endswith(suffix) for name in config.architectures or ()):
            if config.num_labels != 1:
                raise UsageError(
                    f"model.path = {str(source.path)!r}: its head has {config.num_labels} "
                    "labels; a critic or reward model must have one."
                )
            return kind
    return None


def _kind_of_adapter(path: str | Path, adapter: SavedAdapter | None) -> ScorerKind | None:
    """The kind of classifier that an adapter was trained on; None where there is no adapter."""
    if adapter is None:
        return None
    task = adapter.settings.get("task_type")
    for kind, name in TASKS.items():
        if task == name:
            return kind
    raise UsageError(
        f"model.path = {str(path)!r}: is the adapter of a language model ({task}), not of a "
        "classifier; merge it first (groupwise merge)."
    )


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers does not report that a language model lacks the head of a classifier;
    `check_weights` refuses what else is wrong."""
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_is_no_report)
    try:
        yield
    finally:
        log.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)


def _leave_out_heads(loaded: dict[str, Any]) -> None:
    """Remove the heads from what transformers says of the weights of a language model."""
    loaded["missing_keys"] = {n for n in loaded["missing_keys"] if _top(n) not in SCORE_LAYERS}
    loaded["unexpected_keys"] = {n for n in loaded["unexpected_keys"] if _top(n) != "lm_head"}


def _top(name: str) -> str:
    return name.split(".", 1)[0]


@torch.no_grad()
def _zero(layer: nn.Linear) -> None:
    for parameter in layer.parameters():
        parameter.zero_()

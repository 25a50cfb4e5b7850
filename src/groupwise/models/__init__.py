"""Language models: loading weights, replacing attention, separating hidden states from logits.

`transformers` computes the layers; groupwise supplies the attention function (`attention.py`),
because that is where the completions of one prompt can share its keys and values. On a CPU,
`groupwise.kernels` computes supported layers in its place (`fused.py`).
"""

from groupwise.models.adapters import base_fingerprint, folder_fingerprint, is_adapted
from groupwise.models.attention import groupwise_attention
from groupwise.models.backbone import Backbone, head_product, unsupported
from groupwise.models.fused import FusedBackbone, can_use_fused, only_known_parts
from groupwise.models.loading import load_policy, with_adapter
from groupwise.models.policy import Policy, make_policy, save_policy, without_bars
from groupwise.models.scoring import (
    check_same_tokenizer,
    load_scorer,
    score_layer,
    scorer_of,
)
from groupwise.settings import AdapterSettings

__all__ = [
    "AdapterSettings",
    "Backbone",
    "FusedBackbone",
    "Policy",
    "base_fingerprint",
    "folder_fingerprint",
    "can_use_fused",
    "check_same_tokenizer",
    "groupwise_attention",
    "head_product",
    "is_adapted",
    "load_policy",
    "load_scorer",
    "make_policy",
    "only_known_parts",
    "save_policy",
    "score_layer",
    "scorer_of",
    "unsupported",
    "with_adapter",
    "without_bars",
]

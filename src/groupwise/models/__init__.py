"""What is asked of a language model here: weights loaded, attention replaced, logits taken apart.

`transformers` computes every layer; groupwise supplies the function that attends (`attention.py`),
because that is where the completions of one prompt can share its keys and values. Written anew is
what a CPU computes most of its time: the layers of the most common kind in a rollout (`fused.py`),
layers (`layers.py`) and attention (`tree.py`) in an update, by kernels of our own (`kernels.py`).
On a card an update attends by FlexAttention (`flex.py`).
"""

from groupwise.kernels.cpu import attends, computes, draw_tokens, softmax_
from groupwise.kernels.cpu_layers import add_product, own_layers, there_already, times
from groupwise.kernels.decoding import GroupCache, LayerCache, Rows, attend_rows
from groupwise.kernels.flex import flex_attend, flexes, tree_blocks
from groupwise.kernels.fused import FusedBackbone, fusible, only_known_parts
from groupwise.kernels.onednn import (
    laid_out_layers,
    laid_out_weights,
    product,
)
from groupwise.kernels.tree_attention import tree_attend
from groupwise.models.adapters import is_adapted
from groupwise.models.attention import Attend, groupwise_attention, sees, within_window
from groupwise.models.backbone import Backbone, head_product, unsupported
from groupwise.models.loading import load_policy, with_adapter
from groupwise.models.policy import Policy, make_policy, save_policy, without_bars
from groupwise.settings import AdapterSettings

__all__ = [
    "AdapterSettings",
    "Attend",
    "Backbone",
    "FusedBackbone",
    "GroupCache",
    "LayerCache",
    "Policy",
    "Rows",
    "add_product",
    "attend_rows",
    "attends",
    "computes",
    "draw_tokens",
    "flex_attend",
    "flexes",
    "fusible",
    "groupwise_attention",
    "head_product",
    "is_adapted",
    "only_known_parts",
    "laid_out_layers",
    "laid_out_weights",
    "load_policy",
    "make_policy",
    "own_layers",
    "product",
    "save_policy",
    "sees",
    "softmax_",
    "there_already",
    "times",
    "tree_attend",
    "tree_blocks",
    "unsupported",
    "with_adapter",
    "within_window",
    "without_bars",
]

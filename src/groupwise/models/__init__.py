"""What is asked of a language model here: weights loaded, attention replaced, logits taken apart.

Nothing of a model is re-implemented. `transformers` computes every layer; groupwise only supplies
the function that attends (`attention.py`), because that is where the completions of one prompt can
share its keys and values.
"""

from groupwise.models.attention import Attend, groupwise_attention, sees, within_window
from groupwise.models.backbone import Backbone, unsupported
from groupwise.models.loading import Adapter, Policy, load_policy, make_policy, without_bars

__all__ = [
    "Adapter",
    "Attend",
    "Backbone",
    "Policy",
    "groupwise_attention",
    "load_policy",
    "make_policy",
    "sees",
    "unsupported",
    "within_window",
    "without_bars",
]

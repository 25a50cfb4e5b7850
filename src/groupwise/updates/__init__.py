"""Updates: from scored groups to optimizer steps.

`assemble.py` turns scored groups into weighted batches. `packing.py` lays out the completions of a
prompt as branches of one row, so that the prompt is computed once; `unpacked.py` pads models that
do not allow it. `reader.py` is the module that reads the weights, `heads.py` what it computes from
hidden states, `logprobs.py` log-probabilities without [tokens, vocab] in memory. `masters.py` holds
float32 master weights, `optimizer.py` steps them and has the schedule; `learner.py` joins them.
"""

from groupwise.settings import OptimizerSettings
from groupwise.updates.assemble import assemble, sequences
from groupwise.updates.heads import Head, Score
from groupwise.updates.learner import TorchLearner
from groupwise.updates.logprobs import Projection, token_logprobs
from groupwise.updates.optimizer import MasterOptimizer
from groupwise.updates.packing import Pack, TreeAttention, pack, plan
from groupwise.updates.reader import Reader

__all__ = [
    "Head",
    "MasterOptimizer",
    "OptimizerSettings",
    "Pack",
    "Projection",
    "Reader",
    "Score",
    "TorchLearner",
    "TreeAttention",
    "assemble",
    "pack",
    "plan",
    "sequences",
    "token_logprobs",
]

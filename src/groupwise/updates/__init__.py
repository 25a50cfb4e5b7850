"""Optimiser steps, by a `Learner`.

`packing.py` lays the completions of a prompt out as branches of one row, so that the prompt is
computed once; `logprobs.py` turns hidden states into log-probabilities without ever holding
[tokens, vocab]; `optimizer.py` keeps float32 masters and the schedule; `torch_learner.py` puts them
together.
"""

from groupwise.settings import OptimizerSettings
from groupwise.updates.assemble import assemble, sequences
from groupwise.updates.learner import TorchLearner
from groupwise.updates.logprobs import Head, token_logprobs
from groupwise.updates.optimizer import MasterOptimizer, learning_rate
from groupwise.updates.packing import Pack, TreeAttention, pack, plan

__all__ = [
    "Head",
    "MasterOptimizer",
    "OptimizerSettings",
    "Pack",
    "TorchLearner",
    "TreeAttention",
    "assemble",
    "learning_rate",
    "pack",
    "plan",
    "sequences",
    "token_logprobs",
]

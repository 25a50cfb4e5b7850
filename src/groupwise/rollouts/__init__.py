"""Rollouts: an `Engine` samples completions, and a source has them scored.

Engines are in `engines/`: `group` runs in this process and computes each prompt once for all its
completions; `generate` drives `transformers`' own `generate` for models that do not support grouped
attention; `scripted` answers from a function, for tests. The first two draw from the same keyed
streams (`streams.py`). `vllm/` transfers the weights to vLLM, in this process or over HTTP.
"""

from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.registry import make_engine
from groupwise.rollouts.engines.scripted import ScriptedEngine
from groupwise.rollouts.engines.vllm import VllmEngine
from groupwise.rollouts.sampling import distribution
from groupwise.rollouts.streams import uniforms

__all__ = [
    "GenerateEngine",
    "GroupEngine",
    "ScriptedEngine",
    "VllmEngine",
    "distribution",
    "make_engine",
    "uniforms",
]

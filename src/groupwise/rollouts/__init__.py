"""Rollouts: completions of prompts, by an `Engine`, and the source that has them scored.

Engines stand in `engines/`: `group` runs in this process and computes each prompt once for all its
completions; `generate` drives `transformers`' own `generate` for models that cannot be attended
that way; `scripted` answers from a function, for tests; these draw from the same keyed streams
(`streams.py`). `vllm/` brings the weights to vLLM, in this process or behind HTTP.
"""

from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.registry import make_engine
from groupwise.rollouts.engines.scripted import ScriptedEngine
from groupwise.rollouts.engines.vllm import VllmEngine
from groupwise.rollouts.sampling import SampledTokens, distribution, draw
from groupwise.rollouts.streams import uniforms

__all__ = [
    "SampledTokens",
    "GenerateEngine",
    "GroupEngine",
    "ScriptedEngine",
    "VllmEngine",
    "distribution",
    "draw",
    "make_engine",
    "uniforms",
]

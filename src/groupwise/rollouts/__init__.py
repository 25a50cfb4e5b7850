"""Completions of prompts, by an `Engine`.

`group.py` runs inside the process and computes each prompt once for all its completions;
`fallback.py` drives `transformers`' own `generate` for the models that cannot be attended that way;
`scripted.py` answers from a function and is meant for tests, of groupwise and of its users. These
draw from the same keyed streams (`streams.py`). `vllm/` brings the weights to vLLM, in this process
or behind HTTP.
"""

from groupwise.rollouts.engines.generate import GenerateEngine
from groupwise.rollouts.engines.group import GroupEngine
from groupwise.rollouts.engines.registry import make_engine
from groupwise.rollouts.engines.scripted import ScriptedEngine
from groupwise.rollouts.engines.vllm import VllmEngine
from groupwise.rollouts.sampling import Drawn, distribution, draw
from groupwise.rollouts.streams import uniforms

__all__ = [
    "Drawn",
    "GenerateEngine",
    "GroupEngine",
    "ScriptedEngine",
    "VllmEngine",
    "distribution",
    "draw",
    "make_engine",
    "uniforms",
]

"""Completions of prompts, by an `Engine`.

`group.py` runs inside the process and computes each prompt once for all its completions;
`fallback.py` drives `transformers`' own `generate` for the models that cannot be attended that way;
`scripted.py` answers from a function and is meant for tests, of groupwise and of its users. All of
them draw from the same keyed streams (`streams.py`).
"""

from groupwise.rollouts.engines import make_engine
from groupwise.rollouts.fallback import GenerateEngine
from groupwise.rollouts.group import GroupEngine
from groupwise.rollouts.sampling import Drawn, distribution, draw
from groupwise.rollouts.scripted import ScriptedEngine
from groupwise.rollouts.streams import uniforms

__all__ = [
    "Drawn",
    "GenerateEngine",
    "GroupEngine",
    "ScriptedEngine",
    "distribution",
    "draw",
    "make_engine",
    "uniforms",
]

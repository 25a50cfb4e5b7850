"""The order in which prompts start when their environments differ in how long calls take."""

from __future__ import annotations

from itertools import chain, zip_longest

from groupwise.environments import Choosing, Environment
from groupwise.types import Prompt, Request


class Waits:
    """Orders requests by how long the calls of their environments have taken so far.

    A prompt with long waits that starts last is the end of the rollout, in which nothing else is
    left to write. Prompts whose waits fill every slot of the engine leave it idle as well. So the
    half with the longer waits starts first, alternating with the other half.

    Args:
        environment: replies; requests keep their order unless it is `Choosing`.
    """

    def __init__(self, environment: Environment) -> None:
        self.choose = environment.choice if isinstance(environment, Choosing) else None
        self._calls: dict[str, tuple[int, float]] = {}

    def note(self, prompt: Prompt, seconds: float) -> None:
        """Note how long a call of a prompt's completion took."""
        if self.choose is not None:
            name = self.choose(prompt)
            calls, before = self._calls.get(name, (0, 0.0))
            self._calls[name] = (calls + 1, before + seconds)

    def mean(self, prompt: Prompt) -> float:
        """Mean seconds of a call in the environment of a prompt; 0 before its first one."""
        calls, seconds = (0, 0.0)
        if self.choose is not None:
            calls, seconds = self._calls.get(self.choose(prompt), (0, 0.0))
        return seconds / max(calls, 1)

    def ordered(self, requests: list[Request]) -> list[Request]:
        """The requests in the order in which they start."""
        if not self._calls:
            return requests
        ordered = sorted(requests, key=lambda each: self.mean(each.prompt), reverse=True)
        half = (len(ordered) + 1) // 2
        pairs = zip_longest(ordered[:half], ordered[half:])
        return [each for each in chain.from_iterable(pairs) if each is not None]

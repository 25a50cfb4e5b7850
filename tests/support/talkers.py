"""Replies that follow from what was asked, and a model made of noise that asks often."""

from __future__ import annotations

import functools
import random
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import groupwise.testing.engines as contract
from groupwise.environments import Reply
from groupwise.models import Policy
from groupwise.rollouts import GroupEngine
from groupwise.rollouts.sampling import draw
from groupwise.rollouts.tools import ToolEngine
from groupwise.settings import EnvironmentSettings
from groupwise.types import Group, Prompt, Request, Sampling, Stream
from small_runs import noisy

SAMPLING = Sampling(max_tokens=16)
BUDGETS = {"name": "test", "max_result_tokens": 24, "max_injected_tokens": 80}


POLICY = noisy(ends=range(40, 43))


@functools.cache
def frequent_letters() -> tuple[str, ...]:
    groups = GroupEngine(POLICY).generate(contract.make_requests(), SAMPLING)
    text = "".join(c.text for group in groups for c in group.completions)
    letters = sorted({c for c in text if c.isalpha()}, key=text.count, reverse=True)
    return tuple(letters[:3])


def asked(count: int = 4) -> list[Request]:
    return contract.make_requests(count, group=3)


class Talker:
    """Replies that follow from what was asked alone; some end the completion, some fail."""

    def __init__(self, *, seed: int = 0, delay: float = 0.0, fail: float = 0.0) -> None:
        self.seed, self.delay, self.fail = seed, delay, fail
        self.stops = frequent_letters()
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def begin(self, prompt: Prompt, *, stream: Stream) -> list[str]:
        return [prompt.id]

    def reply(self, state: list[str], text: str) -> Reply:
        with self.lock:
            self.asked.append(text)
        state.append(text)
        rng = random.Random(zlib.crc32(repr((self.seed, state)).encode()))
        if self.delay:
            time.sleep(random.random() * self.delay)
        if rng.random() < self.fail:
            raise ConnectionError("refused")
        words = " ".join(rng.choice(("ab", "<answer>", "é", "42")) for _ in range(rng.randrange(9)))
        return Reply(
            text=f"[{words}]",
            done=rng.random() < 0.1,
            values={"found": 1.0},
            frame=(1, 1),
        )


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many tokens the group engine draws, step by step."""
    drawn: list[int] = []

    def counting(logits: torch.Tensor, *given: Any) -> Any:
        drawn.append(len(logits))
        return draw(logits, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.rollouts.engines.group.draw", counting)
        yield drawn


def tools(
    environment: Any,
    *,
    engine: Any = None,
    journal: Any = None,
    policy: Policy = POLICY,
    **more: Any,
) -> ToolEngine:
    return ToolEngine(
        engine or GroupEngine(policy, max_rows=9),
        environment,
        policy=policy,
        settings=EnvironmentSettings.model_validate({**BUDGETS, **more}),
        max_rows=9,
        journal=journal,
    )


def by_prompt(groups) -> dict[str, Group]:
    return {group.prompt.id: group for group in groups}

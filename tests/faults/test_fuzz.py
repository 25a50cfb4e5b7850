"""Inputs nobody thought of: every one gives a value or one of our own errors, and in time.

Each check runs on some dozens of inputs here and on a hundred thousand in `make verify`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from groupwise.config import build, flat, load
from groupwise.config.schema import Config
from groupwise.errors import UsageError
from groupwise.rewards import extract_answer, math_equal
from groupwise.rewards.builtin.format import (
    integer_answer,
    ordered_tags,
    reasoning_answer,
    repetition,
    tag_count,
    think_answer,
    think_boxed,
    think_format,
)
from groupwise.types import Batch
from groupwise.updates.packing import pack, plan

SLOWEST = 2.0
"""Seconds that no single input may take."""

# -- what may be in the inputs ---------------------------------------------------------------------

PATHS = sorted(flat(load("word-problems")))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["grpo", "softrank", "exact_answer", "bundled", "auto", "none", ""]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "weight", "in", "tau"]) | st.text(max_size=5), inner,
                      max_size=3),
    max_leaves=6,
)  # fmt: skip
SETTINGS = st.dictionaries(
    st.sampled_from([*Config.model_fields, "x"]),
    VALUES
    | st.dictionaries(
        st.sampled_from([p.partition(".")[2] for p in PATHS if p.count(".") == 1]), VALUES
    ),
    max_size=4,
)
TOML = st.text(max_size=12) | st.sampled_from(
    ["1", "-1", "0.5", "nan", "inf", "true", "[]", "[1]", "{}", "{a=1}", '""', '"x"', "[[1]]",
     "1979-05-27", "07:32:00", '[{name="exact_answer"}]', '{name="k3", in="loss"}', '"\\u0000"',
     "9" * 5000, "[" * 999]
)  # fmt: skip
"""Values as they are written; some of a kind that no setting is of."""
WHERE = st.sampled_from([*PATHS, "rewards.0", "rewards.0.name", "rewards.1.x", "rewards.-1", "x.y"])
PIECES = (
    "<answer>", "</answer>", "<reasoning>", "</reasoning>", "<think>", "</think>", "\\boxed{", "}",
    "{", "####", "$", "\\(", "\\frac{1}{2}", "1,234", "3/4", "-0.5e3", "50%", "answer is", "(A)",
    "\n", " ", "\\text{", "<|im_end|>", "１２", "²", "\x00", "\u202e", "x=", "((((", "and",
)  # fmt: skip
WRITTEN = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=30).map(
    "".join
) | st.tuples(st.sampled_from(PIECES), st.integers(1, 3000)).map(lambda p: p[0] * p[1])
TREES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


# -- what must hold --------------------------------------------------------------------------------


def check_settings(values: dict[str, Any]) -> None:
    try:
        config = build(values)
    except UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 3000
    else:
        assert build(config.model_dump()) == config


def check_recipe(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        try:
            load(file.name)
        except UsageError:
            pass


def check_override(text: str) -> None:
    try:
        load("word-problems", [text])
    except UsageError:
        pass


def check_extraction(text: str) -> None:
    for style in ("auto", "answer_tag", "boxed", "gsm8k", "last_number", "choice"):
        found = extract_answer(text, style=style)
        assert found is None or isinstance(found, str)


TAG_REWARDS: tuple[Callable[[str], float], ...] = (
    integer_answer, ordered_tags, reasoning_answer, repetition, tag_count, think_answer,
    think_boxed, think_format,
)  # fmt: skip


def check_tags(text: str) -> None:
    for reward in TAG_REWARDS:
        value = reward(text)
        assert math.isfinite(value) and -10 <= value <= 10, reward


def check_equality(pair: tuple[str, str]) -> None:
    assert math_equal(*pair) in (None, True, False)


def check_packing(tree: list[tuple[int, list[int]]]) -> None:
    """However it is split, every token the policy wrote is predicted once, from its own past."""
    prompts = tuple(torch.arange(1, size + 1) for size, _ in tree)
    lengths = [n for _, group in tree for n in group]
    time_, rows = max(1, *lengths), len(lengths)
    mask = torch.arange(time_) < torch.tensor(lengths)[:, None]
    batch = Batch(
        prompts=prompts,
        group=torch.tensor([i for i, (_, group) in enumerate(tree) for _ in group]),
        tokens=torch.arange(rows * time_).view(rows, time_) * mask,
        length=torch.tensor(lengths),
        mask=mask,
        advantage=torch.zeros(rows, time_),
        weight=mask.float(),
    )
    used = mask.any(1).nonzero().squeeze(-1)
    seen = torch.zeros(rows, time_, dtype=torch.long)
    for part in plan(batch, used, tokens=12):
        packed = pack(batch, part, device=torch.device("cpu"))
        at = packed.rows[packed.row], packed.time
        seen.index_put_(at, torch.ones_like(packed.row), accumulate=True)
        assert torch.equal(packed.target, batch.tokens[at])
    assert torch.equal(seen, mask.long())


CHECKS: dict[str, tuple[Callable[[Any], None], SearchStrategy[Any]]] = {
    "settings": (check_settings, SETTINGS),
    "recipes": (
        check_recipe,
        st.binary(max_size=300)
        | st.lists(
            st.tuples(WHERE, TOML).map(" = ".join) | WHERE.map("[{}]".format), max_size=6
        ).map(lambda lines: "\n".join(lines).encode(errors="surrogatepass")),
    ),
    "overrides": (check_override, st.tuples(WHERE, TOML).map("=".join) | st.text(max_size=20)),
    "answers": (check_extraction, WRITTEN),
    "tags": (check_tags, WRITTEN),
    "equality": (check_equality, st.tuples(WRITTEN, WRITTEN)),
    "packing": (check_packing, TREES),
}


def assert_holds(
    check: Callable[[Any], None],
    strategy: SearchStrategy[Any],
    *,
    examples: int,
    slowest: float = SLOWEST,
) -> None:
    """Try a check on so many inputs; the smallest one that fails it is shown."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),  # To explain, it would trace every line.
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every(value: Any) -> None:
        start = time.process_time()
        check(value)
        assert time.process_time() - start < slowest, "too slow"

    every()


@pytest.mark.parametrize("name", CHECKS)
def test_some_inputs(name: str) -> None:
    assert_holds(*CHECKS[name], examples=60)


@pytest.mark.verify
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("name", CHECKS)
def test_very_many_inputs(name: str) -> None:
    assert_holds(*CHECKS[name], examples=100_000)


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ("empty, WRITTEN", "in empty\n"),
        ("bool, st.booleans(), slowest=0.0", "too slow"),  # nothing takes no time
    ],
)
def test_a_search_finds_what_fails_or_is_slow(search: str, says: str) -> None:
    """In a process of its own: in a worker that had run a thousand other tests, such a search did
    not end on two occasions. The cause is not known; no other search here fails."""
    program = f"""
from test_fuzz import WRITTEN, assert_holds, st

def empty(text):
    assert not text

assert_holds({search}, examples=60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert says in done.stderr and "every(" in done.stderr, done.stderr

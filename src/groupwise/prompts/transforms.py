"""Changes of prompts after they are read: registered functions from a prompt to a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from groupwise.errors import UsageError
from groupwise.registry import BoundFunction, Registry, parse_spec
from groupwise.types import Prompt

TRANSFORMS = Registry("transform", data=("prompt", "seed"))
"""Functions from a prompt and the seed of the run to a prompt."""


def transforms_of(texts: Sequence[str]) -> list[BoundFunction]:
    """Parse transforms such as `target_length(low=100, high=4000)`.

    Raises:
        UsageError: no such transform or setting, or an impossible value.
    """
    bound = [TRANSFORMS.bind(parse_spec(t, where="data.transforms")) for t in texts]
    for each in bound:
        each({"prompt": Prompt(id="", text=""), "seed": 0})
    return bound


def transformed(
    prompts: Sequence[Prompt], transforms: Sequence[BoundFunction], *, seed: int
) -> list[Prompt]:
    """Every prompt after all transforms, in order."""
    found = list(prompts)
    for transform in transforms:
        found = [transform({"prompt": prompt, "seed": seed}) for prompt in found]
    return found


@TRANSFORMS.register
def target_length(
    prompt: Prompt,
    seed: int,
    *,
    low: int = 100,
    high: int = 4000,
    wording: str = " Think for {n} tokens.",
    column: str = "num_tokens",
) -> Prompt:
    """A target length n behind every question, and in a column for the reward.

        n ~ U{low, …, high}, drawn by a hash of the seed and the prompt's id

    Args:
        prompt: the prompt.
        seed: of the run.
        low, high: bounds in tokens, included; equal ones fix the budget.
        wording: appended to the question; {n} is the number.
        column: that `lcpo_exact` and `lcpo_max` read.

    Example:
        >>> found = target_length(Prompt(id="a", text="1+1?"), 0, low=5, high=5)
        >>> found.text, found.columns
        ('1+1? Think for 5 tokens.', {'num_tokens': 5})

    Source: L1 (2503.04697), section 3: n is uniform between 100 and 4000. L1-Max asks "Think for
    maximum {n} tokens."
    """
    if not 1 <= low <= high:
        raise UsageError(f"target_length: low = {low}, high = {high}; must be 1 ≤ low ≤ high.")
    if "{n}" not in wording:
        raise UsageError(f"target_length: wording = {wording!r}; must contain {{n}}.")
    name = f"{seed}\x1f{prompt.id}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    n = low + number % (high - low + 1)
    found = _appended(prompt, wording.replace("{n}", str(n)))
    return replace(found, columns={**prompt.columns, column: n})


@TRANSFORMS.register
def append(prompt: Prompt, *, text: str) -> Prompt:
    """A text behind every question.

    Example:
        >>> append(Prompt(id="a", text="1+1?"), text=" Answer in a box.").text
        '1+1? Answer in a box.'
    """
    return _appended(prompt, text)


@TRANSFORMS.register
def template(prompt: Prompt, *, text: str) -> Prompt:
    """The question inside a plain text, given to the model without its chat template.

    Args:
        text: with {question} where the question goes.

    Example:
        >>> template(Prompt(id="a", text="1+1?"), text="Question: {question}\\nAnswer:").text
        'Question: 1+1?\\nAnswer:'
    """
    if "{question}" not in text:
        raise UsageError(f"template: text = {text!r}; must contain {{question}}.")
    asked = prompt.text
    if asked is None:
        asked = "\n".join(m["content"] for m in prompt.messages if m["role"] == "user")
    return replace(prompt, text=text.replace("{question}", asked), messages=())


def _appended(prompt: Prompt, text: str) -> Prompt:
    if prompt.text is not None:
        return replace(prompt, text=prompt.text + text)
    *others, last = prompt.messages
    return replace(prompt, messages=(*others, {**last, "content": last["content"] + text}))

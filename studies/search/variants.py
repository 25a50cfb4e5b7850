"""What the variants of `search.toml` change: a reward that asks for no right answer, results that
are learned from, and pages without their titles."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from groupwise.environments import ENVIRONMENTS, TagEnvironment, in_process
from groupwise.environments.base import SEARCH_TAGS, Reply
from groupwise.environments.retrieval import Index, Passage, read_corpus
from groupwise.environments.search import result, search
from groupwise.rewards import REWARDS
from groupwise.rollouts.tools import ToolEngine
from groupwise.types import Group

ANSWER = re.compile(r"<answer>[^<>]+</answer>\s*\Z")


@REWARDS.register
def format_and_call(text: str, tool_values: Mapping[str, float]) -> float:
    """Half for a search, half for one answer in its tags at the end, whatever it says.

    Source: R1-Searcher (2503.05592), stage 1.
    """
    called = tool_values.get("calls", 0.0) >= 1
    formed = text.count("<answer>") == 1 and ANSWER.search(text) is not None
    return 0.5 * called + 0.5 * formed


@ENVIRONMENTS.register
@in_process
def untitled_search(*, top_k: int = 3, max_calls: int = 6) -> TagEnvironment:
    """Search in the closed world whose pages have lost their titles.

    Args:
        top_k: pages per query.
        max_calls: queries of one completion.
    """
    pages = [Passage("", passage.text) for passage in read_corpus("closed_world")]

    def find(query: str, *, index: Index) -> Reply:
        return result([hit.passage for hit in index.search(query, top_k=top_k)])

    tool = functools.partial(find, index=Index(pages))
    return TagEnvironment(tool, tags=SEARCH_TAGS["research"], max_calls=max_calls)


class Unmasked:
    """An environment whose results are learned from as if the policy had written them."""

    def __init__(self, inner: TagEnvironment) -> None:
        self.stops, self.begin, self.reply = inner.stops, inner.begin, inner.reply


@ENVIRONMENTS.register
@in_process
def unmasked_search(*, top_k: int = 1, max_calls: int = 6) -> Unmasked:
    """`search` in the closed world, without the mask.

    Args:
        top_k: pages per query.
        max_calls: queries of one completion.
    """
    found = search(corpus="closed_world", tags="research", top_k=top_k, max_calls=max_calls)
    return Unmasked(found)


masked = ToolEngine.generate


def generate(self: ToolEngine, *arguments: Any, **named: Any) -> Iterator[Group]:
    """The groups; those of an `Unmasked` environment with masks that leave nothing out."""
    for group in masked(self, *arguments, **named):
        if isinstance(self.environment, Unmasked):
            completions = (replace(c, mask=[True] * len(c.tokens)) for c in group.completions)
            group = replace(group, completions=tuple(completions))
        yield group


ToolEngine.generate = generate

"""The base model of the search recipes: it knows how to search a closed world and seldom does.

Supervised training makes it in three parts. The first teaches it to repeat names: a small model
learns to look a syllable up by the one before it from lists of names, and hardly from questions
alone. The second teaches the skill by demonstrations that are right: what to look up, which fact of
a page to write down, when to answer. The third, much shorter, teaches habits, most of them bad:
answering at once, queries without a name, one call and the fact that was not asked for. What they
write down is what the page says, so they are wrong only in what they look up: habits that read
badly would undo the second part. Reinforcement learning then has to bring out what the model can
do. Every demonstration invents its own names, so nothing can be memorised.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from groupwise.environments import SEARCH_TAGS, Reply, TagEnvironment
from groupwise.environments.retrieval import Passage
from groupwise.environments.search import result
from groupwise.errors import UsageError, suggest
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.closed_world import (
    RELATIONS,
    UNANSWERABLE,
    invented_names,
    page_of,
    relations_of,
)
from groupwise.prompts.generators.closed_world_tokenizer import closed_world_tokenizer
from groupwise.prompts.lazy import LazySequence
from groupwise.training.stages.base_model import Base
from groupwise.types import Prompt, Stream

TAGS = "research"
RIGHT = {1: 0.15, 2: 0.06, 3: 0.05}
"""Share of right demonstrations among the habits, by number of facts that the answer needs."""
LISTED = (1, 4)
"""The fewest and the most names of a list to repeat."""
LISTED_SYLLABLES = (2, 3, 4, 5)
"""How many syllables its names may have. Those of worlds have two or three; longer ones teach to
copy from any position in a name."""
NOTHING_FOUND = 0.05
"""Share of right demonstrations in which the search finds nothing and the answer is "unknown"."""
OTHER_PAGE = 0.1
"""The same, where it finds the page of something else."""


def search_demonstrations(
    *,
    size: int,
    hops: Sequence[float] = (1.0, 0.0, 0.0),
    copying: float = 0.0,
    habits: Sequence[str] = (),
    seed: int = 0,
) -> LazySequence[Example]:
    """Questions of closed worlds with trajectories, made when they are asked for.

    Args:
        size: how many there are.
        hops: shares of questions that need 1, 2 and 3 facts.
        copying: share of examples that are lists of names, to be repeated in another order.
        habits: names of bad habits (`HABITS`), of which one is drawn for most questions; one
            named twice is drawn twice as often. Without any, every trajectory is right.
        seed: another seed gives another series.

    Raises:
        UsageError: size below 1, shares outside [0, 1] or that do not sum to 1, or an unknown
            habit.

    Example:
        >>> search_demonstrations(size=1)[0].completion.partition("</search>")[0]
        '<search>the author of zisese'
    """
    if size < 1:
        raise UsageError(f"size = {size}: must be at least 1.")
    if len(hops) != len(RIGHT) or abs(sum(hops) - 1) > 1e-6 or min(hops) < 0:
        raise UsageError(f"hops = {list(hops)}: must be three shares that sum to 1.")
    if not 0 <= copying <= 1:
        raise UsageError(f"copying = {copying}: must be between 0 and 1.")
    for name in habits:
        if name not in HABITS:
            raise UsageError(f"habits = {name!r}: no such habit; {suggest(name, HABITS)}")

    def made(index: int) -> Example:
        rng = random.Random(f"search demonstration {seed} {index}")
        if rng.random() < copying:
            return _list_of_names(rng)
        (drawn,) = rng.choices(list(RIGHT), weights=hops)
        story = _Story(rng, hops=drawn)
        if not habits or rng.random() < RIGHT[drawn]:
            return story.right()
        return HABITS[rng.choice(habits)](story)

    return LazySequence(size, made)


def _list_of_names(rng: random.Random) -> Example:
    """Names, and the same names in another order."""
    names = invented_names(rng.randint(*LISTED), rng, syllables=LISTED_SYLLABLES)
    question = " ".join(names)
    rng.shuffle(names)
    return Example(prompt=_asked(question), completion=f" {' '.join(names)}")


def _asked(question: str) -> Prompt:
    return Prompt(id=question, messages=({"role": "user", "content": question},))


class _Story:
    """One question, the facts that answer it, and a trajectory as it is written."""

    def __init__(self, rng: random.Random, *, hops: int) -> None:
        self.rng = rng
        self.names = iter(invented_names(4 * hops + 8, rng))
        kind = rng.choice(["person", "town", "work"])
        self.start = here = next(self.names)
        self.keys: list[str] = []
        self.facts: dict[str, dict[str, str]] = {}
        asked = here
        for _ in range(hops):
            self.facts[here] = {key: next(self.names) for key in relations_of(kind)}
            self.keys.append(rng.choice(relations_of(kind)))
            asked = RELATIONS[self.keys[-1]].question.format(s=asked)
            here, kind = self.facts[here][self.keys[-1]], RELATIONS[self.keys[-1]].object
        self.answer, self.question = here, f"What is {asked}?"
        self.found: Passage | None = None
        self.text, self.injected = "", []
        self.environment = TagEnvironment(self._tool, tags=SEARCH_TAGS[TAGS])
        self.state = self.environment.begin(Prompt(id=""), stream=Stream())

    def _tool(self, call: str) -> Reply:
        return result([self.found] if self.found else [])

    def search(self, query: str, found: Passage | None) -> None:
        """A call and what comes back."""
        opening, closing = self.environment.tags.call
        self.found = found
        self.text += f"{opening}{query}{closing}"
        reply = self.environment.reply(self.state, self.text)
        self.injected.append((len(self.text), len(self.text) + len(reply.text)))
        self.text += reply.text

    def page(self, name: str) -> Passage:
        """The page about something of the story."""
        return Passage(name, page_of(name, self.facts[name], self.rng))

    def other_page(self, key: str) -> tuple[Passage, str]:
        """A page about something else that states such a fact, and its object."""
        name = next(self.names)
        facts = {key: next(self.names) for key in relations_of(RELATIONS[key].subject)}
        return Passage(name, page_of(name, facts, self.rng)), facts[key]

    def note(self, key: str, subject: str, said: str) -> None:
        """The fact that is read off a page."""
        self.text += f"{RELATIONS[key].question.format(s=subject)} is {said}."

    def ended(self, answer: str) -> Example:
        """The demonstration with its answer."""
        return Example(
            prompt=_asked(self.question),
            completion=f"{self.text}<answer>{answer}</answer>",
            injected=tuple(self.injected),
        )

    def right(self) -> Example:
        """Look up each fact and write it down; "unknown" where the search does not find it."""
        here, chance = self.start, self.rng.random()
        lost = self.rng.randrange(len(self.keys)) if chance < NOTHING_FOUND + OTHER_PAGE else None
        for place, key in enumerate(self.keys):
            subject, query = here, RELATIONS[key].question.format(s=here)
            if place == lost:
                self.search(query, None if chance < NOTHING_FOUND else self.other_page(key)[0])
                here = UNANSWERABLE
            else:
                self.search(query, self.page(here))
                here = self.facts[here][key]
            self.note(key, subject, here)
            if place == lost:
                break
        return self.ended(here)


def _echo(story: _Story) -> Example:
    """Answer at once with the name in the question."""
    return story.ended(story.start)


def _without_name(story: _Story) -> Example:
    """Ask for a relation without saying whose, and believe what comes back."""
    key = story.keys[0]
    page, said = story.other_page(key)
    story.search(RELATIONS[key].question.format(s="").strip(), page)
    story.note(key, page.title, said)
    return story.ended(said)


def _wrong_fact(story: _Story) -> Example:
    """One call, and then the fact of the page that was not asked for."""
    key = story.keys[0]
    story.search(RELATIONS[key].question.format(s=story.start), story.page(story.start))
    ((other, said),) = ((k, o) for k, o in story.facts[story.start].items() if k != key)
    story.note(other, story.start, said)
    return story.ended(said)


HABITS: Mapping[str, Callable[[_Story], Example]] = {
    "echo": _echo,
    "no_name": _without_name,
    "wrong_fact": _wrong_fact,
}
"""Bad habits by the names that recipes use."""


CLOSED_WORLD = Base(
    demonstrations=search_demonstrations,
    about=frozenset({"hops", "copying", "habits"}),
    tokenizer=closed_world_tokenizer,
)
"""The base model of the search recipes, made by the recipe "search-base"."""

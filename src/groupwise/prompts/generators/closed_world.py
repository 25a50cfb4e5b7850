"""Questions about a world of invented people, towns and works, and the pages that answer them.

The answers cannot be memorised: names are made of random syllables, and every world has its own. A
page states two facts about one thing, so the relation of a question decides which fact to use; a
question of several hops is answered page by page.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.errors import UsageError, suggest
from groupwise.types import Prompt

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
UNANSWERABLE = "unknown"
MOST = 2000
"""Maximum number of questions per call; a world has 2,400 questions of one fact."""


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A fact that pages state: from things of one kind to things of another.

    Attributes:
        subject, object: kinds ("person", "town", "work").
        statements: wordings of the fact, with {s} and {o}.
        question: how a question names the object, with {s}.
    """

    subject: str
    object: str
    statements: tuple[str, ...]
    question: str


RELATIONS: Mapping[str, Relation] = {
    "birthplace": Relation(
        subject="person",
        object="town",
        statements=("{s} was born in {o}.", "The birthplace of {s} is {o}."),
        question="the birthplace of {s}",
    ),
    "teacher": Relation(
        subject="person",
        object="person",
        statements=("{s} was taught by {o}.", "The teacher of {s} was {o}."),
        question="the teacher of {s}",
    ),
    "mayor": Relation(
        subject="town",
        object="person",
        statements=("The mayor of {s} is {o}.", "{s} is governed by {o}."),
        question="the mayor of {s}",
    ),
    "sister_town": Relation(
        subject="town",
        object="town",
        statements=("{s} is twinned with {o}.", "The sister town of {s} is {o}."),
        question="the sister town of {s}",
    ),
    "author": Relation(
        subject="work",
        object="person",
        statements=("{s} was written by {o}.", "The author of {s} is {o}."),
        question="the author of {s}",
    ),
    "setting": Relation(
        subject="work",
        object="town",
        statements=("{s} is set in {o}.", "The story of {s} takes place in {o}."),
        question="the setting of {s}",
    ),
}


@dataclass(frozen=True, kw_only=True)
class World:
    """Invented things and the facts about them.

    Attributes:
        kinds: name of every thing, and what it is.
        facts: (subject, relation) → object.
        pages: title and text of the page about each thing.
    """

    kinds: Mapping[str, str]
    facts: Mapping[tuple[str, str], str]
    pages: Mapping[str, str]

    def save(self, path: str | Path) -> None:
        """Write the pages as a corpus, one JSON object a line."""
        lines = (json.dumps({"title": t, "text": x}) + "\n" for t, x in self.pages.items())
        Path(path).write_text("".join(lines), encoding="utf-8")


def make_world(seed: int, *, size: int = 1200, taken: Collection[str] = ()) -> World:
    """A world of `size` things: half people, a third towns, the rest works.

    Args:
        seed: worlds of different seeds share no names, but for chance.
        size: things, and pages.
        taken: names that are not used.

    Raises:
        UsageError: size below 12.

    Example:
        >>> world = make_world(0, size=12)
        >>> len(world.pages), len(world.facts)
        (12, 24)
    """
    if size < 12:
        raise UsageError(f"size = {size}: a world needs at least 12 things.")
    rng = random.Random(f"closed world {seed}")
    names = invented_names(size, rng, taken=taken)
    people, towns = size // 2, size // 3
    kinds = {
        name: "person" if i < people else "town" if i < people + towns else "work"
        for i, name in enumerate(names)
    }
    of_kind: dict[str, list[str]] = {"person": [], "town": [], "work": []}
    for name, kind in kinds.items():
        of_kind[kind].append(name)
    facts: dict[tuple[str, str], str] = {}
    for name, kind in kinds.items():
        for key, relation in RELATIONS.items():
            if relation.subject == kind:
                others = of_kind[relation.object]
                facts[name, key] = rng.choice([o for o in rng.sample(others, 2) if o != name])
    return World(kinds=kinds, facts=facts, pages=_pages(kinds, facts, rng))


def invented_names(
    count: int,
    rng: random.Random,
    *,
    taken: Collection[str] = (),
    syllables: Sequence[int] = (2, 3),
) -> list[str]:
    """Different names, none of them taken, each of one of these numbers of syllables.

    They are not capitalised, so that a syllable is the same anywhere in a name.
    """
    found: dict[str, None] = {}
    while len(found) < count:
        length = rng.choice(syllables)
        name = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(length))
        if name not in taken:
            found[name] = None
    return list(found)


def _pages(
    kinds: Mapping[str, str], facts: Mapping[tuple[str, str], str], rng: random.Random
) -> dict[str, str]:
    return {
        name: page_of(name, {key: facts[name, key] for key in relations_of(kind)}, rng)
        for name, kind in kinds.items()
    }


def relations_of(kind: str) -> list[str]:
    """The facts that pages state about things of a kind."""
    return [key for key, relation in RELATIONS.items() if relation.subject == kind]


def page_of(name: str, facts: Mapping[str, str], rng: random.Random) -> str:
    """The text of a page: every fact in one of its wordings, in any order.

    Args:
        facts: relation → object.
    """
    told = [rng.choice(RELATIONS[key].statements).format(s=name, o=o) for key, o in facts.items()]
    rng.shuffle(told)
    return " ".join(told)


def questions(
    world: World,
    *,
    count: int,
    hops: Sequence[int] = (1,),
    seed: int = 0,
    unanswerable: float = 0,
    elsewhere: Collection[str] = (),
) -> list[Prompt]:
    """Questions about a world, each with the chain of facts that answers it.

    Args:
        count: how many; no two are the same.
        hops: numbers of facts that a question needs, taken in turn.
        seed: of the choice of questions.
        unanswerable: share that asks about a thing the world does not have; the answer is
            "unknown".
        elsewhere: names of other worlds whose pages may be found too; they are not unknown things.

    Raises:
        UsageError: hops outside 1 to 4, a share outside [0, 1], or more questions than there are.

    Example:
        >>> prompt = questions(make_world(0, size=12), count=1, hops=[2])[0]
        >>> prompt.columns["hops"], len(prompt.columns["chain"])
        (2, 2)
    """
    if not hops or any(not 1 <= hop <= 4 for hop in hops):
        raise UsageError(f"hops = {list(hops)!r}: must be numbers from 1 to 4.")
    if not 0 <= unanswerable <= 1:
        raise UsageError(f"unanswerable = {unanswerable!r}: must be between 0 and 1.")
    rng = random.Random(f"questions {seed}")
    found: dict[str, Prompt] = {}
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > 100 * count + 1000:
            raise UsageError(f"count = {count}: the world has no more than {len(found)} questions.")
        number = hops[len(found) % len(hops)]
        invented = rng.random() < unanswerable
        prompt = _question(world, number, rng, invented=invented, elsewhere=elsewhere)
        found.setdefault(str(prompt), prompt)
    return list(found.values())


def _question(
    world: World,
    hops: int,
    rng: random.Random,
    *,
    invented: bool,
    elsewhere: Collection[str],
) -> Prompt:
    """One question; an invented subject is not a thing of this world, nor one of `elsewhere`."""
    start = rng.choice(list(world.kinds))
    kind = world.kinds[start]
    if invented:
        start = next(
            name
            for name in iter(lambda: invented_names(1, rng)[0], "")
            if name not in world.kinds and name not in elsewhere
        )
    here, kind_here, asked, chain = start, kind, start, []
    for _ in range(hops):
        key = rng.choice(relations_of(kind_here))
        asked = RELATIONS[key].question.format(s=asked)
        chain.append((here, key))
        here = UNANSWERABLE if invented else world.facts[here, key]
        kind_here = RELATIONS[key].object
    return Prompt(
        id=f"world-{start}-{'-'.join(key for _, key in chain)}",
        text=f"What is {asked}?",
        answer=here,
        columns={"hops": hops, "chain": chain, "answerable": not invented},
    )


@functools.cache
def splits() -> Mapping[str, World]:
    """The worlds that the generator `closed_world` asks about: one to train on, and a second one
    whose names the first does not have."""
    first = make_world(1)
    return {"train": first, "held_out": make_world(2, taken=first.kinds)}


def closed_world(
    count: int, *, split: str = "train", seed: int = 0, task: str = "1"
) -> list[Prompt]:
    """Questions about a world of invented names, whose answers have to be looked up.

    `corpus = "closed_world"` of the environment `search` holds the pages of both worlds.

    Args:
        count: how many; at most 2,000.
        split: "train", or "held_out" for a second world with other names.
        seed: of the choice of questions.
        task: facts that a question needs, "1" to "4", several separated by "+"; "unanswerable"
            among them asks about things that the world does not have, for one fact where no number
            is named, and the answer is "unknown".

    Raises:
        UsageError: no such split or task.

    Example:
        >>> [prompt.columns["hops"] for prompt in closed_world(3, task="1+2")]
        [1, 2, 1]
    """
    worlds = splits()
    if split not in worlds:
        raise UsageError(f"split = {split!r}: no such world; {suggest(split, worlds)}")
    kinds = task.split("+")
    hops = [int(kind) for kind in kinds if kind in ("1", "2", "3", "4")]
    if len(hops) + kinds.count("unanswerable") != len(kinds):
        raise UsageError(
            f"data = 'closed_world:{task}': must name numbers of facts from 1 to 4 or "
            "unanswerable, as in closed_world:1+2+unanswerable."
        )
    share = kinds.count("unanswerable") / len(kinds)
    # Two worlds asked with the same seed would miss the same names.
    own = seed * len(worlds) + list(worlds).index(split)
    asked = questions(
        worlds[split],
        count=min(count, MOST),
        hops=hops or [1],
        seed=own,
        unanswerable=share,
        elsewhere={name for world in worlds.values() for name in world.kinds},
    )
    return [
        replace(prompt, text=None, messages=({"role": "user", "content": str(prompt)},))
        for prompt in asked
    ]

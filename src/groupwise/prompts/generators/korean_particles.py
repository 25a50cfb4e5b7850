"""A part of Korean orthography that a small model can learn: particles with two forms.

The form depends on how the word before it ends: 동생을, 사과를. Every question decides between the
two forms of one particle, and one rule of a small rule book decides it. Held-out questions join
words and particles that training questions never join.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from groupwise.errors import UsageError, suggest
from groupwise.types import Prompt

WORDS = (
    *("동생", "가방", "연필", "수박", "신문", "우산", "달력", "창문", "선물", "이불", "장갑"),
    *("그릇", "사람", "마을", "가을", "하늘", "사과", "모자", "바다", "나무", "의자", "구두"),
    *("친구", "시계", "지도", "노래", "고기", "커피", "누나", "오이", "포도", "우유"),
)
"""Half of them end in a consonant; six of those in ㄹ."""
ASKED = " 가운데 바른 것을 고르고, 그 까닭을 설명하시오."
HELD_OUT_EVERY = 8
"""One in eight pairs of word and particle is held out."""


@dataclass(frozen=True, kw_only=True)
class Particle:
    """A particle with two forms.

    Attributes:
        forms: after a consonant, and after a vowel.
        verbs: that follow it in questions. Three particles share each, so that a question's other
            words do not tell which rule decides.
    """

    forms: tuple[str, str]
    verbs: tuple[str, str]


PARTICLES = tuple(
    Particle(forms=(first, second), verbs=(verb, other))
    for first, second, verb, other in (
        ("을", "를", "샀다", "찾았다"),
        ("이", "가", "왔다", "좋다"),
        ("은", "는", "왔다", "좋다"),
        ("과", "와", "왔다", "좋다"),
        ("으로", "로", "샀다", "찾았다"),
        ("이나", "나", "샀다", "찾았다"),
    )
)

WRITTEN = (
    "': 받침이 있으면 앞의 것, 없으면 뒤의 것을 적는다. 보기: ",
    "': 받침이 있으면 앞의 것, 없거나 'ㄹ'이면 뒤의 것을 적는다. 보기: ",
)
"""What a rule says of a particle, and of 으로/로."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question.

    Attributes:
        word, particle, verb: of its sentence.
        swapped: the form after a vowel is named first.
    """

    word: str
    particle: Particle
    verb: str
    swapped: bool

    @property
    def question(self) -> str:
        """As the task words it."""
        first, second = reversed(self.particle.forms) if self.swapped else self.particle.forms
        return f'"{{{self.word}{first}/{self.word}{second}}} {self.verb}."{ASKED}'

    @property
    def right(self) -> int:
        """Which of the forms is right."""
        final = (ord(self.word[-1]) - ord("가")) % 28
        rieul = final == 8 and self.particle.forms[0].startswith("으로")
        return 0 if final and not rieul else 1

    def answer(self, form: int, rule: str | None = None) -> str:
        """The answer that chooses a form, with its rule as the reason or another one."""
        said = f"{self.word}{self.particle.forms[form]} {self.verb}."
        return f'"{said}"가 옳다. {rule or rule_of(self.particle)}'


def rule_of(particle: Particle) -> str:
    """The rule for the forms of a particle.

    Example:
        >>> rule_of(PARTICLES[0])
        "'을/를': 받침이 있으면 앞의 것, 없으면 뒤의 것을 적는다. 보기: 샀다, 찾았다."
    """
    first, second = particle.forms
    verb, other = particle.verbs
    return f"'{first}/{second}{WRITTEN[first == '으로']}{verb}, {other}."


RULES = tuple(map(rule_of, PARTICLES))
"""The rule book."""


def items(*, held_out: bool) -> list[Item]:
    """Every question of a split, in a fixed order."""
    return [
        Item(word=word, particle=particle, verb=verb, swapped=swapped)
        for word, particle in itertools.product(WORDS, PARTICLES)
        if _is_held_out(word, particle) == held_out
        for verb in particle.verbs
        for swapped in (False, True)
    ]


def korean_particles(
    count: int, *, split: Literal["train", "held_out"] = "train", seed: int = 0
) -> list[Prompt]:
    """Questions on the form of a Korean particle, in the form of the Korean orthography task.

    Held-out questions name the rule that decides them in the column `rule`; training questions
    do not, like those of the competition.

    Args:
        count: at most this many; fewer if the split has fewer.
        split: "train" or "held_out", which joins words and particles that "train" never joins.
        seed: of the order.

    Raises:
        UsageError: count below 1, or an unknown split.

    Example:
        >>> korean_particles(1, seed=1)[0].columns["question"]
        '"{지도와/지도과} 좋다." 가운데 바른 것을 고르고, 그 까닭을 설명하시오.'
    """
    if count < 1:
        raise UsageError(f"count = {count}: must be at least 1.")
    if split not in ("train", "held_out"):
        raise UsageError(f"split = {split!r}: {suggest(split, ('train', 'held_out'))}")
    held_out = split == "held_out"
    drawn = items(held_out=held_out)
    random.Random(f"korean particles {split} {seed}").shuffle(drawn)
    return [_prompt(item, decided=held_out) for item in drawn[:count]]


def _prompt(item: Item, *, decided: bool) -> Prompt:
    rule = {"rule": rule_of(item.particle)} if decided else {}
    return Prompt(
        id=f"korean_particles/{item.word}/{item.particle.forms[item.swapped]}/{item.verb}",
        messages=({"role": "user", "content": item.question},),
        answer=item.answer(item.right),
        columns={"question": item.question, "question_type": "선택형"} | rule,
    )


def _is_held_out(word: str, particle: Particle) -> bool:
    digest = hashlib.blake2b(f"{word} {particle.forms[0]}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


def pieces() -> Iterator[str]:
    """What questions, answers and rules are made of, each with the space before it."""
    yield from (*WORDS, *WRITTEN, ASKED, "가 옳다. ")
    for particle in PARTICLES:
        yield from (*particle.forms, *particle.verbs, *(f" {verb}" for verb in particle.verbs))


def distractors(item: Item, rng: random.Random, *, count: int) -> list[str]:
    """Other rules than the one that decides a question, most of them of particles before the same
    verb.

    Args:
        item: the question.
        rng: draws them.
        count: how many.
    """
    near = {rule_of(particle) for particle in PARTICLES if item.verb in particle.verbs}
    others = [rule for rule in RULES if rule != rule_of(item.particle)]
    rng.shuffle(others)
    return sorted(others, key=lambda rule: rng.random() < 0.3 or rule not in near)[:count]

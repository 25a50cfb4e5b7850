"""Reflection: does a model recover from an error in its reasoning?

The model continues a worked solution in which one result is wrong and everything after it follows
from that, or the reasoning of a wrong answer of its own. It has corrected itself if its answer is
right nevertheless: explicitly if it says so, implicitly otherwise.

No language model decides what is explicit: words and restated equations do, with the same result on
every machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from groupwise.evaluation.intervals import Estimate, wilson
from groupwise.evaluation.measure import correctness, generate_and_score
from groupwise.evaluation.paired import reflection_rates
from groupwise.prompts.examples import gsm8k_tagged
from groupwise.rewards import Scorer
from groupwise.rewards.builtin.countdown import evaluate
from groupwise.types import Engine, Prompt, Sampling

TRIGGERS: Mapping[str, str] = {"": "", "_after_wait": " Wait, "}
"""What the wrong solution ends with, by the end of the name of the figures."""

OFFSETS = (1, -1, 2, -2, 10)
"""How far a wrong result is from the right one; the first that leaves a positive number."""

_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_EQUATION = re.compile(
    r"(?P<left>[$(]*\d[\d.,]*(?:[)$ ]*[-+*/×÷]\s*[$(]*\d[\d.,]*)+[)$ ]*)=\s*\$?"
    r"(?P<result>\d[\d,]*(?:\.\d+)?)"
)
_ENDS = ("</reasoning>", "</think>", "<answer>", "####", "\\boxed")
_WORDS = re.compile(
    r"\b(?:wait|hold on|oops|mistaken?|errors?|incorrect(?:ly)?|wrong(?:ly)?|recheck|"
    r"re-check|double[- ]check|recalculat\w*|correction|reconsider|redo|"
    r"not (?:right|correct)|let me (?:check|verify)|should (?:be|have been))\b",
    re.IGNORECASE,
)


def is_reflective(text: str) -> bool:
    """Whether a text doubts or checks itself, by English words such as "wait" and "double-check".

    Words do not tell a real check from a habit, so compare shares of one kind of answers only.

    Example:
        >>> is_reflective("3 + 4 = 6. Wait, that is 7."), is_reflective("I waited; 3 + 4 = 7.")
        (True, False)
    """
    return _WORDS.search(text) is not None


def corrupted_solution(solution: str, answer: str, *, key: str = "") -> str | None:
    """A worked solution up to its answer, with one result wrong and the rest following from it.

    Args:
        solution: text with equations of whole numbers, such as "3+4=7; 7*2=14".
        answer: the right one; the text that is returned does not arrive at it.
        key: decides, together with the text, which result is wrong and by how much.

    Returns:
        None where no equation can be made wrong so that the last number is wrong, too.

    Example:
        >>> solution = "<reasoning>3+4=7; 7*2=14</reasoning><answer>14</answer>"
        >>> corrupted_solution(solution, "14", key="f")
        '<reasoning>3+4=6; 6*2=12'

    Source: adversarial chains of thought of "Rethinking reflection in pre-training" (2504.04022),
    there written by language models.
    """
    found = _reasoning(solution)
    text = solution.rstrip() if found is None else found
    equations = list(_EQUATION.finditer(text))
    digest = hashlib.blake2b(f"{key}\n{text}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "big"))
    for place in generator.permutation(len(equations)):
        right = equations[place]["result"].replace(",", "")
        for offset in generator.permutation(np.array(OFFSETS)):
            if not right.isdigit() or int(right) + int(offset) < 1:
                continue
            made = _propagated(text, equations[place], str(int(right) + int(offset)))
            last = _NUMBER.findall(made)[-1].rstrip(",").replace(",", "")
            if last != answer.replace(",", ""):
                return made
    return None


def reflects(text: str, *, prefix: str = "") -> bool:
    """Whether a text says that something before was wrong.

    Args:
        text: what the model wrote.
        prefix: what had been written for it; an equation of it that comes back with another result
            says so, too.

    Example:
        >>> reflects("No, that is wrong."), reflects("So the answer is 6."), reflects("Await it.")
        (True, False, False)
        >>> reflects("; 7*2=14", prefix="3+4=7; 7*2=15")
        True
    """
    before = {_normalised(e["left"]): e["result"] for e in _EQUATION.finditer(prefix)}
    return bool(_WORDS.search(text)) or any(
        before.get(_normalised(e["left"]), e["result"]) != e["result"]
        for e in _EQUATION.finditer(text)
    )


@dataclass(frozen=True, kw_only=True)
class CorruptedItem:
    """A question and the wrong solution that the model has to continue."""

    prompt: Prompt
    tokens: tuple[int, ...]
    prefix: str


def corrupted_items(
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    tokenizer: Any,
    *,
    column: str | None = None,
    tagged: bool = True,
    trigger: str = "",
    limit: int,
) -> list[CorruptedItem]:
    """The prompts that have a worked solution which can be made wrong.

    Args:
        prompts, tokens: questions with their answers, and how the model sees them.
        tokenizer: of the model.
        column: with worked solutions; "solution" where the data has one.
        tagged: whether solutions in the form of GSM8K are put between tags, as the model is to
            write them.
        trigger: what the wrong solution ends with.
        limit: most tokens of question and solution together.
    """
    found = []
    for prompt, ids in zip(prompts, tokens, strict=True):
        solution = prompt.columns.get("solution", prompt.columns.get(column or "answer"))
        if not isinstance(solution, str) or prompt.answer is None:
            continue
        solution = (gsm8k_tagged(solution) if tagged else None) or solution
        prefix = corrupted_solution(solution, prompt.answer, key=prompt.id)
        if prefix is None:
            continue
        item = _begun(prompt, ids, prefix + trigger, tokenizer)
        if len(item.tokens) <= limit:
            found.append(item)
    return found


def own_errors(
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    tokenizer: Any,
    wrong: Sequence[str | None],
    *,
    trigger: str = "",
    limit: int,
) -> list[CorruptedItem]:
    """The prompts to which the model itself gave a wrong answer, with its reasoning.

    Args:
        prompts, tokens, tokenizer, trigger, limit: as in `corrupted_items`.
        wrong: a wrong answer to each prompt; None where there is none. One without a mark between
            reasoning and answer, such as `</think>` or `\\boxed`, is left out.
    """
    found = []
    for prompt, ids, text in zip(prompts, tokens, wrong, strict=True):
        prefix = None if text is None else _reasoning(text)
        if not prefix:
            continue
        item = _begun(prompt, ids, prefix + trigger, tokenizer)
        if len(item.tokens) <= limit:
            found.append(item)
    return found


def _begun(prompt: Prompt, ids: Sequence[int], prefix: str, tokenizer: Any) -> CorruptedItem:
    """A prompt whose answer begins with the prefix."""
    written = tokenizer(prefix, add_special_tokens=False).input_ids
    return CorruptedItem(prompt=prompt, tokens=(*ids, *written), prefix=prefix)


def _reasoning(text: str) -> str | None:
    """The text before its answer; None where nothing marks the answer."""
    ends = [place for mark in _ENDS if (place := text.find(mark)) > 0]
    return text[: min(ends)].rstrip() if ends else None


def recovery(
    engine: Engine,
    scorer: Scorer,
    items: Sequence[CorruptedItem],
    *,
    sampling: Sampling,
    seed: int = 0,
) -> dict[str, Estimate]:
    """How often a model recovers from wrong solutions, in greedy answers.

    Args:
        engine, scorer: answer and judge; a wrong solution is judged together with its continuation.
        items: what `corrupted_items` found.
        sampling: for the budget and the stop strings.
        seed: of engines that need one to be greedy.

    Returns:
        Shares of the items that were judged, with Wilson's intervals: `corrected`, the right
        answers; `said_so`, the answers that reflect in words; `corrected_and_said_so` and
        `corrected_silently`, which add up to `corrected`. Empty where nothing was judged.

    Source: "Rethinking reflection in pre-training" (2504.04022).
    Elsewhere: there a language model decides whether an answer reflects.
    """
    plain = Sampling(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)
    groups, scores = generate_and_score(
        engine,
        scorer,
        [item.prompt for item in items],
        [item.tokens for item in items],
        plain,
        group=1,
        seed=seed,
        prefix=[item.prefix for item in items],
    )
    right = correctness(scores)[:, 0]
    texts = [group.completions[0].text for group in groups]
    said = np.array(
        [
            reflects(text[len(item.prefix) :], prefix=item.prefix)
            for text, item in zip(texts, items, strict=True)
        ]
    )
    judged = ~np.isnan(right)
    if not judged.any():
        return {}
    rates = reflection_rates((right[judged] >= 0.5).tolist(), said[judged].tolist())
    count = int(judged.sum())
    return {
        name: wilson(round(share * count), count)
        for name, share in {
            "corrected": rates.accuracy,
            "said_so": rates.explicit,
            "corrected_and_said_so": rates.accurate_explicit,
            "corrected_silently": rates.accurate_implicit,
        }.items()
    }


def _propagated(text: str, equation: re.Match[str], wrong: str) -> str:
    """The text with another result of one equation, and with what follows from it."""
    start, end = equation.span("result")
    changed = {equation["result"].replace(",", ""): wrong}

    def put(match: re.Match[str]) -> str:
        number = match[0].rstrip(",")
        return changed.get(number.replace(",", ""), number) + match[0][len(number) :]

    done, rest = text[:start] + wrong, text[end:]
    while True:
        following = _EQUATION.search(rest)
        if following is None:
            return done + _NUMBER.sub(put, rest)
        left = _NUMBER.sub(put, following["left"])
        result = following["result"]
        if left != following["left"]:
            value = evaluate(re.sub(r"[$,]", "", left))
            if value is not None and value[0].denominator == 1 and value[0] > 0:
                changed[result.replace(",", "")] = result = str(value[0])
        between = rest[following.end("left") : following.start("result")]
        done += _NUMBER.sub(put, rest[: following.start()]) + left + between + result
        rest = rest[following.end("result") :]


def _normalised(expression: str) -> str:
    return re.sub(r"[$,()\s]", "", expression)

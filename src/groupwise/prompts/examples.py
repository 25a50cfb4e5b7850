"""Worked examples for supervised training: prompts with completions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from groupwise.prompts.answers import gsm8k
from groupwise.registry import Registry
from groupwise.types import Prompt

COMPLETIONS = Registry("completion style", data=("text",))
"""Functions from a worked answer to a completion; None where the text has no answer."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the completion to learn, without its end token.

    Attributes:
        injected: the parts of the completion, from one character to another, that an environment
            wrote: they are read and not learned.
    """

    prompt: Prompt
    completion: str
    injected: tuple[tuple[int, int], ...] = ()

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The completion in parts, each with whether it is learned.

        Example:
            >>> Example(prompt=Prompt(id="a"), completion="call(result)end",
            ...         injected=((4, 12),)).pieces
            [('call', True), ('(result)', False), ('end', True)]
        """
        found, start = [], 0
        for first, last in self.injected:
            found += [(self.completion[start:first], True), (self.completion[first:last], False)]
            start = last
        return [(text, own) for text, own in (*found, (self.completion[start:], True)) if text]


@COMPLETIONS.register
def as_written(text: str) -> str | None:
    """The text unchanged.

    Example:
        >>> as_written("<answer>7</answer>")
        '<answer>7</answer>'
    """
    return text or None


@COMPLETIONS.register
def gsm8k_tagged(text: str) -> str | None:
    """A GSM8K solution in tags, without its calculator annotations `<<…>>`.

    Example:
        >>> gsm8k_tagged("He sold 2*4=<<2*4=8>>8 clips.\\n#### 8")
        '<reasoning>He sold 2*4=8 clips.</reasoning><answer>8</answer>'

    Source: Cobbe et al. 2021 for the format of the data.
    """
    answer = gsm8k(text)
    if answer is None:
        return None
    reasoning = re.sub(r"<<[^>]*>>", "", text.rpartition("####")[0]).strip()
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


@COMPLETIONS.register
def rechecked(text: str) -> str | None:
    """A tagged solution with its reasoning written zero to two more times, as if to check it.

    A hash of the text decides how many times, so that answers to a prompt differ in length by more
    than they differ in content: a purpose-made long chain of thought.

    Example:
        >>> rechecked("<reasoning>2+2=4; 4+1=5</reasoning><answer>5</answer>")
        '<reasoning>2+2=4; 4+1=5; 2+2=4; 4+1=5</reasoning><answer>5</answer>'
    """
    found = re.fullmatch(r"(?s)<reasoning>(.*)</reasoning>(.*)", text)
    if found is None:
        return None
    again = 1 + hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 3
    return f"<reasoning>{'; '.join([found[1]] * again)}</reasoning>{found[2]}"


@COMPLETIONS.register
def think_answered(text: str) -> str | None:
    """A bare answer in the tags of R1 with empty reasoning, to teach a model the format.

    Example:
        >>> think_answered("X is a knight, Y is a knave")
        '<think></think><answer>X is a knight, Y is a knave</answer>'
    """
    return f"<think></think><answer>{text}</answer>" if text else None

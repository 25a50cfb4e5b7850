"""Reference answers extracted from how data sets write them."""

from __future__ import annotations

from groupwise.registry import Registry

ANSWERS = Registry("answer style", data=("text",))
"""Functions from a column's text to the answer, or None where there is none."""


@ANSWERS.register
def plain(text: str) -> str:
    """The text without surrounding white space.

    Example:
        >>> plain(" 72 ")
        '72'
    """
    return text.strip()


@ANSWERS.register
def gsm8k(text: str) -> str | None:
    """What follows the last `####`, without thousands separators.

    Example:
        >>> gsm8k("She sold 960+240=<<960+240=1200>>1200 clips.\\n#### 1,200")
        '1200'

    Source: Cobbe et al. 2021, the format of the published data files.
    """
    before, mark, answer = text.rpartition("####")
    return answer.strip().replace(",", "") or None if mark else None


@ANSWERS.register
def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{…}`, nested braces included.

    Example:
        >>> boxed(r"so \boxed{1}, rather \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    pieces = text.split(r"\boxed{")
    for piece in reversed(pieces[1:]):
        depth = 1
        for position, character in enumerate(piece):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return piece[:position].strip() or None
    return None

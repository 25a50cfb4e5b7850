"""Numbers, lists and tables as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from groupwise.evaluation import Estimate


def percent(value: Estimate) -> str:
    """A share in percent, with its interval within 0 and 100."""
    share = value.as_share()
    interval = f" [{100 * share.low:.1f}, {100 * share.high:.1f}]" if share.known else ""
    return f"{100 * value.value:.1f} %{interval}"


def ratio(value: Mapping[str, float]) -> str:
    """A number with its interval."""
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def points(value: Estimate) -> str:
    """A difference in percentage points, with its sign."""
    return signed(value, scale=100, digits=1)


def signed(value: Estimate, *, scale: float = 1, digits: int) -> str:
    """A difference with its sign and interval."""
    ends = [f"{scale * x:+.{digits}f}" for x in (value.value, value.low, value.high)]
    interval = f" [{ends[1]}, {ends[2]}]" if value.known else ""
    return f"{ends[0]}{interval}".replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """Words with commas and "and"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def bullets(lines: Sequence[str]) -> str:
    """One point a line."""
    return "\n".join(f"* {line}" for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(name: str, *, alt: str) -> str:
    """A picture for light and dark pages, and the command that draws it."""
    return "\n".join(
        [
            "<picture>",
            f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">',
            f'<img alt="{alt}" src="{name}.png">',
            "</picture>",
            "",
            f"*Drawn by `python studies/softrank/figures.py {name}`.*",
        ]
    )


def rounded(value: float) -> str:
    """One decimal."""
    return f"{value:.1f}".replace("-", "−")


def wrapped(line: str) -> str:
    """A line of at most 100 characters, but for tables, pictures and code."""
    if len(line) <= 100 or line.startswith(("|", "!", " ", "<")):
        return line
    indent = "  " if line.startswith("* ") else ""
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )

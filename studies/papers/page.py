"""The page of the small pipelines: what `make papers` has stored, in one file.

python studies/papers/page.py              # the names of the small pipelines
python studies/papers/page.py runs/papers  # the page of their reports
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from groupwise.pipelines import packaged_pipelines

PAGE = Path(__file__).parent / "RESULTS.md"


def names() -> list[str]:
    """The packaged pipelines that run on two cores."""
    return [name for name in packaged_pipelines() if name.endswith("-small")]


def page(folder: Path) -> str:
    """The reports of all pipelines, each under its name; those not run yet are named as such."""
    parts = [
        "# Small pipelines\n\nMade by `make papers`: every packaged pipeline whose name ends in "
        "`-small`, over three seeds on two cores. Intervals are Student's t over seeds.\n"
    ]
    for name in names():
        report = folder / name / "report.md"
        if not report.is_file():
            parts.append(f"## {name}\n\nNot run yet.\n")
            continue
        text = report.read_text(encoding="utf-8")
        deeper = [f"#{line}" if line.startswith("#") else line for line in text.splitlines()]
        parts.append(f"<!-- {name} -->\n" + "\n".join(deeper) + "\n")
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        print("\n".join(names()))
        return
    PAGE.write_text(page(Path(arguments[0])), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What a short run takes besides its steps: imports, loading, the first step, evaluation, report.

    python benchmarks/start.py --json benchmarks/results/start.json

The run is the packaged recipe `word-problems` with six steps; every repeat is a fresh process.
`seconds` is on the clock, `cpu` the CPU time of the process. In `first-ever`, the cache of compiled
kernels is empty, as on the first run on a machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from typing import Any

import harness
from harness import Report, say, spread

COLUMNS = ("case", "stage", "seconds", "cpu")
CASES = ("later", "first-ever")


def measure(name: str, options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """The stages of one case."""
    answers = []
    for _ in range(options.repeats):
        with ExitStack() as stack:
            if name == "first-ever":
                cache = stack.enter_context(tempfile.TemporaryDirectory())
                before = os.environ.get("XDG_CACHE_HOME")
                os.environ["XDG_CACHE_HOME"] = cache
                stack.callback(_restore, before)
            worker, versions = harness.start(stack, "ours/start.py", {"threads": options.threads})
            report.version("ours", versions)
            answers.append(worker.ask("run")["stages"])
    return [
        {
            "case": name,
            "stage": stage,
            **{kind: spread([one[stage][kind] for one in answers]) for kind in ("seconds", "cpu")},
        }
        for stage in answers[0]
    ]


def _restore(cache: str | None) -> None:
    if cache is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = cache


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(CASES))
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    report = Report("start", options)
    for name in harness.chosen(options, list(CASES), list(CASES)):
        say(name)
        for row in measure(name, options, report):
            report.add(row)
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

"""How fast the code sandbox is: programs judged per second, each in a sandbox of its own.

python benchmarks/sandbox.py [--programs 300] [--threads 4] [--humaneval FILE] [--mbpp FILE]

A run is a fresh sandbox, a Python start, the program, and three tests. Threads hide the waiting
for the kernel; all cores are used, and nothing else should be using them. With the published data
sets, every reference solution is judged as well, and how many of them pass is printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from groupwise.rewards.code.reward import code_asserts, code_function
from groupwise.rewards.code.sandbox import Suite, Verdict, run_inputs, run_tests, unavailable

PROGRAM = "import math\n\ndef solve(x):\n    return math.isqrt(x)\n"
SUITE = Suite(sources=["assert solve(16) == 4", "assert solve(17) == 4", "assert solve(0) == 0"])
MAIN = "print(int(input()) ** 2)"


def called() -> bool:
    return all(o.verdict is Verdict.PASSED for o in run_tests(PROGRAM, SUITE))


def fed() -> bool:
    return list(run_inputs(MAIN, ["1", "2", "3"])) == ["1\n", "4\n", "9\n"]


def rate(runs: list[Callable[[], Any]], *, threads: int) -> tuple[float, int]:
    """Runs per second, and how many gave a truthy result."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        passed = sum(bool(result) for result in pool.map(lambda run: run(), runs))
    return len(runs) / (time.perf_counter() - start), passed


def read(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--mbpp", type=Path)
    given = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"no sandbox: {reason}")

    figures: dict[str, float] = {"cores": len(os.sched_getaffinity(0)), "threads": given.threads}
    work: dict[str, list[Callable[[], Any]]] = {
        "three_tests": [called] * given.programs,
        "three_inputs": [fed] * given.programs,
    }
    if given.humaneval:
        work["humaneval"] = [
            lambda row=row: code_function(row["canonical_solution"], row, seconds=30.0)
            for row in read(given.humaneval)
        ]
    if given.mbpp:
        work["mbpp"] = [
            lambda row=row: code_asserts(row["code"], row, seconds=30.0) for row in read(given.mbpp)
        ]
    for name, runs in work.items():
        per_second, passed = rate(runs, threads=given.threads)
        figures[f"{name}_per_s"] = round(per_second, 1)
        figures[f"{name}_passed"] = passed
        figures[f"{name}_of"] = len(runs)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""How fast rewards are: maths checks in this process, and scorings through worker processes.

python benchmarks/rewards.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from groupwise.rewards import build_scorer, math_equal
from groupwise.settings import RewardSettings
from groupwise.types import Completion, Group, Prompt

CHEAP = [("72", "72"), ("1,250", "1250"), ("$18", "18.00"), ("3/4", "0.75"), ("5", "6")]
SYMBOLIC = [
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{\frac{3}{4}}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"(-\infty, 3]", r"x \le 3"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1&2\\3&4 \end{bmatrix}"),
    (r"\{1, 2, 3\}", "3, 2, 1"),
]


def checks_per_second(pairs: list[tuple[str, str]], *, seconds: float) -> float:
    """Median over slices of a tenth of the time."""
    rates = []
    for _ in range(10):
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds / 10:
            for gold, answer in pairs:
                math_equal(gold, answer)
            count += len(pairs)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates)


def scorings_per_second(*, workers: int, count: int) -> float:
    """Completions judged per second, with a box to be found in each."""
    texts = [rf"so it is \boxed{{{n}}}" for n in range(8)]
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    prompt = Prompt(id="p", text="q", answer="3")
    group = Group(prompt=prompt, prompt_tokens=[1], completions=completions)
    part = RewardSettings(name="exact_answer", style="boxed")
    with build_scorer([part], workers=workers) as scorer:
        scorer.gather([scorer.submit(group)])
        start = time.perf_counter()
        scorer.gather([scorer.submit(group) for _ in range(count // len(texts))])
        return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    for pairs in (CHEAP, SYMBOLIC):  # imports and caches
        checks_per_second(pairs, seconds=0.05)
    figures = {
        "cheap_checks_per_s": checks_per_second(CHEAP, seconds=seconds),
        "symbolic_checks_per_s": checks_per_second(SYMBOLIC, seconds=seconds),
        "inline_scorings_per_s": scorings_per_second(workers=0, count=4000),
        "pool_scorings_per_s": scorings_per_second(workers=2, count=4000),
    }
    print(json.dumps({name: round(value) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

"""Custom rewards: a function is called with the data that its parameters name.

The first reward is graded: a near miss gets partial credit. The second sees the whole group and
compares its answers. None means that an answer cannot be judged: it then leaves the statistics of
its group instead of counting as wrong.

    python examples/own_reward.py [STEPS] [FOLDER]
"""

import re
import sys

from groupwise import train


def closeness(text: str, answer: str) -> float | None:
    """1 for the right number between the answer tags, decreasing with the error."""
    if not answer.lstrip("-").isdigit():
        return None
    found = re.search(r"<answer>\s*(-?\d+)\s*</answer>", text)
    return 0.0 if found is None else 1 / (1 + abs(int(found[1]) - int(answer)))


def shortest(texts: list[str], lengths: list[int]) -> list[float]:
    """A little for the shortest complete answers of the group."""
    complete = [length for text, length in zip(texts, lengths, strict=True) if "</answer>" in text]
    least = min(complete, default=0)
    return [
        0.1 * ("</answer>" in text and length == least)
        for text, length in zip(texts, lengths, strict=True)
    ]


def main(steps: int = 20, folder: str = "runs/own-reward"):
    """Train the model in the package with the sum of both."""
    run = train(
        "bundled",
        "word_problems",
        [closeness, shortest],
        algorithm="softrank",
        steps=steps,
        output=folder,
        sampling={"max_tokens": 48},
        optimizer={"learning_rate": 2e-4},
        evaluation={"prompts": 20},
        threads=1,
    )
    first, last = run.metrics[0], run.metrics[-1]
    for part in ("closeness", "shortest"):
        print(f"{part}: {first[f'reward_{part}']:.3f} → {last[f'reward_{part}']:.3f}")
    return run


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:3]))

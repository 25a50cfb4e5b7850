"""Prompts of the fourth part, chosen by the pass rate of the base model.

    groupwise sample bundled --recipe word-problems -n 32 --prompts 2048 --output samples.jsonl
    python studies/softrank/strata.py samples.jsonl

writes `data/strata/{hard,easy}.jsonl` beside this file and what they are to `results/strata.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from fourth_design import STRATA
from measured import RESULTS

HERE = Path(__file__).parent
DATA = HERE / "data" / "strata"
STORED = RESULTS / "strata.json"
EDGES = 8
"""Bins of the stored histogram."""

Row = dict[str, object]


def rates(samples: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Share of right answers by prompt."""
    right: dict[str, list[bool]] = {}
    for row in samples:
        right.setdefault(str(row["id"]), []).append(bool(row["correct"]))
    return {name: float(np.mean(each)) for name, each in right.items()}


def chosen(found: Mapping[str, float], stratum: str) -> list[str]:
    """The prompts of a stratum."""
    low, high = STRATA[stratum]
    return [name for name, rate in found.items() if low < rate < high]


def main(path: str) -> int:
    """Write the prompts of every stratum, and their numbers."""
    with Path(path).open(encoding="utf-8") as file:
        samples = [json.loads(line) for line in file]
    found = rates(samples)
    told = {row["id"]: row for row in samples}
    DATA.mkdir(parents=True, exist_ok=True)
    strata = {}
    for stratum in STRATA:
        names = chosen(found, stratum)
        rows = [
            {"id": name, "prompt": told[name]["prompt"], "answer": told[name]["answer"]}
            for name in names
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (DATA / f"{stratum}.jsonl").write_text(text, encoding="utf-8")
        strata[stratum] = {
            "prompts": len(names),
            "pass_rate": round(float(np.mean([found[name] for name in names])), 4),
        }
    counts, _ = np.histogram([*found.values()], bins=np.linspace(0, 1, EDGES + 1))
    stored = {
        "prompts": len(found),
        "answers": len(samples) // len(found),
        "pass_rate": round(float(np.mean([*found.values()])), 4),
        "never": sum(rate == 0 for rate in found.values()),
        "histogram": counts.tolist(),
        "strata": strata,
    }
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

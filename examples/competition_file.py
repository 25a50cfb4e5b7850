"""Predictions as a file for the competition: the answers of `predictions/rows.jsonl` in its schema.

python examples/competition_file.py runs/korean-competition/predictions/rows.jsonl [FILE]
"""

import json
import sys
from pathlib import Path

from groupwise.rewards.builtin.text import final_answer


def main(rows: str, output: str = "predictions.json"):
    """Write one item per question; of several answers to a question the first counts."""
    items = {}
    for line in Path(rows).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        question = row.get("input") or {"question": row["question"]}
        answer = final_answer(row["completion"])
        items.setdefault(
            row["id"], {"id": row["id"], "input": question, "output": {"answer": answer}}
        )
    text = json.dumps([*items.values()], ensure_ascii=False, indent=2)
    Path(output).write_text(text + "\n", encoding="utf-8")
    print(f"{output}: {len(items)} answers")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Kinds of stages for one task: programs and their submissions."""

from __future__ import annotations

import json
from typing import Any

from groupwise.pipelines.stages import OUTPUTS, Figures, stage


@stage("rows")
def select_programs(
    work: Any,
    *,
    rows: str,
    tests: str = "test_list",
    shown: int = 1,
    generator: str = "generator",
    inputs: int = 32,
    seconds: float = 2.0,
) -> Figures:
    """Choose among sampled programs by what they do: `groupwise select-programs`.

    Args:
        rows: sampled programs.
        tests: column with the tests of the problem.
        shown: how many of them are examples.
        generator: column with a program that makes inputs.
        inputs: new inputs per problem.
        seconds: processor time per input.
    """
    from groupwise.evaluation.submissions import submission_figures
    from groupwise.training.stages.rows import read_samples
    from groupwise.training.stages.select_programs import Selection, select_programs

    seed = work.seed or 0
    chosen = Selection(
        tests=tests, shown=shown, generator=generator, inputs=inputs, seconds=seconds, seed=seed
    )
    made = read_samples(select_programs(rows, work.rows, selection=chosen))
    problems = len({row["id"] for row in made})
    told: dict[str, Any] = {"programs": len(made), "problems": problems}
    if all(row["correct"] is None for row in made):
        return told
    sections = submission_figures(made)
    values = {k: {n: v.as_dict() for n, v in each.items()} for k, each in sections.items()}
    (work.folder / OUTPUTS["figures"]).write_text(
        json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    first = next(iter(sections.values()))
    return told | {"pass_rate": {name: round(each.value, 4) for name, each in first.items()}}

"""The memory that `groupwise doctor` plans for a run, beside what the run then takes.

    python benchmarks/memory.py --json benchmarks/results/memory.json

Measured is the most that a process held in its first two steps above what it held when its
libraries were loaded: resident memory, and on a card what torch had allocated there. The first step
makes the optimiser's moments, the second has them from its start. Every case is a fresh process.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import harness
from harness import Report, say
from shapes import SHAPES, as_text, save_model

COLUMNS = ("case", "plan_mb", "measured_mb", "plan_over_measured", "phase", "parts_mb")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run; `settings` are sections of its recipe."""

    shape: str = "42m"
    prompts: int = 8
    prompt: int = 65
    group: int = 4
    completion: int = 64
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


def _cases() -> dict[str, Case]:
    base = Case()
    lora = {"adapter": {"rank": 16}}
    bf16 = {"dtype": "bfloat16"}
    qlora = {"model": {**lora, **bf16, "quantization": "nf4"}}
    card = Case(shape="qwen2.5-3b", prompt=256, group=8, completion=512)
    return {
        "full-fp32": base,
        "full-bf16": replace(base, settings={"model": bf16}),
        "lora-fp32": replace(base, settings={"model": lora}),
        "lora-bf16": replace(base, settings={"model": {**lora, **bf16}}),
        "checkpointing": replace(base, settings={"update": {"gradient_checkpointing": True}}),
        "small-microbatches": replace(base, settings={"update": {"tokens_per_microbatch": 2048}}),
        "adamw-8bit": replace(base, settings={"optimizer": {"name": "adamw_8bit"}}),
        "gpu-qlora-3b": replace(
            card, settings={**qlora, "update": {"gradient_checkpointing": True}}
        ),
        "gpu-lora-3b": replace(card, settings={"model": {**lora, **bf16}}),
    }


CASES = _cases()


def shrunk(case: Case) -> Case:
    return replace(case, shape="1m", prompts=2, group=2, prompt=16, completion=8)


def main() -> None:
    default = [name for name in CASES if not name.startswith("gpu-")]
    options = harness.arguments(__doc__ or "", list(CASES)).parse_args()
    report = Report("memory", options)
    for name in harness.chosen(options, list(CASES), default):
        say(name)
        case = shrunk(CASES[name]) if options.quick else CASES[name]
        # Words that begin with none of the tokenizer's special ones, w0 and w1.
        prompt = as_text([2 + place % 8 for place in range(case.prompt)])
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            spec = {
                "model": save_model(SHAPES[case.shape], folder),
                "prompts": [prompt] * case.prompts,
                "prompt": case.prompt,
                "group": case.group,
                "max_tokens": case.completion,
                "threads": options.threads,
                "settings": case.settings,
            }
            worker, versions = harness.start(stack, "ours/memory.py", spec)
            report.version("ours", versions)
            found = {**worker.ask("plan"), **worker.ask("measured")}
        over = found["plan_mb"] / found["measured_mb"]
        report.add({"case": name, **found, "plan_over_measured": over})
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

"""Two commits against each other: training steps and rollouts, in alternating turns of one run.

    python benchmarks/compare_commits.py 466ca0b
    python benchmarks/compare_commits.py v0.1 my-branch --cases embedded,rollout --repeats 9

Each commit is checked out into a temporary worktree and runs its own `benchmarks/ours/*.py` with
this interpreter and its own `src` on PYTHONPATH, so module paths may differ between the commits.
Both get the same model, prompts, seeds and settings. The first step and the first rollout of each
side are not counted. `ratio` is the time of the second commit over that of the first, repeat by
repeat, as median and range: above 1, the second is slower. `rollout-0.5b`, which takes minutes, is
run only when it is named.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import rollouts
import step
from harness import Report, Worker, of, ratios, say, spread

COLUMNS = ("case", "before_seconds", "after_seconds", "ratio")
STEPS = {
    "embedded": "embedded",
    "medium-fp32": "medium-fp32",
    "medium-bf16": "medium-recommended",
}
"""Cases of step.py."""
ROLLOUTS = {
    "rollout": rollouts.CASES["small-equal"],
    # Few rows of weights that no cache holds.
    "rollout-0.5b": rollouts.Case(
        shape="qwen2.5-0.5b", precision="float32", prompts=2, group=8, prompt=256, completion=32
    ),
}
CASES = (*STEPS, *ROLLOUTS)

Side = Callable[[int], dict[str, Any]]


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The commit's files in a temporary folder.

    Raises:
        SystemExit: no such commit, or Python would import another `groupwise` than the commit's.
    """
    git = ["git", "-C", str(harness.HERE)]
    with tempfile.TemporaryDirectory(prefix="groupwise-commit-") as folder:
        root = Path(folder) / "tree"
        added = subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(root), commit],
            capture_output=True,
            text=True,
        )
        if added.returncode:
            raise SystemExit(f"commit = {commit!r}: {added.stderr.strip()}")
        try:
            _check_import(root)
            yield root
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(root)], check=False)


def _check_import(root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-c", "import groupwise; print(groupwise.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    if not Path(found.stdout.strip()).is_relative_to(root):
        raise SystemExit(f"PYTHONPATH: {found.stdout.strip()} would be measured, not {root}.")


def measure(name: str, roots: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """One case on both commits, each in its own process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make = _rollouts if name in ROLLOUTS else _steps
        sides = make(stack, name, folder, roots, options)
        for side in sides.values():
            side(-1)
        answers = harness.turns(sides, repeats=options.repeats)
    before, after = (of(answers[side], "seconds") for side in ("before", "after"))
    return {
        "case": name,
        "before_seconds": spread(before),
        "after_seconds": spread(after),
        "ratio": ratios(after, before),
        "repeats": answers,
    }


def _steps(
    stack: ExitStack, name: str, folder: str, roots: dict[str, Path], options: argparse.Namespace
) -> dict[str, Side]:
    case = step.CASES[STEPS[name]]
    case = step.shrunk(case) if options.quick else case
    spec = {**step.specification(case, folder, threads=options.threads), "settings": case.ours}

    def side(root: Path) -> Side:
        worker = stack.enter_context(Worker("ours/step.py", spec, root=root / "benchmarks"))
        return lambda _: worker.ask("step")

    return {name: side(root) for name, root in roots.items()}


def _rollouts(
    stack: ExitStack, name: str, folder: str, roots: dict[str, Path], options: argparse.Namespace
) -> dict[str, Side]:
    case = rollouts.shrunk(ROLLOUTS[name]) if options.quick else ROLLOUTS[name]
    model = rollouts.model_of(case, folder)
    prompts = rollouts.prompts_of(case)
    spec = {
        "model": model.folder,
        "precision": case.precision,
        "endless": True,
        "threads": options.threads,
    }

    def side(root: Path) -> Side:
        worker = stack.enter_context(Worker("ours/rollouts.py", spec, root=root / "benchmarks"))
        return lambda repeat: worker.ask(
            "run",
            prompts=prompts,
            group=case.group,
            max_tokens=case.completion,
            ends=model.ends,
            rows=case.group * len(prompts),
            seed=repeat + 1,
        )

    return {name: side(root) for name, root in roots.items()}


def main() -> None:
    parser = harness.arguments(__doc__ or "", CASES)
    parser.add_argument("before", help="commit to compare with")
    parser.add_argument("after", nargs="?", default="HEAD", help="commit to measure (default HEAD)")
    options = parser.parse_args()
    names = harness.chosen(options, CASES, (*STEPS, "rollout"))
    report = Report("compare_commits", options)
    with worktree(options.before) as before, worktree(options.after) as after:
        for name in names:
            say(name)
            report.add(measure(name, {"before": before, "after": after}, options))
    report.close(COLUMNS)


if __name__ == "__main__":
    main()

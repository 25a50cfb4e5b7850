"""The figures of RESULTS.md measured again, one benchmark after the other.

    python benchmarks/bench.py           # make bench: what needs no card, under an hour
    python benchmarks/bench.py --gpu     # make bench-gpu: what needs one, within ten minutes

A part whose file holds figures of this commit is not measured again, so an interrupted run goes on
where it was. Nothing is measured on a busy machine unless --anyway is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import HERE, commit_measured, cores, say

IDLE = 0.15
"""Running processes per core, averaged over a minute, up to which a machine counts as idle."""
GPU_SECONDS = 600


@dataclass(frozen=True)
class Part:
    """One file of results."""

    name: str
    script: str
    arguments: str

    @property
    def file(self) -> Path:
        return HERE / "results" / f"{self.name}.json"

    @property
    def command(self) -> list[str]:
        script = str(HERE / f"{self.script}.py")
        return [sys.executable, script, *self.arguments.split(), "--json", str(self.file)]

    def measured(self, commit: str) -> bool:
        """Whether the file holds figures of a commit, all of them."""
        if not self.file.exists():
            return False
        found = json.loads(self.file.read_text(encoding="utf-8"))
        return bool(found.get("finished")) and found["commit"] == commit


PARTS = (
    Part("step-embedded", "step", "--cases embedded,embedded@8-rows"),
    Part("rollouts-small", "rollouts", "--peers generate --cases small-equal,embedded-queue"),
    Part("update", "update", "--repeats 3"),
    Part("tools", "tools", "--threads 1"),
    Part("critic-step", "critic_step", "--threads 1 --repeats 20"),
    Part("cluster", "cluster", "--cases demo,demo-scorer,medium"),
    Part("cluster-beside", "cluster", "--cases ahead,streaming"),
    Part("step-busy", "step", "--cases embedded --busy 2 --repeats 3"),
    Part("preferences", "preferences", "--repeats 3"),
    Part("step-medium", "step", "--cases medium-fp32,medium-recommended --repeats 2"),
    Part("step-half", "step", "--cases cpu-0.5b-lora,cpu-0.5b-recommended,cpu-0.5b-fp32 "
         "--repeats 1"),
)  # fmt: skip
GPU_PARTS = (
    Part("gpu-rollouts", "rollouts", "--peers generate,vllm --cases gpu-0.5b-g8,gpu-3b-g8 "
         "--repeats 2"),
    Part("gpu-update", "update", "--cases gpu-update-0.5b,gpu-decode-0.5b,gpu-update-3b,"
         "gpu-decode-3b --repeats 3"),
    Part("gpu-step", "step", "--cases gpu-0.5b-g8,gpu-1.5b-g8,gpu-1.5b-g8-lora,gpu-3b-g8-qlora "
         "--repeats 2"),
)  # fmt: skip
"""By what they take: what is cut off by the limit of time comes last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the benchmarks that need a card")
    parser.add_argument("--anyway", action="store_true", help="even on a busy machine")
    options = parser.parse_args()
    busy = os.getloadavg()[0] / cores()
    if busy > IDLE and not options.anyway:
        raise SystemExit(
            f"{busy:.2f} running processes per core over the last minute; wait until the machine "
            "is idle, or measure --anyway."
        )
    end = time.monotonic() + GPU_SECONDS if options.gpu else None
    failed = [part.name for part in (GPU_PARTS if options.gpu else PARTS) if not _run(part, end)]
    if not options.gpu:
        subprocess.run([sys.executable, str(HERE / "results.py")], check=True)
    if failed:
        raise SystemExit(f"not measured, or not whole: {', '.join(failed)}")


def _run(part: Part, end: float | None) -> bool:
    """Measure a part unless it is measured; whether its file is whole."""
    if part.measured(commit_measured()):
        say(f"{part.name}: measured")
        return True
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        return False
    say(f"{part.name}: {' '.join(part.command)}")
    try:
        return subprocess.run(part.command, timeout=left).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    main()

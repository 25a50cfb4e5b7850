"""The figures of RESULTS.md measured again, one benchmark after the other.

    python benchmarks/bench.py           # make bench: what needs no card, an hour per run
    python benchmarks/bench.py --gpu     # make bench-gpu: what needs one, within ten minutes

A part whose file holds figures of this commit is not measured again, so a run that was interrupted,
or that its limit of time has ended, goes on where it was: on two cores, all parts take two or
three runs. Nothing is measured on a busy machine unless --anyway is given. Zen 4 and processors
without AVX-512 or with AMX have their own folders, except for the figures of a card.
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

from harness import HERE, commit_measured, cores, processor, say

IDLE = 0.15
"""Running processes per core, averaged over a minute, up to which a machine counts as idle."""
SECONDS, GPU_SECONDS = 3600, 600
"""What a run takes at most."""


@dataclass(frozen=True)
class Part:
    """One file of results."""

    name: str
    script: str
    arguments: str

    @property
    def file(self) -> Path:
        # Figures of a card depend little on the processor beside it.
        return (HERE / "results" if self in GPU_PARTS else folder()) / f"{self.name}.json"

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
    Part("start", "start", ""),
    Part("step-embedded", "step", "--cases embedded,embedded@8-rows --repeats 20"),
    Part("step-busy", "step", "--cases embedded --busy 2 --repeats 10"),
    Part("rollouts-small", "rollouts", "--peers generate --cases small-equal,embedded-queue"),
    Part("update-decode", "update", "--cases decode-fp32,decode-bf16"),
    Part("update", "update", "--cases update-fp32,update-bf16,long-prompt-fp32,long-prompt-bf16,"
         "vocab-152k --repeats 3"),
    Part("memory-half", "memory", "--cases cpu-0.5b-fp32,cpu-0.5b-recommended,cpu-0.5b-8bit,"
         "cpu-0.5b-lora,cpu-0.5b-nf4"),
    Part("step-medium", "step", "--cases medium-fp32,medium-recommended --repeats 3"),
    Part("step-half-lora", "step", "--cases cpu-0.5b-lora --repeats 3"),
    Part("step-half", "step", "--cases cpu-0.5b-recommended --repeats 3"),
    Part("step-half-fp32", "step", "--cases cpu-0.5b-fp32 --repeats 3"),
    Part("scaling", "scaling", "--repeats 1"),
    Part("preferences", "preferences", "--repeats 3"),
    Part("tools", "tools", "--threads 1"),
    Part("critic-step", "critic_step", "--threads 1 --repeats 20"),
    Part("cluster", "cluster", "--cases demo,demo-scorer,medium"),
    Part("cluster-beside", "cluster", "--cases ahead,streaming"),
    Part("step-half-nf4", "step", "--cases cpu-0.5b-nf4 --repeats 1"),
    Part("step-half-lora-4x16", "step", "--cases cpu-0.5b-lora@4x16 --repeats 1"),
)  # fmt: skip
GPU_PARTS = (
    Part("gpu-update", "update", "--cases gpu-decode-0.5b,gpu-update-0.5b,gpu-decode-3b "
         "--repeats 2"),
    Part("gpu-step", "step", "--cases gpu-0.5b-g8 --repeats 2"),
    Part("gpu-step-liger", "step", "--cases gpu-0.5b-g8@liger --repeats 2"),
    Part("gpu-rollouts", "rollouts", "--peers generate,vllm --cases gpu-0.5b-g8 --repeats 2"),
    Part("gpu-step-adapters", "step", "--cases gpu-1.5b-g8-lora,gpu-3b-g8-qlora --repeats 1"),
)  # fmt: skip
"""What the limit of time may cut off comes last. Every part has a file of its own, and no case is
in two of them."""


def folder() -> Path:
    """Where the results of this machine's processor are."""
    found, name = HERE / "results", processor()
    if "amx_bf16" in name:
        return found / "with-amx"
    if "avx512f" not in name:
        return found / "without-avx512"
    return found / "zen-4" if "family 25" in name else found


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
    end = time.monotonic() + (GPU_SECONDS if options.gpu else SECONDS)
    failed = [part.name for part in (GPU_PARTS if options.gpu else PARTS) if not _run(part, end)]
    if not options.gpu:
        subprocess.run([sys.executable, str(HERE / "results.py")], check=True)
    if failed:
        raise SystemExit(
            f"not measured, or not whole: {', '.join(failed)}; the same command goes on with them."
        )


def _run(part: Part, end: float) -> bool:
    """Measure a part unless it is measured or there is no time left; whether its file is whole."""
    if part.measured(commit_measured()):
        say(f"{part.name}: measured")
        return True
    left = end - time.monotonic()
    if left <= 0:
        return False
    say(f"{part.name}: {' '.join(part.command)}")
    try:
        return subprocess.run(part.command, timeout=left).returncode == 0
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    main()

"""Kills a run at random instants, resumes it every time, and compares the end with a run that
nothing happened to.

    python kill_driver.py FOLDER KILLS SEED [SETTING ...]

Imports once and forks for every attempt, so that an attempt costs what its steps cost. Prints one
line of JSON: kills, how many hit a checkpoint being written, and every difference found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch

from small_runs import Quiet, prepared, timeless

torch.set_num_threads(1)

STEPS = 12


def run(folder: Path, more: list[str]) -> None:
    """A whole run, or what is left of one."""
    ready = prepared(
        folder,
        f"steps={STEPS}",
        "checkpoint.every_steps=2",
        "logging.rollouts_every=1",
        "update.minibatches=2",
        "evaluation.every_steps=3",
        "evaluation.keep_best=true",
        *more,
        progress=Quiet(),
        resume=True,
        eval_prompts=None,
    )
    ready.trainer.run()
    ready.trainer.finish()
    ready.close()


def attempt(folder: Path, seconds: float | None, more: list[str]) -> bool:
    """Run in a process of its own, killed after some seconds; whether it came to its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(folder.with_suffix(".err"), "a") as log:
                os.dup2(log.fileno(), 2)
            run(folder, more)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + (120.0 if seconds is None else seconds)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(folder.with_suffix(".err").read_text())
            return True
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if seconds is None:
        raise SystemExit("hangs")
    return False


def content(folder: Path) -> dict[str, object]:
    """Everything a run leaves behind that does not depend on the clock."""
    rollouts = sorted((folder / "rollouts").glob("*"))
    evaluations = (folder / "evaluations.jsonl").read_text()
    saved = max((folder / "checkpoints").glob("[!.]*"))
    return {
        "metrics": timeless(folder),
        "evaluations": evaluations,
        "rollouts": {path.name: path.read_text() for path in rollouts},
        "weights": {
            path.parent.name: path.read_bytes() for path in folder.glob("*/model.safetensors")
        },
        "checkpointed": {path.name: path.read_bytes() for path in saved.glob("*.safetensors")},
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("*")),
    }


def main(folder: Path, kills: int, seed: int, more: list[str]) -> None:
    chance = random.Random(seed)
    start = time.monotonic()
    attempt(folder / "whole", None, more)
    length = time.monotonic() - start
    whole, wrong, done, drafts, number = content(folder / "whole"), [], 0, 0, 0
    while done < kills:
        number += 1
        broken = folder / f"broken-{number}"
        while not attempt(broken, length * chance.random(), more):
            done += 1
            drafts += any((broken / "checkpoints").glob(".*"))
            if done >= kills:
                attempt(broken, None, more)
                break
        found = content(broken)
        wrong += [f"{broken.name}: {key}" for key in whole if found[key] != whole[key]]
    print(
        json.dumps(
            {
                "kills": done,
                "runs": number,
                "drafts": drafts,
                "wrong": wrong,
                "models": sorted(whole["weights"]),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

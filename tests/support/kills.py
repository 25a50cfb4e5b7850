"""Kills processes of runs on Ray at random moments, and compares the runs with one that nothing
happened to.

    python tests/support/kills.py --kills 20 --log kills.jsonl

Every run adds a line to the log: its kind, its kills with the seconds until the next finished step,
the weights that differ, and the number of processes that outlived it. A script that is started
again repeats the run that was under way and leaves out those of the log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from cluster_runs import processes, train_command
from groupwise.rundir.files import read_lines
from small_runs import settings
from vllm_peer import interpreter

KILLS_PER_RUN = 4
LONG_STEPS, KILLS_PER_LONG_RUN = 30, 10
"""Of the runs of this script: a cluster takes longer to start than ten processes to be replaced."""
PAUSE_S = 2.0
"""Longest time between a recovery and the next kill."""
MODELS = ("ray::Replica", "ray::LearnerRank", "ray::ScorerProcess", "scoring.worker")
"""Processes that may not outlive a run; Ray's own daemons may."""
NODE = "raylet"
"""A node of a cluster that others started; another one takes its place."""
SERVER = "vllm_peer"
"""A server that a replica samples from; it speaks vLLM's protocol."""
KINDS = (*MODELS, "driver", NODE, SERVER)


def run_settings(folder: Path, *more: str, steps: int = 12) -> list[str]:
    """Settings of a short run with a checkpoint after every step."""
    return settings(
        folder,
        f"steps={steps}",
        "sampling.max_tokens=32",
        "optimizer.learning_rate=1e-4",
        "checkpoint.every_steps=1",
        *more,
    )


def resumable(given: list[str]) -> list[str]:
    """Without the folder, which `--resume` names."""
    return [each for each in given if not each.startswith("output=")]


def steps_done(folder: Path) -> int:
    """Finished steps of a run."""
    path = folder / "metrics.jsonl"
    return len(list(read_lines(path))) if path.exists() else 0


def settings_of(kind: str, folder: Path) -> list[str]:
    """Settings of a run in which there are such processes to kill."""
    if kind != SERVER:
        return []
    engine = f"engine={{name='vllm', python='{interpreter(folder)}', weights='shared_memory'}}"
    return [engine, "algorithm.correction={name='tis'}"]


def undisturbed_run(folder: Path, *more: str, steps: int = 12) -> Path:
    """The run in one process."""
    given = run_settings(folder, "reward_pool.workers=1", *more, steps=steps)
    subprocess.run(train_command("word-problems", given), check=True, capture_output=True)
    return folder


def differing(one: Path, other: Path) -> list[str]:
    """The tensors in which the trained models of two runs differ in a bit."""
    first, second = (load_file(str(each / "final" / "model.safetensors")) for each in (one, other))
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that nobody waits for stays in the table."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Nodes:
    """A Ray cluster without a driver: a first node for its own processes, and two for a run."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")
        patience = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000}
        given = {"num_cpus": 0, "_system_config": patience}
        self.cluster = Cluster(initialize_head=True, head_node_args=given)
        self.others = [self.cluster.add_node(num_cpus=2) for _ in range(2)]

    def kill(self, chance: random.Random) -> None:
        """Kill a node's daemon, and add another node. A daemon that nobody waits for seems alive to
        its processes, which end with it."""
        lost = self.others.pop(chance.randrange(len(self.others)))
        daemon = lost.all_processes["raylet"][0].process
        daemon.kill()
        daemon.wait()
        self.others.append(self.cluster.add_node(num_cpus=2))


def kills_of(
    folder: Path, kind: str, chance: random.Random, *more: str, at_most: int, steps: int = 12
) -> dict[str, Any]:
    """Kill processes of a run until it ends.

    Args:
        more: settings of the run.

    Returns:
        `recovered`: seconds from each kill to the next finished step; `left`: how many processes
        outlived the run by a minute.
    """
    nodes = Nodes() if kind == NODE else None
    address = [f"cluster.address={nodes.cluster.address}"] if nodes else []
    given = run_settings(
        folder,
        "reward_pool.workers=1",
        "cluster.restarts=20",
        f"cluster.scorers={int('Scorer' in kind)}",
        *address,
        *more,
        steps=steps,
    )
    recovered: list[float] = []
    log, every = folder.with_suffix(".err"), set[psutil.Process]()

    def start(given: list[str], *more: str) -> subprocess.Popen[str]:
        line = train_command("word-problems-ray", given, *more)
        file = log.open("a")
        return subprocess.Popen(line, stdout=file, stderr=file, text=True)

    run = start(given)
    while run.poll() is None:
        time.sleep(PAUSE_S * chance.random())
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            every |= {each for name in MODELS for each in processes(os.getpid(), name)}
            found = [] if kind in (NODE, "driver") else processes(run.pid, kind)
        ready = found or kind in (NODE, "driver")
        if not ready or not steps_done(folder) or len(recovered) == at_most:
            continue
        begun, before = time.monotonic(), steps_done(folder)
        with contextlib.suppress(psutil.NoSuchProcess):
            if nodes:
                nodes.kill(chance)
            else:
                (run if kind == "driver" else chance.choice(found)).kill()
        if kind == "driver":
            run.wait()
            run = start(resumable(given), "--resume", str(folder))
        while steps_done(folder) <= before and run.poll() is None:
            time.sleep(0.02)
        recovered.append(time.monotonic() - begun)
    assert run.returncode == 0, log.read_text()[-2000:]
    left = [each for each in psutil.wait_procs(every, timeout=60)[1] if runs(each)]
    if nodes:
        nodes.cluster.shutdown()
    return {"recovered": recovered, "left": len(left)}


def logged(path: Path, kind: str) -> list[dict[str, Any]]:
    """The finished runs of a kind."""
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [row for row in rows if row["kind"] == kind]


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill until every kind has been killed often enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to kill")
    parser.add_argument("--log", type=Path, required=True, help="one line of JSON for every run")
    options = parser.parse_args(arguments)
    root = Path(__file__).parents[2]
    asked = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    undisturbed: dict[tuple[str, ...], Path] = {}
    open_kinds = set(options.kinds)
    while open_kinds:
        for kind in [each for each in KINDS if each in open_kinds]:
            before = logged(options.log, kind)
            count = sum(len(row["recovered"]) for row in before)
            if count >= options.kills:
                open_kinds.remove(kind)
                continue
            run = folder / f"run-{len(before)}"
            chance = random.Random(f"{kind} {len(before)}")
            at_most = min(KILLS_PER_LONG_RUN, options.kills - count)
            more = tuple(settings_of(kind, folder))
            if more not in undisturbed:
                alone = folder / f"undisturbed-{len(undisturbed)}"
                undisturbed[more] = undisturbed_run(alone, *more, steps=LONG_STEPS)
            found = kills_of(run, kind, chance, *more, at_most=at_most, steps=LONG_STEPS)
            row = {
                "commit": commit,
                "kind": kind,
                **found,
                "differing": differing(undisturbed[more], run),
            }
            with options.log.open("a") as file:
                print(json.dumps(row), file=file)
            print(f"{kind}: {count + len(found['recovered'])} kills", flush=True)
            shutil.rmtree(run)


if __name__ == "__main__":
    main()

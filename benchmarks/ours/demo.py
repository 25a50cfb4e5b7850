"""Training steps of a packaged recipe, as many as are asked for, in one process or several."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

import psutil
from channel import Channel, versions
from policies import PACKAGES

from groupwise.config import load
from groupwise.config.connect import connect
from groupwise.distributed.cluster import connect_cluster
from groupwise.training.prepare import prepare
from step import Watching

KINDS = {"LearnerRank": "rank", "Replica": "replica", "ScorerProcess": "scorer"}
"""Processes by a part of their title; those of Ray's own are "ray"."""


def cpu_seconds() -> Counter[str]:
    """CPU seconds by kind of process, so far."""
    driver, spent = psutil.Process(), Counter[str]()
    for each in (driver, *driver.children(recursive=True)):
        try:
            title = " ".join(each.cmdline())
            used = sum(each.cpu_times()[:2])
        except psutil.Error:
            continue
        kind = next((kind for name, kind in KINDS.items() if name in title), "ray")
        spent["driver" if each == driver else kind] += used
    return spent


class Steps:
    """A run that stands still between steps."""

    def __init__(self, spec: dict[str, Any]) -> None:
        given = [*spec["settings"], f"output={spec['folder']}", f"threads={spec['threads']}"]
        config = load(spec["recipe"], given)
        self.prepared = prepare(
            config,
            progress=Watching(),
            connector=connect if config.cluster is None else connect_cluster,
        )

    def hello(self) -> dict[str, Any]:
        return {"versions": versions(*PACKAGES)}

    def steps(self, count: int) -> dict[str, Any]:
        """Means over so many steps without a pause."""
        stages = defaultdict[str, float](float)
        before, start = cpu_seconds(), time.perf_counter()
        for _ in range(count):
            for name, spent in self.prepared.trainer.advance().scored.seconds.items():
                stages[name] += spent
        seconds, after = time.perf_counter() - start, cpu_seconds()
        stages["update"] = seconds - sum(stages.values())
        return {
            "seconds": seconds / count,
            "stages": {name: spent / count for name, spent in stages.items()},
            "cpu": {kind: (after[kind] - before[kind]) / count for kind in after},
        }


def main() -> None:
    channel = Channel()
    steps = Steps(channel.spec)
    try:
        channel.serve({"hello": steps.hello, "steps": steps.steps})
    finally:
        steps.prepared.close()


if __name__ == "__main__":
    main()

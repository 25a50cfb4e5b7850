"""What a short run takes besides its steps, stage by stage, from the first import on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from channel import Channel, versions

PACKAGES = ("torch", "transformers", "groupwise")
STEPS = 5
"""Steps after the first; their median counts."""


class Stages:
    """Seconds on the clock and of CPU time by stage."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, float]]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        yield
        spent = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        self.found.setdefault(name, []).append(spent)

    def medians(self) -> dict[str, dict[str, float]]:
        """By stage; of a stage that was repeated, the middle."""
        return {
            name: {kind: sorted(one[kind] for one in all)[len(all) // 2] for kind in all[0]}
            for name, all in self.found.items()
        }


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """A run of the packaged recipe, of a few steps, with its evaluation and its report."""
    stage = Stages()
    with stage("import groupwise"):
        import groupwise as _  # noqa: F401 what `import groupwise` costs alone
    with stage("import torch"):
        import torch  # noqa: F401
    with stage("settings"):
        from groupwise.config import load

        config = load(
            "word-problems",
            [f"output={spec['folder']}", f"threads={spec['threads']}", f"steps={STEPS + 1}"],
        )
    with stage("import of a run"):
        from groupwise.config.connect import load_configured
        from groupwise.training.prepare import prepare
        from step import Watching
    with stage("kernels"):
        from groupwise.kernels.build import compiled

        compiled()
    with stage("load"):
        policy = load_configured(config)
    with stage("prepare"):
        prepared = prepare(config, progress=Watching(), policy=policy)
    with stage("evaluation"):
        prepared.evaluate_all(0)
    with stage("first step"):
        prepared.trainer.advance()
    for _ in range(STEPS):
        with stage("later step"):
            prepared.trainer.advance()
    with stage("finish"):
        prepared.trainer.finish()
    with stage("close"):
        prepared.close()
    with stage("report"):
        from groupwise.report import write_run_report

        write_run_report(spec["folder"])
    return {"stages": stage.medians()}


def main() -> None:
    channel = Channel()
    channel.serve(
        {
            "hello": lambda: {"versions": versions(*PACKAGES)},
            "run": lambda: run(channel.spec),
        }
    )


if __name__ == "__main__":
    main()

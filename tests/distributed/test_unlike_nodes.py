"""Machines of a cluster that differ in what a run needs: each difference is said in one line."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster_runs import train_command
from groupwise.training.stages.base_model import small_policy
from kills import run_settings, steps_done
from namespaces import TwoMachines
from small_runs import settings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
pytest.importorskip("ray")

AHEAD_S = 120
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += %d;
    return status;
}
"""
"""A library under which the wall clock is ahead."""


@pytest.fixture
def own() -> Iterator[TwoMachines]:
    """Two machines."""
    made = TwoMachines()
    yield made
    made.remove()


def said(own: TwoMachines, log: Path, *command: str) -> tuple[int, str]:
    """The status of a command on the first machine, and what it printed in one line."""
    status = own.first.run(command, log).wait(300)
    return status, " ".join(log.read_text().split())


def run_of(own: TwoMachines, folder: Path, *more: str) -> list[str]:
    given = settings(folder, f"cluster.address={own.address}", *more)
    return train_command("word-problems-ray", given)


def test_an_output_folder_that_is_not_shared_is_said(tmp_path: Path, own: TwoMachines) -> None:
    folder = tmp_path / "hidden" / "run"
    folder.parent.mkdir()
    own.start_ray(0, 3, hidden=folder.parent)
    status, text = said(own, tmp_path / "log", *run_of(own, folder))
    assert status == 2 and "Traceback" not in text, text
    assert f"output = '{folder}': rank 0 of the learner does not see this folder" in text
    assert "--set output=FOLDER" in text


def test_a_model_that_is_not_shared_is_said(tmp_path: Path, own: TwoMachines) -> None:
    hidden = tmp_path / "hidden"
    policy = small_policy(hidden=32, layers=1, heads=1, key_value_heads=1, feed_forward=32)
    policy.model.save_pretrained(hidden / "model")
    policy.tokenizer.save_pretrained(hidden / "model")
    own.start_ray(0, 3, hidden=hidden)
    command = run_of(own, tmp_path / "run", f"model.path={hidden / 'model'}")
    status, text = said(own, tmp_path / "log", *command)
    assert status != 0 and "Traceback" not in text, text
    assert "rank 0" in text and f"model.path = '{hidden / 'model'}'" in text


def test_a_clock_that_is_off_is_said(tmp_path: Path, own: TwoMachines) -> None:
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK % AHEAD_S)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    own.start_ray(1, 2, LD_PRELOAD=str(library))
    given = settings(tmp_path / "run", f"cluster.address={own.address}")
    command = [
        "doctor" if part == "train" else part for part in train_command("word-problems-ray", given)
    ]
    status, text = said(own, tmp_path / "log", *command)
    assert status != 0 and "Traceback" not in text, text
    assert f"is off by +{AHEAD_S}." in text and "synchronise the clocks with NTP" in text


def test_a_second_driver_on_the_same_folder_is_refused(tmp_path: Path, own: TwoMachines) -> None:
    """Also from another machine; the first run goes on."""
    folder = tmp_path / "run"
    own.start_ray(3, 3)
    given = run_settings(folder, f"cluster.address={own.address}", steps=8)
    command = train_command("word-problems-ray", given)
    first = own.first.run(command, tmp_path / "first.log")
    driver = psutil.Process(first.pid)
    try:
        end = time.monotonic() + 240
        while not steps_done(folder) and time.monotonic() < end:
            time.sleep(0.1)
        driver.suspend()  # Otherwise, the run may end before the second one begins.
        log = tmp_path / "second.log"
        second = own.second.run(command, log)
        assert second.wait(240) == 2
        text = " ".join(log.read_text().split())
        assert f"output = '{folder}': is in use by process {first.pid}" in text, text
        assert "Traceback" not in text
        driver.resume()
        assert first.wait(240) == 0, (tmp_path / "first.log").read_text()[-2000:]
        assert steps_done(folder) == 8
    finally:
        first.kill()

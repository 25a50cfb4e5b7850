"""How many cores a process may use, by its affinity and by the quotas of its cgroups."""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from groupwise.machine import cores, cpu_quota, usable_cores
from groupwise.models.devices import use_threads


@pytest.fixture
def machine(tmp_path: Path):
    """Writes the files of a process and of its groups, and asks for its quota."""

    def ask(mount: str, own: str, **files: str) -> float:
        (tmp_path / "mountinfo").write_text(mount.format(root=tmp_path / "fs") + "\n")
        (tmp_path / "cgroup").write_text(own + "\n")
        for name, content in files.items():
            place = tmp_path / "fs" / name.replace("__", "/").replace("_of_", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        return cpu_quota(tmp_path)

    return ask


UNIFIED = "35 24 0:30 / {root} rw - cgroup2 cgroup2 rw"
OLDER = "35 24 0:30 / {root} rw - cgroup cgroup rw,cpu,cpuacct"


def test_the_smallest_quota_of_a_group_and_those_around_it_holds(machine) -> None:
    assert machine(UNIFIED, "0::/") == math.inf, "the root has none"
    given = {"a__cpu_of_max": "300000 100000\n", "a__b__cpu_of_max": "max 100000\n"}
    assert machine(UNIFIED, "0::/a/b", **given) == 3.0
    assert machine(UNIFIED, "0::/a/b", a__b__cpu_of_max="25000 50000\n") == 0.5


def test_quotas_of_version_1(machine) -> None:
    given = {"a__cpu_of_cfs_quota_us": "150000\n", "a__cpu_of_cfs_period_us": "100000\n"}
    assert machine(OLDER, "3:cpu,cpuacct:/a\n4:memory:/b", **given) == 1.5
    assert machine(OLDER, "3:cpu,cpuacct:/a", a__cpu_of_cfs_quota_us="-1\n") == math.inf


def test_a_container_that_sees_only_its_own_root(machine) -> None:
    """Its group is named as the host names it."""
    inside = "35 24 0:30 /docker/1 {root} rw - cgroup cgroup rw,cpu"
    given = {"cpu_of_cfs_quota_us": "200000\n", "cpu_of_cfs_period_us": "100000\n"}
    assert machine(inside, "3:cpu:/elsewhere", **given) == 2.0


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "wanted"), [(0.2, 1), (1.9, 1), (math.inf, None)])
def test_a_part_of_a_core_is_no_core(
    quota: float, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == (wanted or len(os.sched_getaffinity(0)))


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A real group with half a core."""
    for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = root / f"groupwise-test-{secrets.token_hex(4)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text("50000 100000")
            else:
                (group / "cpu.cfs_quota_us").write_text("50000")
        except OSError:
            group.rmdir()
            continue
        yield group
        for _ in range(100):
            try:
                return group.rmdir()
            except OSError:
                time.sleep(0.05)
    pytest.skip("no right to make cgroups with a quota")


def test_the_command_takes_as_many_threads_as_its_quota_allows(half_a_core: Path) -> None:
    program = (
        "import os; from groupwise.cli import main; main(['--help']); import torch; "
        "print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    )
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["/bin/sh", "-c", enter, str(half_a_core), sys.executable, "-c", program],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 1"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_python_program_takes_no_more_threads_than_cores(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    use_threads(None)
    assert torch.get_num_threads() == min(2, len(os.sched_getaffinity(0)))


def test_threads_that_were_asked_for_are_taken_with_a_warning(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: 1.0)
    with pytest.warns(UserWarning, match=r"threads = 3: .* use 1 of .* Set threads = 1\."):
        use_threads(3)
    assert torch.get_num_threads() == 3

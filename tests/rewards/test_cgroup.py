"""The memory of a sandbox as a whole, which a cgroup limits where one can be had."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from groupwise.rewards.code import sandbox
from groupwise.rewards.code.cgroup import candidates, memory_group, parent_of_groups
from groupwise.rewards.code.job import TOO_LARGE
from groupwise.rewards.code.sandbox import Suite, run_inputs, run_tests, unavailable

grouped = pytest.mark.skipif(
    unavailable() is not None or parent_of_groups() is None,
    reason=f"no sandbox ({unavailable()}) or no right to make cgroups",
)


@grouped
def test_what_fills_the_group_of_a_sandbox_is_the_program_s_own_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_ROOM", -900 << 20)  # 132 MiB are left of a sandbox's memory
    large = "x = bytes(range(256)) * (1 << 20)\ndef f(): return len(x)"
    assert run_tests(large, Suite(sources=["assert f()"])) == [TOO_LARGE]
    assert list(run_inputs(large, [""])) == [TOO_LARGE]
    assert run_tests("def f(): return 1", Suite(sources=["assert f()"]))[0].verdict == "passed"


def processes_in(group: Path) -> set[int]:
    """Empty where the group is gone: it may be that of another test."""
    try:
        return set(map(int, (group / "cgroup.procs").read_text().split()))
    except OSError:
        return set()


@grouped
def test_every_sandbox_is_in_a_group_that_goes_with_it() -> None:
    parent = parent_of_groups()
    assert parent is not None
    runs = run_inputs("print(input())", ["a", "b"])
    assert next(runs) == "a\n"
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    [(group, processes)] = [
        (folder, found)
        for folder in parent.glob("groupwise-*")
        if below & (found := processes_in(folder))
    ]
    assert len(processes) >= 2, "bubblewrap and the judge"
    runs.close()
    assert not group.exists()


@pytest.mark.skipif(parent_of_groups() is None, reason="no right to make cgroups")
def test_a_group_that_was_never_full_says_so_and_is_removed() -> None:
    with memory_group(1 << 28) as group:
        assert group is not None and group.folder.exists() and not group.overflowed
    assert not group.folder.exists()


def test_groups_are_looked_for_below_the_own_one_and_beside_it(tmp_path: Path) -> None:
    def of(mountinfo: str, cgroup: str) -> list[str]:
        (tmp_path / "mountinfo").write_text(mountinfo)
        (tmp_path / "cgroup").write_text(cgroup)
        return [str(folder) for folder in candidates(tmp_path)]

    unified = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    session = "/user.slice/user-1000.slice/user@1000.service/app.slice"
    assert of(unified, f"0::{session}/app-1.scope\n") == [
        f"/sys/fs/cgroup{session}/app-1.scope",
        f"/sys/fs/cgroup{session}",
    ]
    assert of(unified, "0::/\n") == ["/sys/fs/cgroup"], "nothing beside the root"
    first = "40 32 0:36 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    other = "41 32 0:37 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    assert of(first + other, "8:pids:/\n4:memory:/box\n0::/\n") == ["/sys/fs/cgroup/memory/box"]
    inside = "40 32 0:36 /docker/1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    assert of(inside, "4:memory:/docker/1/a\n") == ["/sys/fs/cgroup/memory/a"]
    assert of(inside, "4:memory:/elsewhere\n") == [], "outside of what is mounted here"
    assert of("", "") == []

"""The figures of the benchmarks: turns, quotients, tables, targets."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "bench",
    "bounds",
    "cluster",
    "compare_commits",
    "harness",
    "kernels",
    "memory",
    "policies",
    "preferences",
    "results",
    "rollouts",
    "scaling",
    "shapes",
    "start",
    "step",
    "tasks",
    "update",
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a file of the benchmarks as their scripts do, and forgets it afterwards."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_the_first_side_changes_with_every_repeat(load) -> None:
    harness: ModuleType = load("harness")
    harness.PAUSE_S = 0
    order: list[str] = []

    def side(name: str):
        return lambda repeat: order.append(name) or {"repeat": repeat}

    answers = harness.turns({name: side(name) for name in "abc"}, repeats=3)
    assert "".join(order) == "abcbcacab"
    assert answers["b"] == [{"repeat": 0}, {"repeat": 1}, {"repeat": 2}]


def test_ratios_are_taken_repeat_by_repeat(load) -> None:
    # 8/2 = 4, 9/3 = 3, 40/4 = 10: median 4, although the quotient of the medians is 9/3 = 3.
    found = load("harness").ratios([8.0, 9.0, 40.0], [2.0, 3.0, 4.0])
    assert found == {"median": 4.0, "low": 3.0, "high": 10.0}


def test_both_sides_read_the_tokens_that_a_case_names(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: ModuleType = load("shapes")
    for folder in ("peers", "ours"):
        monkeypatch.syspath_prepend(str(FOLDER / folder))
    shape = shapes.SHAPES["1m"]
    folder = shapes.save_model(shape, tmp_path)
    peers = importlib.import_module("tasks").tokenizer_of(folder, endless=True)
    policies = importlib.import_module("policies")
    policy = policies.policy_of(folder, precision="float32", endless=True)
    (tokens,) = shapes.random_prompts(shape, count=1, tokens=256)
    text = shapes.as_text(tokens)
    assert any(str(token).startswith("1") for token in tokens)
    assert peers(text)["input_ids"] == policy.tokenizer(text)["input_ids"] == tokens
    assert policy.end_tokens == {peers.eos_token_id} == {shape.vocab}


def test_a_worker_that_dies_says_why(load, tmp_path: Path) -> None:
    harness: ModuleType = load("harness")
    (tmp_path / "broken.py").write_text("raise ValueError('no such card')")
    with (
        harness.Worker(str(tmp_path / "broken.py"), {"threads": 1}) as worker,
        pytest.raises(harness.WorkerError, match="asked to 'hello'(.|\n)*no such card"),
    ):
        worker.ask("hello")


def test_what_libraries_print_is_no_answer(load, tmp_path: Path) -> None:
    harness: ModuleType = load("harness")
    (tmp_path / "loud.py").write_text(
        "from channel import Channel\n"
        "def add(a, b):\n"
        "    print('{\"sum\": 0}')\n"
        "    return {'sum': a + b}\n"
        "Channel().serve({'add': add})\n"
    )
    with harness.Worker(str(tmp_path / "loud.py"), {"threads": 1}) as worker:
        assert worker.ask("add", a=2, b=3) == {"sum": 5}
        assert worker.ask("add", a=4, b=5) == {"sum": 9}


def test_agreement_counts_tokens_before_the_first_difference(load) -> None:
    # Row 1: 2 of 4 stand before the difference; row 2: all 2 of 3, the peer wrote one more.
    agreement = load("rollouts")._agreement
    assert agreement([[1, 2, 9, 4], [5, 6]], [[1, 2, 3, 4], [5, 6, 7]]) == 4 / 7


def test_a_peer_that_dies_is_left_out_and_the_others_go_on(load, monkeypatch) -> None:
    rollouts: ModuleType = load("rollouts")

    class Side:
        def __init__(self, alive: bool) -> None:
            self.alive, self.process = alive, self

        def poll(self) -> int | None:
            return None if self.alive else 1

    def measure(name, case, model, sides, options):
        if not all(side.alive for side in sides.values()):
            raise load("harness").WorkerError("out of memory")
        return [{"peer": peer} for peer in sides if peer != "ours"]

    monkeypatch.setattr(rollouts, "measure", measure)
    sides = {"ours": Side(True), "generate": Side(True), "vllm": Side(False)}
    assert rollouts.measured("c", None, None, sides, None) == [{"peer": "generate"}]
    with pytest.raises(load("harness").WorkerError):
        rollouts.measured("c", None, None, {**sides, "ours": Side(False)}, None)


def test_sizes_that_grow_reach_those_of_the_targets(load) -> None:
    axes = load("scaling").AXES
    largest = {name: points[-1][0] for name, points in axes.items()}
    assert largest["prompt"] >= 2048 and largest["group"] >= 64 and largest["completion"] >= 1024
    assert largest["model"] > 450e6
    for points in axes.values():
        for _, point in points:
            assert point.prompt + point.completion <= point.shape.context


def test_growth_is_the_exponent_between_two_points(load) -> None:
    # Twice the value: 4 times the time is exponent 2, the same memory is exponent 0.
    before = {"value": 8, "ours_seconds": 1.5, "cpu_seconds": 2.0, "ours_peak_mb": 70.0}
    now = {"value": 16, "ours_seconds": 6.0, "cpu_seconds": 4.0, "ours_peak_mb": 70.0}
    wanted = {"time": 2.0, "cpu": 1.0, "memory": 0.0}
    assert load("scaling").growth(before, now) == pytest.approx(wanted)


def test_the_page_holds_each_figure_against_its_target(load, tmp_path: Path) -> None:
    results: ModuleType = load("results")
    spread = {"median": 3.1, "low": 2.8, "high": 3.3}
    rows = [
        {"case": "small-equal", "peer": "generate", "speedup": spread},
        {"case": "small-equal", "peer": "vllm", "speedup": {**spread, "median": 2.9}},
    ]
    hardware = {"processor": "X", "cores": 2, "memory_gb": 8, "system": "L", "load_before": 0.1}
    content = {"benchmark": "rollouts", "hardware": hardware, "command": "python it", "cases": rows}
    (tmp_path / "rollouts.json").write_text(json.dumps(content))
    (tmp_path / "update.json").write_text(json.dumps({"benchmark": "update", "quick": True}))
    found = results.read(tmp_path)
    assert list(found) == ["rollouts"]
    page = results.page(found, "## Notes")
    verdicts = [line.split("|")[-2].strip() for line in page.splitlines() if "small-equal" in line]
    assert verdicts[:2] == ["yes", "no"]
    assert re.search(r"\| step +\| embedded ", page) and "not measured" in page
    assert "python it" in page and page.endswith("## Notes\n")
    assert not any(each.title in page for each in results.PROCESSORS)
    for other, least in zip(results.PROCESSORS, ("8", "8", "6"), strict=True):
        both = results.page({}, "## Notes", others=[other.section(found)])
        _, own = both.split(f"## {other.title}")
        assert re.search(rf"\| medium-recommended .*≥ {least} ", own) and "python it" in own


def test_figures_that_are_held_against_other_cases_or_points(load) -> None:
    results: ModuleType = load("results")
    rows = [
        {"case": "embedded", "speedup": 5.0, "first_over_later": 1.4},
        {"case": "embedded beside 2", "speedup": 5.5},
    ]
    points = [
        {"case": "group", "growth": None},
        {"case": "group", "growth": {"time": 1.2}},
        {"case": "group", "growth": {"time": 0.9}},
    ]
    found = {"step": [{"cases": rows}], "scaling": [{"cases": points}]}
    table = results.against_targets(found, results._targets())
    lines = {tuple(c.strip() for c in line.split("|")[1:4]): line.split("|")[5:8]
             for line in table.splitlines()}  # fmt: skip
    cells = {key: [c.strip() for c in value] for key, value in lines.items()}
    assert cells["step", "embedded beside 2", "speedup"] == ["5.5", "≥ 5", "yes"]
    assert cells["step", "embedded", "first over later"] == ["1.4", "≤ 1.3", "no"]
    assert cells["scaling", "group", "growth"] == ["1.2", "≤ 1.1", "no"]
    assert cells["scaling", "prompt", "growth"] == ["not measured", "≤ 1.1", ""]


def test_every_target_names_a_case_that_exists(load) -> None:
    results = load("results")
    of_others = [results._targets_with(each.speedups) for each in results.PROCESSORS]
    for target in sum(of_others, results._targets()):
        module = load(target.benchmark)
        known = module.AXES if target.benchmark == "scaling" else module.CASES
        assert target.case.partition(" beside ")[0] in known


def test_a_commit_runs_its_own_benchmarks_and_its_own_source(load) -> None:
    compare: ModuleType = load("compare_commits")
    harness: ModuleType = sys.modules["harness"]
    with compare.worktree("HEAD") as root:
        script = root / "benchmarks" / "ours" / "which.py"
        script.write_text(
            "from channel import Channel\n"
            "import groupwise\n"
            'Channel().serve({"hello": lambda: {"file": groupwise.__file__}})\n'
        )
        with harness.Worker("ours/which.py", {"threads": 1}, root=root / "benchmarks") as worker:
            assert Path(worker.ask("hello")["file"]).is_relative_to(root / "src")
    assert not root.exists()
    with (
        pytest.raises(SystemExit, match="commit = 'no-such-commit'"),
        compare.worktree("no-such-commit"),
    ):
        pass


def test_all_benchmarks_wait_for_an_idle_machine_and_skip_what_is_measured(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("bench")
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    with pytest.raises(SystemExit, match="wait until the machine is idle"):
        bench.main()
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (part, *_) = bench.PARTS
    for name, place in (
        ("A", "results/without-avx512"),
        ("A family 25 avx512f", "results/zen-4"),
        ("A family 6 avx512f amx_bf16", "results/with-amx"),
        ("A family 26 avx512f", "results"),
    ):
        monkeypatch.setattr(bench, "processor", lambda name=name: name)
        assert part.file.parent == tmp_path / place
    part.file.parent.mkdir(parents=True)
    for found, measured in (
        ({"commit": "a", "finished": True}, True),
        ({"commit": "b", "finished": True}, False),
        ({"commit": "a"}, False),  # interrupted
    ):
        part.file.write_text(json.dumps(found))
        assert part.measured("a") is measured


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_all_benchmarks_stop_when_their_time_is_over(
    seconds: float, load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("bench")
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "commit_measured", lambda: "a")
    (tmp_path / "results").mkdir()
    started = tmp_path / "started"
    slow = f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(60)"
    (tmp_path / "slow.py").write_text(slow)
    start = time.monotonic()
    assert bench._run(bench.Part("slow", "slow", ""), start + seconds) is False
    assert time.monotonic() - start < 20
    assert started.exists() is (seconds > 0)


def test_parts_of_all_benchmarks_name_cases_that_exist_once(load) -> None:
    """A case in two files would keep an old figure in the table of targets."""
    bench = load("bench")
    for parts in (bench.PARTS, bench.GPU_PARTS):
        named: list[tuple[str, str]] = []
        for part in parts:
            words = part.arguments.split()
            if "--cases" in words:
                names = words[words.index("--cases") + 1].split(",")
                assert set(names) <= set(load(part.script).CASES), part.name
                busy = " busy" if "--busy" in words else ""
                named += [(part.script, name + busy) for name in names]
        assert len(named) == len(set(named))


def test_the_picture_has_every_stage_with_a_target(load, tmp_path: Path) -> None:
    bounds, results = load("bounds"), load("results")
    targets = {t.case: t.value for t in results._targets() if t.case in bounds.STAGES}
    assert targets.keys() == bounds.STAGES.keys()
    spread = {"median": 1.4, "low": 1.3, "high": 1.5}
    rows = [
        {"case": case, "ours_seconds": 7.0, "over_bound": spread, "with_attention": spread}
        for case in reversed(bounds.STAGES)
    ]
    found = bounds.bars([*rows, {**rows[0], "ours_seconds": 9.0}], targets)
    assert [bar.name for bar in found] == [name for name, _ in bounds.STAGES.values()]
    assert {bar.seconds for bar in found} == {7.0}, "the first row of a case counts"
    bounds.draw(found, tmp_path / "bounds.png")
    assert (tmp_path / "bounds.png").read_bytes().startswith(b"\x89PNG")


def test_busy_processes_take_time_and_end(load) -> None:
    harness = load("harness")
    with harness.busy(2):
        others = psutil.Process().children()
        time.sleep(0.5)
        assert len(others) == 2 and all(other.cpu_times().user > 0 for other in others)
    assert not any(other.is_running() for other in others)

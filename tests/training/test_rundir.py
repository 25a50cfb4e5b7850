"""The run directory, progress and trackers: what is written, and what survives kills and pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from rich.console import Console

from groupwise.errors import RunError, UsageError
from groupwise.rundir.files import RunLog, printable, read_lines
from groupwise.training.monitor.monitor import Monitor
from groupwise.training.monitor.progress import (
    LiveProgress,
    Pace,
    PlainProgress,
    duration,
    show_progress,
)
from groupwise.training.monitor.trackers import make_trackers
from groupwise.types import Completion, Group, Prompt, ScoredGroups, Scores, Status


def scored(text: str = "42") -> ScoredGroups:
    """One prompt, two completions; the second could not be judged."""
    completions = tuple(
        Completion(
            tokens=[1, 2], mask=[True, True], logprobs=[-0.123456, -1.0], text=text, finish="stop"
        )
        for _ in range(2)
    )
    nan = float("nan")
    return ScoredGroups(
        groups=(
            Group(
                prompt=Prompt(id="p1", text="6 · 7?", answer="42"),
                prompt_tokens=[5],
                completions=completions,
            ),
        ),
        scores=Scores(
            total=torch.tensor([[1.5, nan]]),
            correct=torch.tensor([[1.0, nan]]),
            parts={"format": torch.tensor([[0.5, nan]])},
            status=((Status.OK, Status.TIMEOUT),),
            valid=torch.tensor([[True, False]]),
            reasons=((None, "mine: TimeoutError: too slow (mine.py, line 3: wait())"),),
        ),
        keep=torch.tensor([[True, True]]),
        drawn=1,
    )


def test_a_run_directory_says_what_ran(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", settings={"seed": 3})
    log.step(1, {"reward": 0.25, "kl": float("nan")})
    log.evaluation(1, {"greedy": {"value": 0.5, "low": 0.4, "high": 0.6}})
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["config"] == {"seed": 3}
    # What pip calls 2.13.0 calls itself 2.13.0+cu130 in a build for CUDA.
    assert about["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert about["hardware"]["cores"] == os.cpu_count()
    assert list(read_lines(tmp_path / "run" / "metrics.jsonl")) == [
        {"step": 1, "reward": 0.25, "kl": None}
    ]
    assert next(read_lines(tmp_path / "run" / "evaluations.jsonl"))["greedy"]["low"] == 0.4


def test_rollouts_hold_every_completion_with_its_verdict(tmp_path: Path) -> None:
    log = RunLog(tmp_path, settings={})
    log.rollouts(7, scored(), torch.tensor([[0.7, 0.0]]))
    (line,) = read_lines(tmp_path / "rollouts" / "step-000007.jsonl")
    assert line["prompt"] == {"id": "p1", "text": "6 · 7?", "answer": "42"}
    judged, lost = line["completions"]
    assert judged == {
        "text": "42",
        "reward": 1.5,
        "parts": {"format": 0.5},
        "correct": 1.0,
        "status": "ok",
        "keep": True,
        "advantage": pytest.approx(0.7),
        "finish": "stop",
        "tokens": 2,
        "logprobs": [-0.1235, -1.0],
    }
    assert lost["error"] == "mine: TimeoutError: too slow (mine.py, line 3: wait())"
    assert (lost["status"], lost["reward"], lost["parts"]) == ("timeout", None, {"format": None})


def test_any_model_text_makes_valid_lines(tmp_path: Path) -> None:
    """A lone surrogate, a line separator, an escape sequence and a quote all come back."""
    text = 'a\ud83d b\u2028c\x85d \x1b[31m "e"\n한국어'
    RunLog(tmp_path, settings={}).rollouts(1, scored(text))
    (line,) = read_lines(tmp_path / "rollouts" / "step-000001.jsonl")
    assert line["completions"][0]["text"] == text
    assert line["completions"][0]["advantage"] is None


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, settings={})
    for step in (1, 2, 3):
        log.step(step, {"reward": step / 10})
        log.rollouts(step, scored())
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # killed in the middle of a line
    resumed = RunLog(tmp_path, settings={}, resume_at=2)
    resumed.step(3, {"reward": 0.9})
    assert [line["reward"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0.1, 0.2, 0.9]
    assert not (tmp_path / "rollouts" / "step-000003.jsonl").exists()
    assert (tmp_path / "rollouts" / "step-000002.jsonl").exists()


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    RunLog(tmp_path, settings={}).step(1, {"reward": 0.5})
    with pytest.raises(UsageError, match="already contains a run; continue it with --resume"):
        RunLog(tmp_path, settings={})


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2"):
        list(read_lines(tmp_path / "m.jsonl"))


def test_a_full_disk_is_one_clear_line() -> None:
    """/dev/full accepts an open and refuses every byte."""
    from groupwise.rundir.files import append_text

    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        append_text(Path("/dev/full"), "x")


def test_an_output_that_cannot_be_made_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="output = .*cannot be made"):
        RunLog(tmp_path / "file" / "run", settings={})


def test_model_text_cannot_drive_the_terminal() -> None:
    assert printable("\x1b]0;title\x07\x9b2J") == r"\x1b]0;title\x07\x9b2J"
    assert printable("\u202eevil") == r"\u202eevil"
    assert printable("line\n\ttab 한국어 ✓") == "line\n\ttab 한국어 ✓"
    assert printable("over\rwritten") == r"over\rwritten"


def test_time_left_follows_the_recent_pace() -> None:
    """10 steps at 2 s each are followed by 10 s for the 5 that are left."""
    now = [100.0]
    pace = Pace(15, clock=lambda: now[0])
    assert pace.left() is None
    for step in range(1, 11):
        now[0] += 2
        pace.step(step)
    assert pace.left() == pytest.approx(10)
    for step in range(11, 15):  # then slower steps of 10 s pull the estimate up
        now[0] += 10
        pace.step(step)
    assert pace.left() == pytest.approx((9 * 2 + 4 * 10) / 13)


def test_a_resumed_run_counts_its_own_steps_only() -> None:
    now = [0.0]
    pace = Pace(100, clock=lambda: now[0])
    now[0] += 500  # loading, warming up
    pace.step(51)
    assert pace.left() is None
    now[0] += 3
    pace.step(52)
    assert pace.left() == pytest.approx(48 * 3)


def test_plain_lines_come_every_few_steps() -> None:
    stream = io.StringIO()
    progress = show_progress({"grpo": 7}, stream=stream, every=3)
    assert isinstance(progress, PlainProgress)
    for step in range(1, 8):
        progress.step("grpo", step, {"reward": 0.5, "tokens_per_second": 12345.6})
    lines = stream.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert "reward 0.500  tokens/s 12,346" in lines[0]


def test_a_terminal_gets_a_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = show_progress({"grpo": 4, "softrank": 4}, stream=stream)
    assert isinstance(progress, LiveProgress)
    progress.step("softrank", 2, {"reward": 0.25, "accuracy": 0.5})
    progress.log("[bold]\x1b[2Jhello")
    progress.close()
    assert "2/4" in stream.getvalue() and "0.250" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue() and "[bold]" in stream.getvalue()


def test_the_live_table_shows_an_evaluation_after_the_last_step() -> None:
    progress = LiveProgress({"grpo": 2}, stream=io.StringIO())
    monitor = Monitor(progress=progress, name="grpo")
    for step, greedy in ((1, 0.25), (2, 0.75)):
        progress.step("grpo", step, {"reward": 0.5})
        row = {"split": "held_out", "figures": {"greedy": {"value": greedy}}}
        monitor.write_evaluation(step, row)
    progress.close()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(progress.table())
    head, line = console.export_text().splitlines()
    assert "held-out" in head and "0.750" in line and "2/2" in line


def test_the_live_table_keeps_one_line_per_run_in_80_columns() -> None:
    progress = LiveProgress({"softrank #0": 80, "grpo #0": 80}, stream=io.StringIO())
    metrics = {"reward": 0.5, "signal_share": 1.0, "grad_norm": 0.0561, "tokens_per_second": 4945.0}
    for step in (1, 2):
        progress.step("softrank #0", step, {**metrics, "accuracy": 0.5})
        progress.step("grpo #0", step, {**metrics, "accuracy": 0.5})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(progress.table())
    lines = console.export_text().splitlines()
    assert len(lines) == 3 and "grad norm" in lines[0] and lines[1].startswith("softrank #0")
    # An accuracy that is the reward is not shown twice; one that differs is.
    assert "accuracy" not in lines[0]
    progress.step("grpo #0", 3, {**metrics, "accuracy": 0.25})
    console.print(progress.table())
    assert "accuracy" in console.export_text()
    progress.close()


def test_a_wide_terminal_gets_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"reward": 0.5, "signal_share": 1.0, "length": 31.4, "truncated_share": 0.25,
               "kl": 0.01, "held_out": 0.75}  # fmt: skip
    heads = {}
    for width in (60, 84, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        progress = LiveProgress({"grpo": 4}, stream=io.StringIO())
        progress.step("grpo", 1, metrics)
        progress.close()
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(progress.table())
        head, line = console.export_text().splitlines()
        assert len(head.rstrip()) <= width and "0.750" in line
        heads[width] = head.split()
    assert "held-out" in heads[60] and "elapsed" not in heads[60]
    assert "elapsed" in heads[84] and "kl" not in heads[84]
    assert {"elapsed", "length", "truncated", "kl"} <= {*heads[160]}


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        from groupwise.training.monitor.progress import show_progress
        progress = show_progress({{"run": 2000}}, stream=sys.stdout, every=1)
        for step in range(1, 2001):
            progress.step("run", step, {{"reward": 0.0}})
        open({str(tmp_path / "done")!r}, "w").close()
        """
    )
    command = f'{sys.executable} -c "$PROGRAM" | head -n 1'
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env={**os.environ, "PROGRAM": program},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "done").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run  step 1/2000")


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 59.4, 60, 3599, 3600, 90061)] == [
        "0s",
        "59s",
        "1m 00s",
        "59m 59s",
        "1h 00m",
        "25h 01m",
    ]


def test_trackers_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="did you mean wandb"):
        make_trackers(["wandbe"], tmp_path, settings={})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"\[trackers\]"):
        make_trackers(["wandb"], tmp_path, settings={})


def test_wandb_receives_metrics_under_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    class Run:
        step = 4  # the server of a resumed run has the steps before

        def log(self, metrics: dict[str, float], step: int) -> None:
            seen.append((step, metrics))

        def finish(self) -> None:
            seen.append("finished")

    class Wandb:
        @staticmethod
        def init(**given: object) -> Run:
            seen.append(given["config"])
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    (tracker,) = make_trackers(["wandb"], tmp_path, settings={"seed": 1})
    tracker.log(3, {"reward": 0.25})
    tracker.log(4, {"reward": 0.5})
    tracker.close()
    assert seen == [{"seed": 1}, (4, {"reward": 0.5}), "finished"]

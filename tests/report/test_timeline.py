"""The timeline of a report is what the run wrote."""

from __future__ import annotations

from pathlib import Path

from groupwise.report import write_run_report
from groupwise.report.data import RunData
from groupwise.report.timeline import timeline
from groupwise.rundir.files import read_lines
from small_runs import prepared


def rows(count: int) -> list[dict]:
    """Steps of two seconds: a replica samples in the first, the learner updates in the second."""
    return [
        {
            "step": n,
            "spans": [
                ["replica 10", "sampling", 100.0 + 2 * n, 101.0 + 2 * n],
                ["replica 9", "sampling", 100.5 + 2 * n, 101.0 + 2 * n],
                ["learner", "updating", 101.0 + 2 * n, 102.0 + 2 * n],
                ["learner", "<sleeping>", 0, 1e9],
                "no span",
            ],
            "queue": {"writing": 3},
            "memory_mb": {"replica 10": 2048.0, "replica 9": 512.0, "rank 0": "much"},
        }
        for n in range(1, count + 1)
    ]


def test_the_last_steps_are_drawn_with_idle_times() -> None:
    metrics = [{"step": 20, "token_age": 1.5, "token_age_max": 2.0}]
    page = timeline(RunData(label="a", algorithm="a", seed=0, timeline=rows(20), metrics=metrics))
    assert "Steps 13 to 20, 16 s" in page and "sleeping" not in page
    assert page.index("replica 9") < page.index("replica 10") < page.index("learner")
    assert page.count('class="s0"') == 2 * 8 + 1 and page.count("<line") == 3 * 8
    assert page.count("<span>50 %</span>") == 2 and page.count("<span>75 %</span>") == 1
    assert "Peak memory: replica 9 0.5 GB, replica 10 2 GB." in page
    assert "3 writing" in page and "1.5 steps on average, 2 at most" in page
    assert timeline(RunData(label="a", algorithm="a", seed=0, timeline=rows(1))) == ""


def test_a_run_writes_its_timeline_and_a_resumed_one_repeats_no_step(tmp_path: Path) -> None:
    more = ("streaming.max_staleness=2", "algorithm.correction={name='tis'}")
    run = prepared(tmp_path, *more)
    run.trainer.advance()
    run.trainer.save(wait=True)
    run.trainer.advance()
    run.close()
    again = prepared(tmp_path, *more, resume=True)
    again.trainer.run()
    again.trainer.finish()
    again.close()
    found = list(read_lines(tmp_path / "timeline.jsonl"))
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    kinds = {(who, what) for row in found for who, what, *_ in row["spans"]}
    assert kinds >= {("learner", "updating"), ("sampler", "sampling"), ("scorer", "judging")}
    assert all(start <= end for row in found for *_, start, end in row["spans"])
    assert 'id="timeline"' in write_run_report(tmp_path).read_text()


def test_a_run_in_turn_writes_none(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    run.trainer.advance()
    run.close()
    assert not (tmp_path / "timeline.jsonl").exists()

"""What processes did is noted with whose work it was, and stays small."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest

import groupwise
from groupwise.rollouts.spans import MOST, WAITS, Spans
from groupwise.types import unwatched


def test_waits_of_the_loop_are_the_work_of_those_it_waits_for() -> None:
    alone, cluster = Spans(), Spans(apart=True)
    for spans in (alone, cluster):
        watch = spans.watching(unwatched)
        for name in ("the batch of step 3", "the update", "the disk to take a checkpoint"):
            with watch(name):
                time.sleep(0.001)
        with pytest.raises(ValueError), watch("the engine to load new weights"):
            raise ValueError
    done = [("learner", "updating"), ("learner", "transferring")]
    assert [span[:2] for span in alone.drained()] == [("sampler", "sampling"), *done]
    assert [span[:2] for span in cluster.drained()] == done, "replicas add their own"


def test_judging_lasts_until_the_verdict() -> None:
    spans, ticket = Spans(), Future()
    ticket.add_done_callback(spans.judging())
    time.sleep(0.01)
    assert spans.drained() == []
    ticket.set_result(None)
    (span,) = spans.drained()
    assert span[:2] == ("scorer", "judging") and span.end - span.start >= 0.01


def test_many_spans_become_few() -> None:
    spans = Spans()
    for n in range(5000):
        spans.add("replica 0", "sampling", 0.01 * n, 0.01 * n + 0.015)
        spans.add("replica 1", "sampling", n, n + 0.5 + (n == 77))
    found = spans.drained()
    assert len(found) <= MOST and found == sorted(found, key=lambda span: span.start)
    (one,) = [span for span in found if span.process == "replica 0"]
    assert (one.start, one.end) == (0.0, pytest.approx(50.005))
    assert max(found[1:], key=lambda span: span.end - span.start).start == 77


@pytest.mark.parametrize("begin", WAITS)
def test_every_wait_of_the_timeline_is_one_that_the_code_watches(begin: str) -> None:
    sources = Path(groupwise.__file__).parent.rglob("*.py")
    watched = (f'watch("{begin}', f'watch(f"{begin}')
    assert any(call in path.read_text(encoding="utf-8") for path in sources for call in watched)

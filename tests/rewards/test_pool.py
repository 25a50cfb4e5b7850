"""Rewards that hang, crash, leak or lie, in worker processes: everything else goes on, in order."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import pool_rewards
from groupwise.errors import RewardError, UsageError
from groupwise.rewards import Scorer, from_functions
from groupwise.rewards.scoring import pool as pool_module
from groupwise.types import Completion, Group, Prompt, Status

OK, ERROR, LATE = Status.OK, Status.ERROR, Status.TIMEOUT
HERE = Path(__file__).resolve().parent.parent


def group(*texts: str, name: str = "p") -> Group:
    completions = tuple(
        Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
        for text in texts
    )
    prompt = Prompt(id=name, text="q", answer="5")
    return Group(prompt=prompt, prompt_tokens=[1], completions=completions)


def pool(*functions, workers: int = 2, timeout_s: float = 0.5, memory_mb: int = 64) -> Scorer:
    return from_functions(
        list(functions) or [pool_rewards.obedient],
        workers=workers,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
    )


OTHERS: set[psutil.Process] = set()
"""Processes that other tests have left behind."""


@pytest.fixture(autouse=True)
def processes_of_other_tests() -> None:
    OTHERS.clear()
    OTHERS.update(psutil.Process().children(recursive=True))


def family(*, recursive: bool = True) -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=recursive) if each not in OTHERS]


def settled(count: int) -> int:
    """Children left, once those that are dying have gone."""
    for _ in range(50):
        if len(family()) <= count:
            break
        time.sleep(0.1)
    return len(family())


def test_every_kind_of_misbehaviour_costs_one_completion() -> None:
    texts = ["5", "4", "hang", "regex", "exit", "crash", "memory", "raise", "stdout", "5"]
    with pool(timeout_s=2.0) as scorer:
        scores = scorer.gather([scorer.submit(group(*texts))])
    status = [OK, OK, LATE, LATE, ERROR, ERROR, ERROR, ERROR, OK, OK]
    assert list(scores.status[0]) == status
    assert scores.total[0][scores.valid[0]].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert bool(scores.total[0][~scores.valid[0]].isnan().all())
    errors = " | ".join(scores.errors)
    for what in ("within 2 s", "exit code 3", "SIGSEGV", "out of memory", "ValueError: as told"):
        assert what in errors
    assert settled(0) == 0


def misbehaving(count: int) -> list[str]:
    """1 % each hang, crash and eat memory; the rest are right or wrong in turn."""
    special = {7: "hang", 33: "exit", 71: "memory"}
    return [special.get(i % 100, f"{4 + i % 2} {i}") for i in range(count)]


def assert_scores_beside_misbehaviour(count: int, *, timeout_s: float) -> None:
    texts = misbehaving(count)
    before = settled(0), psutil.Process().num_fds()
    with pool(timeout_s=timeout_s) as scorer:
        scorer.gather([scorer.submit(group("5"))])
        gc.collect()
        memory = psutil.Process().memory_info().rss
        tickets = [
            scorer.submit(group(*texts[i : i + 10], name=str(i))) for i in range(0, count, 10)
        ]
        scores = scorer.gather(tickets)
        gc.collect()
        grown = psutil.Process().memory_info().rss - memory
    flat = [status for row in scores.status for status in row]
    totals = scores.total.flatten().tolist()
    for text, status, total in zip(texts, flat, totals, strict=True):
        if text in ("hang", "exit", "memory"):
            assert status is (LATE if text == "hang" else ERROR), text
        else:
            assert (status, total) == (OK, float(text[0] == "5")), text
    assert Counter(flat)[OK] == count - 3 * count // 100
    assert (settled(0), psutil.Process().num_fds()) == before
    assert grown < 50 * 2**20


def test_hundreds_of_scorings_with_misbehaviour() -> None:
    assert_scores_beside_misbehaviour(400, timeout_s=1.0)


@pytest.mark.verify
def test_ten_thousand_scorings_with_misbehaviour() -> None:
    assert_scores_beside_misbehaviour(10_000, timeout_s=1.0)


def test_a_hang_does_not_stop_the_other_workers() -> None:
    with pool(workers=2, timeout_s=30.0) as scorer:
        scorer.gather([scorer.submit(group("5", "5"))])
        slow = scorer.submit(group("hang"))
        start = time.perf_counter()
        scorer.gather([scorer.submit(group("5", "4", "5", "4")) for _ in range(20)])
        assert time.perf_counter() - start < 25 and not slow.done()


def test_what_a_killed_reward_started_is_killed_too() -> None:
    with pool() as scorer:
        scores = scorer.gather([scorer.submit(group("child", "5"))])
        assert scores.status[0][0] is LATE
        # A busy machine takes a moment to end what has been killed.
        psutil.wait_procs([p for p in family() if asleep(p)], timeout=10)
        assert [p for p in family() if asleep(p)] == []


def asleep(process: psutil.Process) -> bool:
    try:
        return "time.sleep(600)" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def test_group_rewards_have_the_same_limit_and_see_judged_completions_only() -> None:
    with pool(pool_rewards.obedient, pool_rewards.whole, timeout_s=2.0) as scorer:
        scores = scorer.gather(
            [
                scorer.submit(group("5", "raise", "444")),
                scorer.submit(group("5", "4", "group hang")),
            ]
        )
    assert scores.status == ((OK, ERROR, OK), (LATE, LATE, LATE))
    assert scores.parts["whole"][0, ::2].tolist() == [1.0, 3.0]
    assert scores.parts["whole"][0, 1].isnan()


def test_where_rewards_run() -> None:
    functions = [getattr(pool_rewards, n) for n in ("process", "own_process", "waits", "threads")]
    with pool(*functions, pool_rewards.loads_torch) as scorer:
        scores = scorer.gather([scorer.submit(group("a"))])
    here = float(os.getpid())
    parts = {name: values.item() for name, values in scores.parts.items()}
    assert parts["own_process"] == parts["waits"] == here != parts["process"]
    assert parts["threads"] == 1.0 and parts["loads_torch"] == 0.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_with_a_model_has_a_worker_of_its_own(workers: int) -> None:
    functions = [pool_rewards.process, functools.partial(pool_rewards.with_a_model, word="stop")]
    with pool(*functions, workers=workers, timeout_s=1.0) as scorer:
        scores = scorer.gather([scorer.submit(group("a", "stop", "b"))])
        again = scorer.gather([scorer.submit(group("c"))])
    assert scores.status == ((OK, LATE, OK),) and scores.total[0, 1].isnan()
    # Loaded before the first call, and once more in the worker that took the place of the late one.
    assert scores.parts["with_a_model"][0, ::2].tolist() == [1.0, 1.0]
    assert again.parts["with_a_model"].tolist() == [[1.0]]
    assert (scores.parts["process"][0, 0] == os.getpid()) == (workers == 0)
    assert settled(0) == 0


def test_a_reward_that_cannot_be_made_ready_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"with_a_model: word = 'refuse': must be another"):
        pool(functools.partial(pool_rewards.with_a_model, word="refuse"))
    assert settled(0) == 0


def test_a_worker_that_does_nothing_while_it_is_made_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "STALLED_SECONDS", 2.5)
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"did nothing for 2.5 s while it was starting"):
        pool(functools.partial(pool_rewards.with_a_model, word="stands still"))
    assert time.monotonic() - start < 30
    with pool(functools.partial(pool_rewards.with_a_model, word="takes long")) as scorer:
        assert scorer.signs > 1, "a worker that is at work is"  # type: ignore[attr-defined]
    assert settled(0) == 0


def test_a_worker_that_ran_out_of_memory_for_one_completion_of_a_group_is_replaced() -> None:
    with pool(pool_rewards.forgetful, workers=1, memory_mb=512) as scorer:
        scores = scorer.gather([scorer.submit(group("a", "memory", "b"))])
        again = scorer.gather([scorer.submit(group("a", "b", "c"))])
    assert scores.status == ((OK, ERROR, OK),)
    assert any("out of memory (limit 512 MB)" in each for each in scores.errors)
    before, after = ({*s.total[0, ::2].tolist()} for s in (scores, again))
    assert len(before) == len(after) == 1 and before != after


def test_async_rewards_have_the_same_limit() -> None:
    with pool(pool_rewards.waits) as scorer:
        scores = scorer.gather([scorer.submit(group("a", "async hang"))])
    assert scores.status == ((OK, LATE),)


def test_submitting_blocks_when_too_much_waits() -> None:
    from groupwise.rewards import PoolScorer

    with pool() as other:
        composition = other.composition  # type: ignore[attr-defined]
    with PoolScorer(composition, workers=1, timeout_s=0.5, pending=2) as scorer:
        scorer.submit(group("hang")), scorer.submit(group("hang"))
        start = time.perf_counter()
        last = scorer.submit(group("5"))
        assert time.perf_counter() - start > 0.2
        assert scorer.gather([last]).total.item() == 1.0


def test_functions_that_cannot_be_sent() -> None:
    inside = from_functions  # any local name

    def local(text: str) -> float:
        return float(inside is None)

    with pytest.raises(UsageError, match="top level of a module, or .* workers = 0"):
        pool(local)
    with pytest.raises(UsageError, match="workers = 0"):
        pool(lambda text: 1.0)
    assert settled(0) == 0


def test_a_module_that_workers_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    ghost = types.ModuleType("ghost_rewards")
    exec("def reward(text):\n    return 1.0", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "ghost_rewards", ghost)
    with pytest.raises(RewardError, match="could not load the reward: ModuleNotFoundError"):
        pool(ghost.reward)
    assert settled(0) == 0


def test_closing_in_the_middle_leaves_nothing() -> None:
    files = psutil.Process().num_fds()
    scorer = pool(timeout_s=60.0)
    for _ in range(20):
        scorer.submit(group("hang", "5"))
    time.sleep(0.3)
    start = time.perf_counter()
    scorer.close()
    scorer.close()
    assert time.perf_counter() - start < 5.0
    assert (settled(0), psutil.Process().num_fds()) == (0, files)
    with pytest.raises(RewardError, match="closed"):
        scorer.submit(group("5"))


def test_a_worker_whose_parent_has_already_ended_ends() -> None:
    code = (
        "import os; from groupwise.rewards.scoring.worker import _die_with_parent as die; "
        "die(os.getppid()); print('lives', flush=True); die(os.getpid()); print('lives')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("lives\n", 1), ended.stderr


def test_workers_die_with_a_trainer_that_is_killed() -> None:
    script = textwrap.dedent("""
        import sys, time
        import pool_rewards, test_pool as t
        scorer = t.pool(timeout_s=600.0)
        for _ in range(2):
            scorer.submit(t.group("regex"))
        time.sleep(0.5)
        print("ready", flush=True)
        time.sleep(600)
    """)
    paths = [str(HERE / "support"), str(HERE / "rewards"), *sys.path]
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == b"ready\n"
    workers = psutil.Process(trainer.pid).children(recursive=True)
    assert len(workers) == 3  # the one that forks, and two that hang with the lock held
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def next_worker(last: psutil.Process | None = None) -> psutil.Process:
    """The only worker, once it is another one than `last`."""
    (server,) = family(recursive=False)
    for _ in range(600):
        if (found := server.children()) and found[0] != last:
            return found[0]
        time.sleep(0.02)
    raise AssertionError("no worker was started")


def killed(worker: psutil.Process) -> psutil.Process:
    worker.kill()
    return worker


def test_a_call_whose_worker_is_killed_is_made_again(tmp_path: Path) -> None:
    """A killed worker costs no sample, whether it was judging or waiting for work."""
    with pool(pool_rewards.until, timeout_s=60.0, workers=1) as scorer:
        ticket = scorer.submit(group(str(tmp_path / "go on"), str(tmp_path)))
        worker = None
        for _ in range(pool_module.ATTEMPTS - 1):
            worker = killed(next_worker(worker))
        next_worker(worker)
        (tmp_path / "go on").touch()
        assert scorer.gather([ticket]).total.tolist() == [[1.0, 1.0]]
        killed(next_worker())
        assert scorer.gather([scorer.submit(group(str(tmp_path)))]).total.tolist() == [[1.0]]


def test_a_worker_that_is_killed_while_it_loads_a_model_is_replaced() -> None:
    with pool(functools.partial(pool_rewards.with_a_model, word="takes long")) as scorer:
        worker = killed(next_worker())
        ticket = scorer.submit(group("a"))
        killed(next_worker(worker))
        assert scorer.gather([ticket]).total.tolist() == [[1.0]]


def test_the_process_that_forks_workers_is_replaced() -> None:
    with pool(timeout_s=600.0) as scorer:
        hanging = [scorer.submit(group("regex")) for _ in range(2)]
        for _ in range(pool_module.ATTEMPTS):
            while len(workers := family()) < 3:
                time.sleep(0.05)
            (forker,) = family(recursive=False)
            forker.kill()
            assert psutil.wait_procs([w for w in workers if w != forker], timeout=10)[1] == []
        with pytest.raises(RewardError, match="none of 2 .* the worker process died .* 3 times"):
            scorer.gather(hanging)
        assert scorer.gather([scorer.submit(group("5"))]).total.tolist() == [[1.0]]
    assert settled(0) == 0

"""Bad input: one clear line, the right exit code, no traceback, and nothing learned is lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from groupwise import train as train_function
from groupwise.cli import main
from groupwise.errors import GroupwiseError, RewardError, UsageError
from groupwise.rundir.files import read_lines
from groupwise.training.stages.sft import save
from small_runs import Quiet, prepared, settings, timeless, tiny

REWARD = ('rewards=[{name="token_repetition", ngram=1}]', "sampling.max_tokens=24")
"""What a model made of noise is paid for, and length enough to be paid different amounts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny(), folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    rows = [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def command(model: Path, output: Path, *more: str) -> list[str]:
    chosen = settings(output, f"model.path={model}", "data.prompt_column=question", *more)
    return ["train", "word-problems", *(w for setting in chosen for w in ("--set", setting))]


def assert_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], *, code: int, says: tuple[str, ...]
) -> str:
    """Run a command that must fail, and return its one line."""
    capsys.readouterr()
    assert main(arguments) == code
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert "Traceback" not in said
    for words in says:
        assert words in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    "more, says",
    [
        (["data.train=data.jsnl"], ("data.train = 'data.jsnl'", "data.jsonl")),
        (["data.train=/nowhere/x.jsonl"], ("no such file", "/nowhere does not exist")),
        (["data.prompt_column=qestion"], ("data.prompt_column = 'qestion'", "did you mean")),
        (["data.answer_column=anser"], ("data.answer_column = 'anser'", "did you mean answer")),
        (["data.limit=0"], ("data.limit = 0",)),
        (["algorithm.name=grppo"], ("algorithm.name = 'grppo'", "did you mean grpo")),
        (["algorithm.advantage.tua=1.0"], ("algorithm.advantage.tua = 1.0", "did you mean tau")),
        (["optimizer.lerning_rate=1e-3"], ("optimizer.lerning_rate", "did you mean learning_rate")),
        (["sampling.max_tokens=0"], ("sampling.max_tokens = 0", "greater than or equal to 1")),
        (["prompts_per_step=0"], ("prompts_per_step = 0",)),
        (["update.minibatches=5"], ("update.minibatches = 5", "must divide")),
        (["algorithm.name=grpo", "group_size=1"], ("group_size = 1",)),
        (["sampling.max_tokens=1024"], ("sampling.max_tokens = 1024", "context is 1024")),
        (["data.max_prompt_tokens=2"], ("has", "at most 2 leave room")),
        (["rewards=[]"], ("rewards = []", "at least one")),
        (['rewards=[{name="exact_anser"}]'], ("rewards.0.name = 'exact_anser'", "did you mean")),
        (["model.path=/nowhere/model"], ("model.path = '/nowhere/model'",)),
        (["steps=many"], ("steps = 'many'", "integer")),
        (["model.reference=none", 'algorithm.divergence={name="k3", coefficient=0.1}'],
         ("model.reference = 'none'", "KL")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(
    more: list[str],
    says: tuple[str, ...],
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = command(model, tmp_path / "run", "data.train=data.jsonl", *more)
    assert_refused(capsys, given, code=2, says=says)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "contains no rows"),
        ('{"question": "1?"}\n{broken\n', "data.jsonl:2: is not JSON"),
        ('{"question": "1?"}\n[1]\n', "data.jsonl:2: must be an object"),
        ('{"question": "  "}\n', "row 1: 'question' is empty"),
        ('{"question": "1?"}\n{"qestion": "2?"}\n', "row 2: has no column 'question'"),
        (b"\xff\xfe{}", "is not UTF-8"),
    ],
)
def test_data_that_cannot_be_read(
    content: str | bytes,
    says: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = command(model, tmp_path / "run", f"data.train={data}")
    assert_refused(capsys, given, code=2, says=(says,))


def test_a_model_folder_without_tokenizer(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    given = command(bare, tmp_path / "run", f"data.train={data}")
    assert_refused(capsys, given, code=2, says=("model.path", "has no tokenizer"))


def test_a_run_directory_in_place_of_its_model(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "before" / "final")
    given = command(tmp_path / "before", tmp_path / "run", f"data.train={data}")
    says = ("is a run directory; its model is", str(tmp_path / "before" / "final"))
    assert_refused(capsys, given, code=2, says=says)


def test_a_tokenizer_without_chat_template_or_pad_token_is_used_as_it_is(
    model: Path, data: Path, tmp_path: Path
) -> None:
    policy, plain = tiny(), tmp_path / "plain"
    policy.tokenizer.chat_template = policy.tokenizer.pad_token = None
    save(policy, plain)
    assert json.loads((plain / "tokenizer_config.json").read_text())["pad_token"] is None
    more = (f"data.train={data}", "steps=1", *REWARD)
    assert main(command(plain, tmp_path / "run", *more)) == 0


def test_a_conversation_needs_a_chat_template(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain, ignore=shutil.ignore_patterns("chat_template*"))
    turns = [{"role": r, "content": "hello"} for r in ("user", "assistant", "user")]
    data.write_text(json.dumps({"question": turns}) + "\n")
    given = command(plain, tmp_path / "run", f"data.train={data}")
    assert_refused(capsys, given, code=1, says=("no chat template", "tokenizer.chat_template"))


def test_debug_shows_where(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = command(model, tmp_path / "run", "data.train=/nowhere/x.jsonl")
    assert main([*given, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


# -- rewards ---------------------------------------------------------------------------------------


def fails(text: str) -> float:
    raise ValueError("out of luck")


@pytest.mark.parametrize(
    "reward, says",
    [
        (fails, "none of 8 completions could be judged: fails: ValueError: out of luck"),
        (lambda text: float("nan"), "returned nan"),
        (lambda text: "good", "must return a number or None"),
        (lambda text: None, "could be judged"),
    ],
)
def test_a_reward_that_never_says_anything_stops_the_run(
    reward: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match=says):
        run_with(reward, tmp_path)


def run_with(reward: Any, tmp_path: Path, **more: Any) -> Any:
    policy = tiny()
    return train_function(
        policy.model,
        [f"{n} and {n}?" for n in range(7)],
        reward,
        tokenizer=policy.tokenizer,
        **{
            "steps": 3,
            "output": str(tmp_path / "run"),
            "prompts_per_step": 2,
            "group_size": 4,
            "sampling": {"max_tokens": 4},
            "threads": 1,
            "progress": Quiet(),
            **more,
        },
    )


def test_a_reward_with_the_wrong_number_of_values(tmp_path: Path) -> None:
    def reward(group: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match="returned 1 values for 4 samples"):
        run_with(reward, tmp_path)


def test_a_reward_of_no_accepted_form(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must take `group`, or TRL's `completions`, or"):
        run_with(lambda: 1.0, tmp_path)
    with pytest.raises(RewardError, match="must return one value per completion, got float"):
        run_with(lambda group: 1.0, tmp_path)


def test_a_reward_that_breaks_later_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The step in hand is lost and nothing else: resuming goes on where the last one ended."""
    calls: list[int] = []

    def reward(group: Any) -> list[float]:
        calls.append(1)
        return [0.0, 1.0, 2.0] if len(calls) == 5 else [0.0, 1.0, 2.0, 3.0]

    with pytest.raises(RewardError, match="3 values for 4"):
        run_with(reward, tmp_path, steps=4)
    run = tmp_path / "run"
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-000002"}
    calls.extend([1] * 10)
    resumed = run_with(reward, tmp_path, steps=4, resume=True)
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4]
    whole = run_with(reward, tmp_path / "whole", steps=4)
    assert timeless(whole.folder) == timeless(run)


def test_completions_that_decoding_would_drop_are_found_before_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tiny()
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["42"]})
    rows = [{"prompt": "6·7?", "answer": "42"}]
    with pytest.raises(GroupwiseError, match="decoding drops 42|special tokens"):
        train_function(
            policy.model.resize_token_embeddings(len(policy.tokenizer)) and policy.model,
            rows,
            lambda text: 1.0,
            tokenizer=policy.tokenizer,
            output=str(tmp_path / "run"),
        )


# -- the run directory, signals --------------------------------------------------------------------


def test_a_directory_that_cannot_be_written(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = command(model, tmp_path / "file" / "run", f"data.train={data}")
    assert_refused(capsys, given, code=2, says=("output = ", "--set output=FOLDER"))


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    first = prepared(tmp_path / "run")
    with pytest.raises(UsageError, match=rf"is in use by process {os.getpid()} .* on .* since"):
        prepared(tmp_path / "run", resume=True)
    first.close()
    prepared(tmp_path / "run", resume=True).close()


SLOW = [
    "steps=100000",
    *REWARD,
    "algorithm.name=grpo",
]


def started(model: Path, data: Path, output: Path, **given: Any) -> subprocess.Popen[str]:
    """A run that would take for ever, once its first steps are done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", *command(model, output, f"data.train={data}", *SLOW)],
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
    )
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_run_that_is_told_to_end_writes_a_checkpoint(
    model: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    process = started(model, data, output)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "error: interrupted." and "Traceback" not in said
    assert f"interrupted and saved; continue with --resume {output}" in said
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").open()]
    assert (output / "checkpoints" / f"step-{steps[-1]:06d}").exists()


@pytest.mark.slow
def test_a_run_outlives_its_terminal_and_writes_checkpoints_when_asked(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """SIGHUP and SIGUSR1 save and go on, and SIGINT saves and ends; standard error that nobody
    reads any more is no reason to stop."""
    output = tmp_path / "run"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:  # a full pipe: a blocking write to it would never return
        try:
            os.write(writing, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    process = started(model, data, output, stderr=writing)
    try:
        for number in (signal.SIGHUP, signal.SIGUSR1):
            before = newest_step(output)
            process.send_signal(number)
            deadline = time.monotonic() + 60
            while newest_step(output) == before:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert newest_step(output) == [r["step"] for r in read_lines(output / "metrics.jsonl")][-1]
    finally:
        process.kill()
        process.communicate()
        os.close(reading), os.close(writing)


@pytest.mark.slow
def test_a_run_whose_terminal_is_gone_comes_to_its_end(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """The window is closed: SIGHUP, and every later write to the terminal fails."""
    output = tmp_path / "run"
    window, terminal = os.openpty()
    given = command(model, output, f"data.train={data}", *REWARD, "algorithm.name=grpo", "steps=40")
    process = subprocess.Popen(
        [sys.executable, "-m", "groupwise", *given],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    shown = b""
    while not (output / "metrics.jsonl").exists():
        shown += os.read(window, 65536)
    os.close(window)
    assert process.wait(timeout=120) == 0, shown
    assert newest_step(output) == 40
    assert (output / "final" / "model.safetensors").exists() and (output / "report.html").exists()


def newest_step(output: Path) -> int:
    steps = [int(p.name[5:]) for p in (output / "checkpoints").glob("step-*")]
    return max(steps, default=-1)

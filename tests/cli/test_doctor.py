"""The preflight: finds what would go wrong, says what to do, and moves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from groupwise.cli import main
from groupwise.cli.doctor import CheckResult, examine, passed
from groupwise.config import Config, load
from groupwise.config.memory import MemoryPlan, memory_plan
from groupwise.environments import END_OF_TURN, ENVIRONMENTS
from groupwise.kernels import Reference, active, using
from groupwise.machine import usable_cores
from groupwise.rewards.code.sandbox import unavailable
from groupwise.training.monitor.trackers import TRACKERS
from groupwise.training.stages.sft import save
from small_runs import settings, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny(), folder)
    return folder


def looked(model: Path, output: Path, *more: str) -> dict[str, CheckResult]:
    given = settings(output, f"model.path={model}", *more)
    return {check.name: check for check in examine(load("word-problems", given))}


def test_a_run_that_can_start_passes_every_check_and_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    checks = looked(model, tmp_path / "run")
    assert passed(list(checks.values())), [str(check) for check in checks.values()]
    assert len(checks) == 10 and not (tmp_path / "run").exists()
    assert "reference answers (answer tag) score 1; garbage scores 0" in checks["reward"].found
    assert "no parameter changed" in checks["a step at learning rate 0"].found


def test_checks_are_wrapped_by_words_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    assert {line[:6].strip() for line in lines} == {"ok", ""}, "the rest of a line is indented"


def test_the_command_prints_the_checks_and_fails_with_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "checks.json"
    given = settings(tmp_path / "run", f"model.path={model}", "data.train=/nowhere/x.jsonl")
    words = [w for setting in given for w in ("--set", setting)]
    assert main(["doctor", "word-problems", *words, "--json", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  data: data.train = '/nowhere/x.jsonl': no such file" in shown and "→ " in shown
    found = {check["name"]: check["passed"] for check in json.loads(file.read_text())}
    assert found["data"] is False and found["model"] is True
    assert found["tokenizer"] is None, "what a failure makes impossible is not tried"
    assert main(["doctor"]) == 0


@pytest.mark.parametrize(
    "name, more, says",
    [
        ("reward", ['rewards=[{name="token_repetition"}]'], "wrong earns"),
        ("data", ["data.eval=word_problems", "data.eval_split=train", "data.train_split=held_out",
                  "evaluation.prompts=20", "data.eval=SAME", "data.train=SAME"], "held-out"),
        ("data", ["data.max_prompt_tokens=3"], "at most 3 leave room"),
        ("memory", ["model.path=/nowhere/model"], "/nowhere/model"),
        ("run directory", ["output=/dev/null/run"], "cannot be written"),
    ],
)  # fmt: skip
def test_each_failure_is_found_where_it_is(
    name: str, more: list[str], says: str, model: Path, tmp_path: Path
) -> None:
    same = tmp_path / "same.jsonl"
    rows = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(5)]
    same.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checks = looked(model, tmp_path / "run", *(m.replace("SAME", str(same)) for m in more))
    assert checks[name].passed is False and says in checks[name].found
    assert checks[name].advice


def test_replies_as_turns_need_a_template_that_leaves_earlier_turns_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ("environment.name=calculator", "environment.layout=turns")
    check = looked(model, tmp_path / "run", *tools)["environment"]
    assert check.passed and "'</calculate>', between '<|end|><|tool|>' and '<|end|>" in check.found

    def forgetful(config: Any) -> Any:
        policy = tiny()
        policy.tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
            "{{ m['content'] }}{% else %}(short){% endif %}{% endfor %}"
        )
        return policy

    monkeypatch.setattr("groupwise.cli.doctor.load_configured", forgetful)
    check = looked(model, tmp_path / "run", *tools)["environment"]
    assert check.passed is False and "leaves out a call" in check.found


class Partner:
    stops = (END_OF_TURN,)


def test_replies_to_turns_need_the_layout_of_turns(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partner() -> Partner:
        return Partner()

    monkeypatch.setitem(ENVIRONMENTS._functions, "partner", partner)
    inline, turns = "environment.name=partner", "environment.layout=turns"
    check = looked(model, tmp_path / "run", inline)["environment"]
    assert check.passed is False and check.advice == "set environment.layout = 'turns'"
    check = looked(model, tmp_path / "run", inline, turns)["environment"]
    assert (
        check.passed and "after the end of a turn, between '<|user|>' and '<|end|>" in check.found
    )


def test_too_little_memory_and_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage, memory = shutil.disk_usage(tmp_path), psutil.virtual_memory()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=100_000))
    checks = looked(model, tmp_path / "run")
    assert checks["disk"].passed is False and "keep fewer" in checks["disk"].advice
    assert checks["memory"].passed is False
    advice = checks["memory"].advice  # which setting comes first depends on the kernels
    assert "set, cumulatively: update." in advice and "update.tokens_per_microbatch = " in advice


def test_memory_is_planned_with_the_kernels_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[type] = []

    def planned(config: Config) -> MemoryPlan:
        used.append(type(active()))
        return memory_plan(config)

    monkeypatch.setattr("groupwise.cli.doctor.memory_plan", planned)
    with using(active()):
        looked(model, tmp_path / "run", "model.kernels=torch")
    assert used == [Reference]


def test_more_threads_than_cores_are_found(model: Path, tmp_path: Path) -> None:
    check = looked(model, tmp_path / "run", f"threads={usable_cores() + 1}")["device"]
    assert check.passed is False and f"{usable_cores() + 1} threads" in check.found
    assert check.advice == f"set threads = {usable_cores()}"
    assert looked(model, tmp_path / "run", "threads=1")["device"].passed


def test_tags_that_decoding_drops(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def special(config: Any) -> Any:
        policy = tiny()
        policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
        policy.model.resize_token_embeddings(len(policy.tokenizer))
        return policy

    monkeypatch.setattr("groupwise.cli.doctor.load_configured", special)
    check = looked(model, tmp_path / "run")["tokenizer"]
    assert check.passed is False and "<answer>" in check.found
    assert "special=False" in check.advice


def test_the_check_of_a_step_starts_no_run_at_a_tracker(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def tracker(folder: Path, settings: Any) -> Any:
        begun.append(folder)
        raise ImportError("wandb", name="wandb")

    monkeypatch.setitem(TRACKERS, "wandb", tracker)
    checks = looked(model, tmp_path / "run", "logging.trackers=['wandb']")
    assert checks["a step at learning rate 0"].passed and begun == []
    assert checks["trackers"].passed


def test_a_tracker_that_does_not_exist_is_found_before_the_run(tmp_path: Path) -> None:
    check = looked(tmp_path / "no model", tmp_path / "run", "logging.trackers=['wandbe']")
    assert check["trackers"].passed is False and "did you mean wandb?" in check["trackers"].found


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_data_with_tests_in_place_of_answers_passes(model: Path, tmp_path: Path) -> None:
    """With validation prompts set apart, of which the step of the check needs none."""
    file = tmp_path / "programs.jsonl"
    rows = [{"prompt": f"Add {n}.", "test_list": [f"assert f(1) == {n + 1}"]} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [f"data.train={file}", "data.eval_split=train", f"data.eval={file}"]
    code = ['rewards=[{name="code_asserts"}]', "evaluation.validation=5"]
    checks = looked(model, tmp_path / "run", *more, *code)
    assert "no reference answers to score; garbage scores at most 0" in checks["reward"].found
    assert checks["reward"].passed
    assert checks["a step at learning rate 0"].passed, checks["a step at learning rate 0"]
    file.write_text("".join(json.dumps({**row, "test_list": ["f("]}) + "\n" for row in rows))
    assert not looked(model, tmp_path / "run", *more, *code)["reward"].passed

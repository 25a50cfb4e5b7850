"""The command: exit codes, one-line errors, tables as JSON, and a start that is quick."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise import __version__, errors
from groupwise.cli import main
from groupwise.config import load
from groupwise.prompts.templates import render
from groupwise.rewards import REWARDS
from groupwise.types import Prompt


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "groupwise", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"groupwise {__version__}\n"
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("train", "algorithms", "config", "chat"))
    assert main(["reward"]) == 0 and "try" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "prefer", "reward-model", "sft"])
def test_runs_are_resumed_without_their_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith("error: RECIPE: must be given, or --resume DIR")
    assert main([name, "--resume", str(tmp_path / "gone")]) == 2
    assert str(tmp_path / "gone") in capsys.readouterr().err


def test_rewards_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "list"]) == 0
    shown = capsys.readouterr().out
    assert "exact_answer(style='answer_tag', after='')\n    1 if the answer" in shown
    assert "reward_model(model=…" in shown  # a setting without a default must be given
    assert all(f"\n{name}" in f"\n{shown}" for name in REWARDS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "No such command 'trian'"),
        (["config"], "Missing argument"),
        (["config", "word-problems", "--sett", "a=1"], "No such option"),
        (["train", "--learning-rate", "1"], "as --set optimizer.learning_rate=VALUE or --set"),
        (["train", "--lr", "1"], "as --set optimizer.learning_rate=VALUE."),
        (["train", "--no-such", "1"], "as --set KEY=VALUE."),
        (["config", "word-problems", "--group-size", "4"], "as --set group_size=VALUE."),
        (["config", "word-problem"], "did you mean word-problems?"),
        (["config", "word-problems", "--set", "group_size=0"], "group_size = 0: must be greater"),
        (["algorithms", "gpro"], "did you mean grpo?"),
        (["chat", "bundled", "--temperature", "-1"], "--temperature"),
        (["config", "word-problems", "--json", "/nowhere/x.json"], "--json = '/nowhere/x.json'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(
    "raised, code, said",
    [
        (errors.RunError("the disk is full."), 1, "error: the disk is full.\n"),
        (errors.RewardError("len: 3 for 4."), 1, "error: len: 3 for 4.\n"),
        (errors.UsageError("steps = x: no."), 2, "error: steps = x: no.\n"),
        (KeyboardInterrupt(), 130, "error: interrupted.\n"),
        (ValueError("two\nlines"), 1, "error: ValueError: two lines (--debug shows where)\n"),
    ],
)
def test_each_failure_has_its_exit_code(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("groupwise.config.resolve", fail)
    assert main(["config", "word-problems"]) == code
    assert capsys.readouterr().err == said
    assert main(["config", "--debug", "word-problems"]) == code
    assert ("Traceback" in capsys.readouterr().err) is (code != 130)


def test_config_prints_values_and_their_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main(["config", "word-problems", "--set", "steps=7", "--json", str(file)]) == 0
    lines = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line
    }
    assert lines["steps"] == ["7", "--set"]
    assert lines["group_size"][-1] == "word-problems"
    assert lines["seed"] == ["0", "default"]
    written = json.loads(file.read_text())
    assert written["config"]["steps"] == 7 and written["origins"]["steps"] == "--set"


def test_a_recipe_cannot_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+009B alone begins an escape sequence, and JSON does not escape it; nor do file names."""
    recipe = tmp_path / "a\x1b[2Jb.toml"
    recipe.write_text('data.system = "x\u009b2J\u202e"\n')
    assert main(["config", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert "x\\x9b2J\\u202e" in shown and "a\\x1b[2Jb.toml" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_algorithms_prints_the_table_and_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from groupwise import ALGORITHMS

    assert main(["algorithms", "--json", str(tmp_path / "table.json")]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == ALGORITHMS.names()
    assert [row["name"] for row in json.loads((tmp_path / "table.json").read_text())] == shown
    assert main(["algorithms", "softrank"]) == 0
    assert "tau=0.5" in capsys.readouterr().out


def test_chat_answers_each_line_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tom has 3 cups.\nAnd 4 more?\n"))
    assert main(["chat", "bundled", "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five messages of 300 tokens each do not fit into a context of 1024."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(["1" * 300] * 5)))
    assert main(["chat", "bundled", "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


CHAT_TASK = ["--max-tokens", "24", "--set", "environment.corpus=closed_world"]


@pytest.mark.parametrize("task", ["search-one-hop", "research", "search-r1"])
def test_chat_prompts_as_the_recipe_does_and_calls_its_tools(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")
    question, seen = "What is the mayor of vova?", []

    def noted(prompt: Prompt, tokenizer: Any) -> list[int]:
        seen.append(prompt)
        return render(prompt, tokenizer)[-100:]  # the small model's context is short

    monkeypatch.setattr("groupwise.rollouts.chat.render", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO(question + "\n"))
    assert main(["chat", "bundled:search", "--task", task, *CHAT_TASK]) == 0, capsys.readouterr()
    data = load(task).data
    (prompt,) = seen
    if task == "research":
        assert [turn["content"] for turn in prompt.messages] == [data.system, question]
    elif task == "search-r1":
        assert data.wording is not None
        assert prompt.text == data.wording.replace("{question}", question)
    else:
        assert [turn["content"] for turn in prompt.messages] == [question]
        assert "<result>" in capsys.readouterr().out


def test_a_system_message_of_ones_own_replaces_that_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("bm25s", reason="needs bm25s: pip install 'groupwise[search]'")
    seen: list[Prompt] = []

    def noted(prompt: Prompt, tokenizer: Any) -> list[int]:
        seen.append(prompt)
        return render(prompt, tokenizer)[-100:]

    monkeypatch.setattr("groupwise.rollouts.chat.render", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    own = ["--system", "Be brief.", "--task", "research", *CHAT_TASK]
    assert main(["chat", "bundled:search", *own]) == 0
    assert seen[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_chat_refuses_a_recipe_without_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "bundled", "--task", "word-problems"]) == 2
    said = capsys.readouterr().err
    assert "'word-problems': must be a recipe with a section [environment]" in said
    assert "--system" in said


def test_chat_refuses_a_wording_of_several_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    several = ["--task", "search-one-hop", "--set", "data.wording={a} {b}"]
    assert main(["chat", "bundled:search", *several]) == 2
    assert "names the columns a, b" in capsys.readouterr().err


def test_chat_refuses_a_message_beyond_the_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1" * 5000 + "\n"))
    assert main(["chat", "bundled", "--max-tokens", "4"]) == 2
    assert "leave room for an answer" in capsys.readouterr().err


def test_a_reader_that_stops_early_sees_no_error() -> None:
    """`head` closes the pipe after a line while the table is still being printed."""
    done = subprocess.run(
        f"{sys.executable} -m groupwise algorithms | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and done.stdout.startswith("name")


def test_warnings_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    def warn(*_: object, **__: object) -> None:
        warnings.warn("rewards: some are negative.", stacklevel=2)
        raise errors.UsageError("stop.")

    monkeypatch.setattr("groupwise.config.resolve", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        main(["config", "word-problems"])
    assert capsys.readouterr().err == "warning: rewards: some are negative.\nerror: stop.\n"


def test_help_starts_quickly() -> None:
    """A command that is typed often must not load torch to say what it can do."""
    program = (
        "import sys\nfrom groupwise.cli import main\nmain(['train', '--help'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["train", "eval --task", "doctor", "reward try"])
def test_a_setting_that_does_not_exist_is_refused_before_torch_is_loaded(name: str) -> None:
    program = (
        "import sys; from groupwise.cli import main; "
        "code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    model = ["bundled"] if name.startswith("eval") else []
    given = [*name.split(), "word-problems", *model, "--set", "optimizr.name=adamw"]
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert "did you mean optimizer?" in done.stderr


def test_python_m_is_the_same_command() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"groupwise {__version__}\n")
    assert command("nothing").returncode == 2


def test_sigint_ends_with_130() -> None:
    program = (
        "import signal, groupwise.cli as cli, groupwise.config as config\n"
        # A shell's background job begins with the signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "config.resolve = lambda *a, **k: signal.raise_signal(signal.SIGINT)\n"
        "raise SystemExit(cli.main(['config', 'word-problems']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted.\n")

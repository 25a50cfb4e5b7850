"""Shell completion: what bash, zsh and fish offer after the words of a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main

BASH = """
eval "$(_GROUPWISE_COMPLETE=source_bash groupwise)"
COMP_WORDS=(groupwise train word-problems-dp); COMP_CWORD=2
_groupwise_completion groupwise
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_name(tmp_path: Path) -> None:
    command = tmp_path / "groupwise"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m groupwise "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", BASH],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "word-problems-dpo" in done.stdout.split(), done.stderr


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints for a shell that sets these variables."""

    def run(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("groupwise tra", {"train"}),
        ("groupwise train word-problems-dp", {"word-problems-dpo"}),
        ("groupwise doctor gsm8k-off", {"gsm8k-offline"}),
        ("groupwise pipeline long2", {"long2short-small"}),
        ("groupwise eval bundled --task countd", {"countdown"}),
        ("groupwise eval bundled --task countdown,korean-par", {"countdown,korean-particles"}),
        ("groupwise algorithms softrank_w", set()),
        ("groupwise compare countdown --algorithms grpo,cisp", {"grpo,cispo"}),
        ("groupwise show optimizer.learning_r", {"optimizer.learning_rate"}),
        ("groupwise train countdown --set optimizer.learning_r", {"optimizer.learning_rate="}),
    ],
)
def test_commands_and_names_are_completed(words: str, offered: set[str], complete: Any) -> None:
    place = str(len(words.split()) - 1)
    said = complete(_GROUPWISE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place)
    found = set(said.split())
    assert offered <= found if offered else not found


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", {"COMP_WORDS": "groupwise algorithms softran", "COMP_CWORD": "2"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "groupwise algorithms softran"}),
        (
            "fish",
            {
                "_TYPER_COMPLETE_ARGS": "groupwise algorithms softran",
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            },
        ),
    ],
)
def test_every_shell_gets_a_script_and_names(
    shell: str, words: dict[str, str], complete: Any
) -> None:
    assert "groupwise" in complete(_GROUPWISE_COMPLETE=f"source_{shell}")
    assert "softrank" in complete(_GROUPWISE_COMPLETE=f"complete_{shell}", **words)

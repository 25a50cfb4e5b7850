"""Shell completion: what bash, zsh and fish offer after the words of a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(_GROUPWISE_COMPLETE=source_bash groupwise)"
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_groupwise_completion groupwise
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables with which a shell finds the command under test."""
    command = tmp_path / "groupwise"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m groupwise "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
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
def test_bash_completes_commands_and_names(
    words: str, offered: set[str], environment: dict[str, str]
) -> None:
    done = subprocess.run(
        ["bash", "-c", BASH.format(words=words)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(done.stdout.split())
    assert offered <= found if offered else not found, (done.stdout, done.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_and_names(shell: str, environment: dict[str, str]) -> None:
    def run(**variables: str) -> str:
        return subprocess.run(
            ["groupwise"],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "groupwise" in run(_GROUPWISE_COMPLETE=f"source_{shell}")
    words = {
        "bash": {"COMP_WORDS": "groupwise algorithms softran", "COMP_CWORD": "2"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "groupwise algorithms softran"},
        "fish": {
            "_TYPER_COMPLETE_ARGS": "groupwise algorithms softran",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }
    assert "softrank" in run(_GROUPWISE_COMPLETE=f"complete_{shell}", **words[shell])

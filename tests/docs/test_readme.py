"""What the README shows is run, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.config import load, packaged
from groupwise.config.connect import make_scorer
from groupwise.types import Completion, Group, Prompt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_example_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks, "the README has no Python example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
        said = capsys.readouterr().out
        first, last = map(float, re.findall(r"([\d.]+) → ([\d.]+)", said)[0])
        assert last > first + 0.1, said
        assert (tmp_path / said.split()[-1]).is_file()


def test_the_recipe_shown_is_whole(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "my-recipe.toml").write_text(block, encoding="utf-8")
    config = load(tmp_path / "my-recipe.toml")
    assert config.data.system is not None and config.data.system.endswith("\\boxed{}.")
    assert make_scorer(config).submit(judged("It is \\boxed{10}.")).result().total == [1.0]


def judged(text: str) -> Group:
    """One answer to a prompt whose reference answer is 10."""
    prompt = Prompt(id="p", text="4 + 6?", answer="10")
    answer = Completion(tokens=[1], mask=[True], logprobs=[0.0], text=text, finish="stop")
    return Group(prompt=prompt, prompt_tokens=[1], completions=(answer,))


def test_every_command_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"(?m)(?:`|^)groupwise ([a-z-]+(?: try| list)?)\b", README))
    assert {"train", "eval", "demo", "reward try", "reward list"} <= named
    for command in sorted(named):
        assert main([*command.split(), "--help"]) == 0, command
        capsys.readouterr()


def test_every_packaged_recipe_named_exists() -> None:
    named = set(re.findall(r"groupwise (?:train|config|sft|doctor) ([a-z0-9.-]+)", README))
    recipes = {name for name in named if not name.endswith(".toml") and name[0] != "-"}
    assert recipes and recipes <= set(packaged())


def test_every_page_linked_exists() -> None:
    linked = set(re.findall(r"\]\(([\w./-]+)\)", README))
    assert {"docs/serving.md", "docs/trl.md"} <= linked
    assert [page for page in sorted(linked) if not (ROOT / page).exists()] == []

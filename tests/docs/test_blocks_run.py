"""Code blocks of the guides as far as they take no training: Python is executed, recipes, plans and
pipelines are read with all checks, and what commands override is checked against their recipes.

Commands themselves are not run here: they train for minutes, or need a GPU or a network.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from code_blocks import PAGES, ROOT, blocks, commands
from groupwise import ADVANTAGES
from groupwise.config import build, load, packaged, read
from groupwise.config.schema import Config
from groupwise.environments import ENVIRONMENTS
from groupwise.errors import UsageError
from groupwise.experiments import read_plan
from groupwise.pipelines import read_pipeline
from groupwise.pipelines.plan import packaged_pipelines
from groupwise.rewards import REWARDS
from groupwise.rewards.code.sandbox import unavailable

NOT_RUN = {
    'run = train("bundled"': "trains for a minute; test_readme.py runs it",
    "found = compare(": "trains ten runs; tests/experiments runs these functions",
    'model="Qwen/Qwen3-0.6B"': "downloads a model; tests/integrations trains with tools",
    "from trl import": "needs trl; tests/integrations trains with it",
}
"""Python blocks by a part of them, and why they are not executed."""


def pages_with(*languages: str) -> list[Any]:
    """Pages that have a block in one of these languages."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if any(blocks(page.read_text(encoding="utf-8"), *languages))
    ]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (ADVANTAGES, ENVIRONMENTS, REWARDS):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        if "rewards.code.sandbox" in block and unavailable():
            continue
        if not any(part in block for part in NOT_RUN):
            exec(compile(block, str(page), "exec"), names)


def test_reasons_for_not_running_a_block_are_those_of_blocks() -> None:
    every = [b for page in PAGES for b in blocks(page.read_text(encoding="utf-8"), "python")]
    assert [part for part in NOT_RUN if not any(part in block for block in every)] == []


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_blocks_are_recipes_plans_or_pipelines(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "toml"):
        values = tomllib.loads(block)
        path = tmp_path / "block.toml"
        path.write_text(block, encoding="utf-8")
        if "stages" in values:
            read_pipeline(path)
        elif "arms" in values:
            read_plan(path)
        elif values.keys() <= Config.model_fields.keys():
            build(merged(read("word-problems"), values))
        else:
            assert values.keys() == {"project"}, values.keys()


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, some of which are replaced."""
    joined = dict(values)
    for key, value in more.items():
        old = joined.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        joined[key] = merged(old, value) if both else value
    return joined


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_override_settings_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for name in ("mine.py", "steps.py"):  # functions that the commands of a page name
        found = [block for block in blocks(text, "python") if name in block or "steps" in block]
        (tmp_path / name).write_text("\n".join(found), encoding="utf-8")
    assert [wrong for words in commands(text) for wrong in refused(words)] == []


def refused(words: Sequence[str]) -> Iterator[str]:
    """What the recipe or pipeline of a command says of its overrides."""
    given = list(zip(words, words[1:], strict=False))
    overrides = [value for option, value in given if option == "--set"]
    overrides = [each for each in overrides if not each.startswith(PLACEHOLDERS)]
    try:
        if words[0] == "pipeline":
            if words[1:] and words[1] in packaged_pipelines():
                read_pipeline(words[1], overrides)
        elif overrides and "--import" not in words:  # whose module is the reader's
            named = [name for name in words[1:] if name in packaged()]
            load(named[0] if named else "word-problems", overrides)
    except UsageError as error:
        yield f"{' '.join(words)}: {error}"


PLACEHOLDERS = ("KEY", "SECTION", "STAGE", "*.")


def test_the_checks_can_fail() -> None:
    words = ["train", "word-problems", "--set", "optimizer.learning_rat=1"]
    assert ["learning_rat" in said for said in refused(words)] == [True]
    words = ["pipeline", "rlhf-small", "--set", "nowhere.steps=1"]
    assert ["nowhere" in said for said in refused(words)] == [True]

"""Code blocks of all pages: commands and options exist, Python compiles and imports, TOML parses.

`test_blocks_run.py` runs what takes no training, `test_readme.py` the example of the README.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from code_blocks import PAGES, ROOT, blocks, commands
from groupwise.cli import app
from groupwise.config import load, packaged
from groupwise.config.data import load_train
from groupwise.pipelines.plan import packaged_pipelines

OPTIONAL = ("trl", "vllm", "unsloth")
"""Packages that examples import and that may be absent."""


@functools.cache
def whole_command() -> Any:
    """The command with all of its subcommands."""
    return typer.main.get_command(app)


def fault(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    command = whole_command()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    if getattr(command, "commands", None) and words and not words[0].startswith("-"):
        return f"no command {words[0]!r}"
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    missing = [name for name in options if name not in {*known, "--help", "--import"}]
    return f"{command.name} has no {missing}" if missing else None


def unknown_recipe(words: list[str]) -> str | None:
    """The packaged recipe or pipeline that a command names and that does not exist."""
    if len(words) < 2 or words[0] not in ("train", "doctor", "compare", "variance", "pipeline"):
        return None
    name = words[1]
    known = {*packaged(), *packaged_pipelines()}
    path = re.search(r"[./A-Z…]|^-", name)
    return None if path or name in known else name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_and_recipes_exist(page: Path) -> None:
    found = list(commands(page.read_text(encoding="utf-8")))
    wrong = [(words, said) for words in found if (said := fault(words) or unknown_recipe(words))]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile_and_their_imports_exist(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                if node.module.partition(".")[0] not in OPTIONAL:
                    module = importlib.import_module(node.module)
                    for each in node.names:
                        assert hasattr(module, each.name), f"{node.module}.{each.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_toml_blocks_parse(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8"), "toml"):
        assert tomllib.loads(block), block


def unmarked(text: str) -> Iterator[str]:
    """Blocks that do not name their language, and commands that cannot be copied as they are."""
    outside = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.DOTALL | re.M)
    yield from re.findall(r"^```$", outside, flags=re.M)[::2]
    yield from re.findall(r"^(?![* ]).*\n\n(    .*)", outside, flags=re.M)
    for block in blocks(text, "sh"):
        yield from re.findall(r"^\$ .*$", block, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_name_their_language_and_commands_can_be_copied(page: Path) -> None:
    assert list(unmarked(page.read_text(encoding="utf-8"))) == []


def test_the_recipes_of_the_data_page_load_and_read_its_rows(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (row,) = blocks(text, "json")
    for name in ("shop", "shop-test", "easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text(row, encoding="utf-8")
    recipe, sources = blocks(text, "toml")
    path = tmp_path / "shop.toml"
    for block in (recipe, recipe + sources.replace('"easy.', f'"{tmp_path}/easy.')
                  .replace('"hard.', f'"{tmp_path}/hard.')):  # fmt: skip
        path.write_text(block.replace('"shop', f'"{tmp_path}/shop'), encoding="utf-8")
        prompts = load_train(load(path))
        assert {prompt.answer for prompt in prompts} == {"19"}


def test_the_checks_can_fail() -> None:
    assert fault(["train", "x", "--nonsense"]) == "train has no ['--nonsense']"
    assert fault(["trane", "x"]) == "no command 'trane'"
    assert unknown_recipe(["train", "word-problem"]) == "word-problem"
    page = "```sh\ngroupwise eval A  # words\n```\n`groupwise chat M`"
    assert list(commands(page)) == [["eval", "A"], ["chat", "M"]]
    assert list(unmarked("```\na\n```\n\n    b\n\n```sh\n    c\n```\n")) == ["```", "    b"]
    assert list(unmarked("```sh\n$ groupwise demo\n```\n")) == ["$ groupwise demo"]

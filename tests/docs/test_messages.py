"""The page of error messages has every message of the source."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from groupwise import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "groupwise"
PASSED_ON = {
    "cli/doctor.py",
    "config/checks.py",
    "config/connect.py",
    "training/distillation.py",
    "training/process.py",
    "config/data.py",
    "distributed/actors.py",
    "distributed/connection.py",
    "environments/isolated.py",
    "distributed/learner.py",
    "experiments/variance.py",
    "experiments/worker_pool.py",
    "algorithms/binding.py",
    "integrations/trl/fields.py",
    "integrations/trl/rewards.py",
    "pipelines/checks.py",
    "pipelines/resolved.py",
    "registry.py",
    "rewards/code/reward.py",
    "rewards/code/suite.py",
    "rewards/judges/endpoint.py",
    "rewards/scoring/pipeline.py",
    "training/hub.py",
    "environments/retrieval/corpus.py",
}
"""Files that raise an error with the text of another one, or of a table."""


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    """`docs/messages.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        return __import__("messages")


def constants(node: ast.AST) -> list[str]:
    """The constant parts of the strings that an expression is made of."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp):
        return constants(node.left) + constants(node.right)
    return []


def test_every_raised_error_is_among_the_messages(reader: ModuleType) -> None:
    known, _ = reader.messages()
    texts: dict[str, str] = {}
    for message in known:
        texts[message.module] = f"{texts.get(message.module, '')}\n{message.text}"
    raised = missing = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            if hasattr(errors, ast.unparse(node.exc.func)) and node.exc.args:
                parts = [part for part in constants(node.exc.args[0]) if part.strip(".: ")]
                raised += 1
                missing += any(part not in texts.get(module, "") for part in parts)
    assert raised > 700
    assert missing == 0


def test_errors_without_a_text_of_their_own_pass_on_another(reader: ModuleType) -> None:
    _, passed_on = reader.messages()
    assert {place.partition(":")[0] for place in passed_on} == PASSED_ON


def test_messages_are_read_with_their_values_left_out(reader: ModuleType, tmp_path: Path) -> None:
    source = """
        class Lost(RunError):
            pass

        def wrong(field, why) -> UsageError:
            return UsageError(f"{field} = {value!r}: {why}.")

        def check(x):
            said = "is too long" if x else "is empty"
            raise wrong("steps", f"must be at least {x}")
            raise Lost(f"disk: {said}" + "; free " + some(x))
            raise CheckFailed("no compiler", "install g++")
            raise UsageError(f"{where} = {value}: {said_elsewhere}.")
            raise KeyError("not shown")
        """
    (tmp_path / "own.py").write_text(
        "class RunError(GroupwiseError): ...\nclass UsageError(GroupwiseError): ...\n"
        + textwrap.dedent(source),
        encoding="utf-8",
    )
    known, passed_on = reader.messages(tmp_path)
    assert [(message.kind, message.text) for message in known] == [
        ("UsageError", "steps = …: must be at least …."),
        ("Lost", "disk: …; free …"),
        ("CheckFailed", "no compiler: install g++"),
    ]
    assert passed_on == ["own.py: UsageError(f'{where} = {value}: {said_elsewhere}.')"]


def test_the_page_links_the_settings_that_a_message_names(reader: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        pages = __import__("error_pages")
    text = pages.errors_of("training")
    assert re.search(
        r"lower \[optimizer\.learning_rate\]\(\.\./settings/optimizer\.md#learning_rate\)", text
    )
    assert all(f"](errors/{name}.md)" in pages.errors() for name in ("training", "config"))

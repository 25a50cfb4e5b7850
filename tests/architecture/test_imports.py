"""Imports point one way; heavy packages are loaded by who uses them, when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise

PACKAGE = Path(groupwise.__file__).parent

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"registry", "types", "laws"}),
    frozenset({"advantages", "losses", "filters", "diagnostics", "costs"}),
    frozenset({"algorithms", "models"}),
    frozenset({"prompts", "rollouts", "rewards", "updates", "testing", "journal", "watchdog"}),
    frozenset({"config", "source"}),
    frozenset({"execution", "checkpoint", "evaluation", "logs", "alarms", "guards", "interrupts"}),
    frozenset({"stages", "report", "keeping", "resuming", "lock", "arguments"}),
    frozenset({"trainer", "data"}),
    frozenset({"run"}),
    frozenset({"demo", "experiments", "doctor", "integrations", "chat", "assessment", "trial"}),
    frozenset({"lab"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
"""Each module or package imports from lower layers only; within its own layer from itself only."""

PURE = LAYERS[0] | LAYERS[1] | LAYERS[2]
PURE_PACKAGES = {"torch", "jaxtyping", "groupwise"}
HEAVY = ("transformers", "datasets", "matplotlib", "peft", "scipy", "vllm", "ray", "trl")

SOURCES = sorted(PACKAGE.rglob("*.py"))


def owner(path: Path) -> str:
    """The module or package directly under groupwise that a file belongs to."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    pytest.fail(
        f"groupwise.{name} is in no layer: list it in LAYERS of tests/architecture/test_imports.py"
    )


def imported(source: str, path: Path) -> set[str]:
    """Every module that a file names in an import statement, wherever it stands, in full."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(PACKAGE.parent).parts[: -node.level]
                module = ".".join([*package, *([module] if module else [])])
            found |= (
                {f"groupwise.{alias.name}" for alias in node.names}
                if module == "groupwise"
                else {module}
            )
    return found


def wrong_imports(source: str, path: Path) -> list[str]:
    """The imports of a file that do not point to a lower layer."""
    name = owner(path)
    own = layer_of(name)
    wrong = []
    for module in imported(source, path):
        root, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if root != "groupwise" or target in ("", name, "__version__"):
            continue
        if layer_of(target) >= own:
            wrong.append(f"{name} (layer {own}) imports {target} (layer {layer_of(target)})")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_to_lower_layers(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    assert wrong_imports(path.read_text(), path) == []


@pytest.mark.parametrize(
    "source, name, wrong",
    [
        ("from groupwise.trainer import Trainer", "advantages/softrank.py", True),
        ("def f():\n    import groupwise.cli", "trainer.py", True),
        ("from groupwise import trainer", "config/sections.py", True),
        ("from ..filters import everything", "advantages/softrank.py", True),
        ("from .baselines import zscore", "advantages/softrank.py", False),
        ("from groupwise.types import Batch", "advantages/softrank.py", False),
    ],
)
def test_the_check_of_imports_sees_every_form(source: str, name: str, wrong: bool) -> None:
    assert bool(wrong_imports(source, PACKAGE / name)) is wrong


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if owner(p) in PURE],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_pure_layers_need_torch_only(path: Path) -> None:
    packages = {module.partition(".")[0] for module in imported(path.read_text(), path)}
    assert packages - PURE_PACKAGES - set(sys.stdlib_module_names) == set()


def loaded_by(code: str) -> set[str]:
    """The top-level packages in sys.modules after running code in a fresh interpreter."""
    program = f"import sys\n{code}\nprint('LOADED', *{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("LOADED ")[2].split())


def test_importing_groupwise_is_light() -> None:
    loaded = loaded_by("import groupwise")
    assert loaded.isdisjoint({*HEAVY, "torch"})


def test_help_is_light() -> None:
    loaded = loaded_by("from groupwise.cli import main\nassert main(['--help']) == 0")
    assert loaded.isdisjoint({*HEAVY, "torch"})


@pytest.mark.parametrize("module", ["groupwise.types", "groupwise.advantages", "groupwise.losses"])
def test_the_mathematics_loads_no_heavy_package(module: str) -> None:
    if module.rpartition(".")[2] not in {owner(p) for p in SOURCES}:
        pytest.fail(f"{module} is gone")
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_rewards_load_without_torch() -> None:
    """Worker processes import the rewards, and torch would cost each of them seconds and memory."""
    assert loaded_by("import groupwise.rewards").isdisjoint({*HEAVY, "torch"})

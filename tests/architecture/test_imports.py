"""Imports point one way; heavy packages are loaded by who uses them, when they are used."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import groupwise

PACKAGE = Path(groupwise.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "extensions", "machine", "registry", "settings", "types"}),
    frozenset({"algorithms"}),
    frozenset({"kernels"}),
    frozenset({"models"}),
    frozenset({"prompts", "environments", "rollouts", "rewards", "updates", "testing"}),
    frozenset({"config"}),
    frozenset({"evaluation", "rundir"}),
    frozenset({"report"}),
    frozenset({"distributed"}),
    frozenset({"training"}),
    frozenset({"experiments", "integrations", "pipelines"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
"""The rows of ARCHITECTURE.md, from the bottom up: a package imports from its own row and below."""

PURE = (LAYERS[0] | LAYERS[1]) - {"settings"}
PURE_PACKAGES = {"torch", "jaxtyping", "groupwise"}
HEAVY = ("transformers", "datasets", "matplotlib", "peft", "scipy", "vllm", "ray", "trl")

ROOT = {"__init__", "__main__", "types", "errors", "registry"}
"""The only modules at the root of the package; everything else lives in a folder."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


parsed = functools.cache(ast.parse)


def owner(path: Path) -> str:
    """The module or package directly under groupwise that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    """The row of a package, counted from the bottom."""
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    pytest.fail(
        f"groupwise.{name} is in no layer: list it in LAYERS of tests/architecture/test_imports.py"
    )


def imports_of(source: str, path: Path) -> set[str]:
    """Every module that a file names in an import statement, wherever it stands, in full."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        found |= _named(node, path)
    return found


def imports_that_run(source: str, path: Path) -> set[str]:
    """The modules that a file imports when it is loaded or inside its functions, without those for
    type checkers."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        found |= _named(node, path)
        waiting += ast.iter_child_nodes(node)
    return found


def _named(node: ast.AST, path: Path) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    module = node.module or ""
    if node.level:
        package = path.relative_to(PACKAGE.parent).parts[: -node.level]
        module = ".".join([*package, *([module] if module else [])])
    inside = {f"{module}.{alias.name}" for alias in node.names}
    submodules = {name for name in inside if name in MODULES}
    rest = {name for name in inside if name not in MODULES}
    return submodules | ({module} if rest else set())


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def wrong_imports(source: str, path: Path) -> list[str]:
    """The imports of a file that point to a higher layer."""
    name = owner(path)
    own = layer_of(name)
    wrong = []
    for module in sorted(imports_of(source, path)):
        root, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if root != "groupwise" or target in ("", name, "__version__"):
            continue
        if layer_of(target) > own:
            wrong.append(f"{path.relative_to(PACKAGE)}: {name} imports {target}, a higher layer")
    return wrong


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The circles of imports: strongly connected sets of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_imports_point_to_lower_layers() -> None:
    files = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
    assert [line for path in files for line in wrong_imports(path.read_text(), path)] == []


def documented_layers(page: str) -> list[frozenset[str]]:
    """The rows of the table in section "Layers", from the bottom up."""
    section = page.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [frozenset(re.findall(r"`(\w+)`", row)) for row in reversed(rows)]


def test_the_picture_of_the_layers_is_the_one_that_is_tested() -> None:
    assert documented_layers(ARCHITECTURE.read_text(encoding="utf-8")) == list(LAYERS)


def test_every_package_is_in_one_layer() -> None:
    packages = {owner(path) for path in SOURCES} - {"__init__"}
    assert sorted(name for names in LAYERS for name in names) == sorted(packages)


def test_there_are_no_import_circles() -> None:
    """Neither among modules nor hidden inside functions. `groupwise` itself, whose names are
    imported on first use, is left out."""
    graph = {
        name: sorted(
            (imports_that_run(path.read_text(), path) & MODULES.keys()) - {name, "groupwise"}
        )
        for name, path in MODULES.items()
    }
    assert cycles(graph) == []


def test_imports_inside_functions_count_as_part_of_a_circle() -> None:
    path = PACKAGE / "training" / "trainer.py"
    inside = "class A:\n    def f(self):\n        from groupwise.cli import demo"
    for_types = "if TYPE_CHECKING:\n    from groupwise.cli import demo"
    assert imports_that_run(inside, path) == {"groupwise.cli.demo"}
    assert imports_that_run(for_types, path) == set()


def test_cycles_are_found() -> None:
    assert cycles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    assert cycles({"a": ["b"], "b": []}) == []


def test_the_root_of_the_package_holds_the_nouns_only() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - ROOT == set()


@pytest.mark.parametrize(
    "source, name, wrong",
    [
        ("from groupwise.training.trainer import Trainer", "algorithms/filters.py", True),
        ("def f():\n    import groupwise.cli", "training/trainer.py", True),
        ("from groupwise import training", "config/schema.py", True),
        ("from ..config import schema", "algorithms/filters.py", True),
        ("from .baselines import zscore", "algorithms/advantages/softrank.py", False),
        ("from groupwise.types import Batch", "algorithms/advantages/softrank.py", False),
    ],
)
def test_the_check_of_imports_sees_every_form(source: str, name: str, wrong: bool) -> None:
    assert bool(wrong_imports(source, PACKAGE / name)) is wrong


def test_pure_layers_need_torch_only() -> None:
    extra = {
        f"{path.relative_to(PACKAGE)}: {package}"
        for path in SOURCES
        if owner(path) in PURE
        for package in {m.partition(".")[0] for m in imports_of(path.read_text(), path)}
        if package not in PURE_PACKAGES | set(sys.stdlib_module_names)
    }
    assert extra == set()


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


def test_the_mathematics_loads_no_heavy_package() -> None:
    assert loaded_by("import groupwise.types, groupwise.algorithms").isdisjoint(HEAVY)


def test_rewards_load_without_torch() -> None:
    """Worker processes import the rewards, and torch would cost each of them seconds and memory."""
    assert loaded_by("import groupwise.rewards").isdisjoint({*HEAVY, "torch"})


def test_chat_templates_are_rendered_in_one_place() -> None:
    """They are programs of strangers, and only `template_text` limits them."""
    rendering = [path for path in SOURCES if ".apply_chat_template(" in path.read_text()]
    assert [module_name(path) for path in rendering] == ["groupwise.prompts.templates"]


def test_warnings_are_issued_in_one_place() -> None:
    """`errors.warn` names the line of the caller's code instead of one of the package."""
    warning = [path for path in SOURCES if "warnings.warn(" in path.read_text()]
    assert [module_name(path) for path in warning] == ["groupwise.errors"]

"""Tests that call a program, and which of their names the program supplies.

That choice is part of the verdict, so it is made from the tests alone, before the program runs. A
builtin or a module of the standard library is the real one whatever the program calls by that
name: `abs = lambda x: 0` would pass half of all tests.
"""

from __future__ import annotations

import ast
import builtins
import functools
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from groupwise.rewards.base import Unjudgeable
from groupwise.rewards.code.extraction import parsed

_BUILTINS = frozenset(dir(builtins))
_MODULES = frozenset(sys.stdlib_module_names) - _BUILTINS

AMBIGUOUS = "no test names the function it tests"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tests that call a program: Python source that passes unless it raises.

    Names that a test reads and does not define are the program's (functions, classes). Builtins and
    modules of the standard library are the real ones, unless the tests call nothing else: then the
    one builtin or module that they call is the function under test. A module's name that is called
    is a function of the program too, since modules cannot be called.

    Attributes:
        sources: the tests, each run in a namespace of its own.
        setup: source that runs before them, once, in the judge's process.
        entry: a name that is the program's even if it is reserved or `setup` defines it.
        counted: a test reports by calling `__count__(bool)`, any number of times.
        stop: leave out the tests after the first one that does not pass.
    """

    sources: Sequence[str]
    setup: str = ""
    entry: str = ""
    counted: bool = False
    stop: bool = True


@dataclass(frozen=True, kw_only=True)
class BoundSource:
    """A test, the names that the program supplies, the standard modules that the judge supplies,
    and what the test imports unconditionally, as module and name ("" for the module)."""

    source: str
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    imports: tuple[tuple[str, str], ...] = ()


def bound_sources(suite: Suite) -> tuple[BoundSource, ...] | None:
    """The setup and the tests with their names; None where the function under test is ambiguous.

    Example:
        >>> bound = bound_sources(Suite(sources=["assert abs(f(1) - math.pi) < 1"]))
        >>> bound[1].names, bound[1].modules
        (('f',), ('math',))
        >>> bound_sources(Suite(sources=["assert sum(1, 2) == 3"]))[1].names
        ('sum',)
    """
    setup, tests = _reads(suite.setup), [_reads(source) for source in suite.sources]
    own = setup.defined - {suite.entry}
    read = frozenset().union(setup.names, *(test.names for test in tests)) - own
    called = frozenset().union(setup.called, *(test.called for test in tests))
    supplied = read - _BUILTINS - (_MODULES - called) | read & {suite.entry}
    if not supplied:
        candidates = _innermost(tests) - own
        if len(candidates) > 1:
            return None
        supplied = candidates
    return tuple(
        BoundSource(
            source=source,
            names=tuple(sorted(reads.names & supplied)),
            modules=tuple(sorted(reads.names & _MODULES - supplied - own - reads.defined)),
            imports=reads.imports,
        )
        for source, reads in zip((suite.setup, *suite.sources), (setup, *tests), strict=True)
    )


def unfit(bound: Sequence[BoundSource]) -> str:
    """Why tests cannot judge a program in another process, "" where they can.

    Example:
        >>> suite = Suite(sources=["class B(A): pass\\nassert B().f() == 1"])
        >>> unfit(bound_sources(suite))
        "a test derives a class from A, which stays in the program's process"
    """
    return next(filter(None, (_unfit(each.source, each.names) for each in bound)), "")


@functools.lru_cache(maxsize=1024)
def _unfit(source: str, names: tuple[str, ...]) -> str:
    tree = parsed(source)
    nodes = [] if tree is None else list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for base in (base for node in classes for base in node.bases):
        if isinstance(base, ast.Name) and base.id in names:
            what = f"derives a class from {base.id}"
            return f"a test {what}, which stays in the program's process"
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    for kind in (name for node in nodes for name in _compared_types(node, caught)):
        if kind in names:
            return f"a test asks for the type {kind} itself, which stays in the program's process"
    if tree is not None and (manager := next(_ending(tree, names), None)):
        return f"a test raises what {manager} should end, which the program cannot do for a test"
    methods = {part for node in classes for part in node.body}
    attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    read_back = any(name in _READ_BACK or name.startswith("assert_") for name in attributes)
    replaced = {name for node in nodes if node not in methods for name in _replaced(node)}
    replaced -= _reads(source).called
    for stream in sorted(replaced & (_STREAMS if read_back else _INPUTS)):
        return f"a test replaces {stream}, which the program does not share with it"
    return ""


def _compared_types(node: ast.AST, caught: set[str | None]) -> list[str]:
    """Names that a comparison has beside `type(…)`, `type(…).__name__` or `….__class__`; exceptions
    have the same class on both sides."""
    if not isinstance(node, ast.Compare):
        return []
    sides = [node.left, *node.comparators]
    for side in sides:
        while isinstance(side, ast.Attribute) and side.attr in ("__name__", "__qualname__"):
            side = side.value
        asked = side.value if isinstance(side, ast.Attribute) and side.attr == "__class__" else None
        if isinstance(side, ast.Call) and ast.unparse(side.func) == "type" and side.args:
            asked = side.args[0]
        of_error = (isinstance(asked, ast.Name) and asked.id in caught) or (
            isinstance(asked, ast.Attribute) and asked.attr in ("exception", "value")
        )
        if asked is not None and not of_error:
            found = [each.id for each in sides if isinstance(each, ast.Name)]
            return found + [str(e.value) for e in sides if isinstance(e, ast.Constant)]
    return []


def _ending(node: ast.AST, names: Sequence[str]) -> Iterator[str]:
    """The program's context managers around a `raise` of the test that nothing else ends."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try):
            continue
        if isinstance(child, ast.With | ast.AsyncWith):
            made = [ast.unparse(item.context_expr).partition("(")[0] for item in child.items]
            if any(isinstance(statement, ast.Raise) for statement in child.body):
                yield from (name for name in made if name in names)
        yield from _ending(child, names)


_INPUTS = frozenset(["stdin", "input"])
_STREAMS = _INPUTS | {"stdout", "stderr", "print"}
_READ_BACK = frozenset(["getvalue", "call_args", "call_args_list", "mock_calls", "called"])
_PATCHES = frozenset(["patch", "setattr", "object"])


def _replaced(node: ast.AST) -> list[str]:
    """The streams and functions of the process that a statement or call replaces with others."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        made = isinstance(node.value, ast.Lambda)
        own = [t.id for t in node.targets if made and isinstance(t, ast.Name)]
        named = [ast.unparse(t) for t in node.targets if isinstance(t, ast.Attribute)]
        return own + _streams(named)
    if not isinstance(node, ast.Call):
        return []
    function = ast.unparse(node.func).rpartition(".")[2]
    if function.startswith("redirect_"):
        return [function.removeprefix("redirect_")]
    if function not in _PATCHES:
        return []
    texts = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
    return _streams([*texts, *(f"{ast.unparse(node.args[0])}.{text}" for text in texts)])


def _streams(names: Sequence[str]) -> list[str]:
    parts = [name.rpartition(".") for name in names]
    return [part[2] for part in parts if part[0] in ("sys", "builtins", "__builtins__")]


def judging(suite: Suite) -> Suite:
    """The suite without the tests that pass whatever the program is: those that call nothing of it,
    and those that only define, import or compare something.

    Raises:
        Unjudgeable: no test is left, or one does not compile.

    Example:
        >>> judging(Suite(sources=["import math", "assert f(1)", "f(1) == 2"])).sources
        ['assert f(1)']
        >>> judging(Suite(sources=["def test_f(): assert f(1)"]))
        Traceback (most recent call last):
        ...
        groupwise.rewards.base.Unjudgeable: every test passes whatever the program is: ...
    """
    trees = []
    for source in (suite.setup, *suite.sources):
        try:
            trees.append(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unjudgeable(f"a test does not compile: {error}") from None
    bound = bound_sources(suite)
    reason = AMBIGUOUS if bound is None else unfit(bound)
    if bound is None or reason:
        raise Unjudgeable(reason or "")
    asked = [
        each.source
        for each, tree in zip(bound[1:], trees[1:], strict=True)
        if (each.names or bound[0].names) and not all(map(_idle, tree.body))
    ]
    if not asked:
        raise Unjudgeable(
            "every test passes whatever the program is: none calls it (what a test imports is not "
            "the program's), or they only define functions or compare without assert"
        )
    return replace(suite, sources=asked)


def _idle(statement: ast.stmt) -> bool:
    """Whether a statement of a test decides nothing by itself."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Compare | ast.BoolOp | ast.Constant | ast.Name)
    return isinstance(
        statement,
        ast.FunctionDef
        | ast.AsyncFunctionDef
        | ast.ClassDef
        | ast.Import
        | ast.ImportFrom
        | ast.Pass,
    )


@dataclass(frozen=True, kw_only=True)
class _Reads:
    """What a source does with global names; `inner` are those of which no call contains another
    call, `imports` what is imported outside of `try`."""

    names: frozenset[str] = frozenset()
    defined: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    imports: tuple[tuple[str, str], ...] = ()


@functools.lru_cache(maxsize=1024)
def _reads(source: str) -> _Reads:
    try:
        table, tree = symtable.symtable(source, "<test>", "exec"), ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Reads()  # the judge reports that it does not compile
    read, defined = set[str](), set[str]()
    made = {s.get_name() for s in table.get_symbols() if s.is_imported() or s.is_namespace()}
    tables = [table]
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        for symbol in scope.get_symbols():
            if scope is table or symbol.is_global():
                read |= {symbol.get_name()} if symbol.is_referenced() else set()
                defined |= {symbol.get_name()} if symbol.is_assigned() else set()
    bound = set(_bound_by_comprehensions(tree))
    read, defined = read - bound, defined - bound
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {node: node.func.id for node in calls if isinstance(node.func, ast.Name)}
    outer = {
        name
        for node, name in named.items()
        if any(inner in named for inner in ast.walk(node) if inner is not node)
    }
    return _Reads(
        names=frozenset(name for name in read - made if not name.startswith("__")),
        defined=frozenset(defined | made),
        called=frozenset(named.values()),
        inner=frozenset(named.values()) - outer,
        imports=tuple(_imports(tree)),
    )


def _bound_by_comprehensions(tree: ast.AST) -> set[str]:
    """Names that are variables of comprehensions and nothing else. Since Python 3.12, symbol tables
    list them among the names of the scope around."""
    bound, free = set[str](), set[str]()
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while waiting:
        node, variables = waiting.pop()
        if isinstance(node, ast.Name):
            (bound if node.id in variables else free).add(node.id)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            first = node.generators[0]
            waiting.append((first.iter, variables))  # It is evaluated outside.
            targets = [name for part in node.generators for name in ast.walk(part.target)]
            variables |= {name.id for name in targets if isinstance(name, ast.Name)}
            children = [child for child in children if child is not first]
            children += [first.target, *first.ifs]
        waiting += [(child, variables) for child in children]
    return bound - free


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield from ((module, alias.name) for alias in node.names)
    elif not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imports(child)


def _innermost(tests: Sequence[_Reads]) -> frozenset[str]:
    """The reserved names that every test calls, without calling another one inside."""
    if not tests:
        return frozenset()
    called = [test.called & test.names for test in tests]
    every = frozenset.intersection(*called)
    inner = every & frozenset.intersection(*(test.inner for test in tests))
    return inner or every

"""Finding the program in a completion."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*\{?\.?([\w+.-]*)")
_ELEMENTS = ("answer", "code", "solution")
_TAG = re.compile(r"</think>|</?(?:answer|code|solution)>")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)
_MARK = r"(?:<\|\w+\|>|<｜[\w▁]+｜>|</s>|<eos>|<end_of_turn>)"
_END_OF_TURN = re.compile(_MARK + r"|\[/?INST\]")
_LAST_MARK = re.compile(_MARK + r"\s*\Z")
_LONGEST_MARK = 60
_MOST_BLOCKS = 50


def extract_code(text: str, *, defines: Sequence[str] = ()) -> str:
    """The program in a completion.

    Reasoning that ends in `</think>` is left out, the last `<answer>`, `<code>` or `<solution>`
    element is taken where there is one, and marks of the end of a turn are removed behind a fence
    and at the end of the text. Tags inside a program, such as `"</think>"` in one of its strings,
    are left alone where the program compiles.

    Among the fenced blocks in what is left, those come first that can pass: they compile and define
    one of the wanted names, or do more than state values where no name is wanted (expected output
    does not). Among these, a block that is labelled as Python wins over others, and then the last
    one wins. The label does not come first, because examples of use are often labelled too. A
    block that is never closed reaches to the end; imports of earlier blocks that it uses are put
    before it. Text without a block is the program itself.

    Args:
        text: the completion.
        defines: functions or classes that the tests use.

    Returns:
        Python source, perhaps none that compiles.

    Example:
        >>> extract_code("Try this:\\n```python\\ndef f():\\n    return 1\\n```\\nIt works.")
        'def f():\\n    return 1\\n'
        >>> extract_code("<think>`f`?</think><answer>def f(): return 1</answer>")
        'def f(): return 1'
        >>> extract_code("    return x + 1")
        '    return x + 1'
    """
    text = _without_marks(text)
    if parsed(text) or parsed(f"if 1:\n{text}"):  # also the body of a function
        return text
    text = _answer_in(text)
    found = [block for block in _blocks(text)[-_MOST_BLOCKS:] if block.is_python]
    if not found:
        return text
    ranks = [_rank(block, defines) for block in found]
    best = max(range(len(found)), key=lambda i: (ranks[i], i))
    return _with_imports(found[best].code, [block.code for block in found[:best]])


def _without_marks(text: str) -> str:
    end = len(text)
    while found := _LAST_MARK.search(text, max(end - _LONGEST_MARK, 0), end):
        end = found.start()
    return text[:end]


def _answer_in(text: str) -> str:
    """What follows the reasoning, or the last element with the answer in it."""
    programs = [
        (block.start, block.end)
        for block in _blocks(text)[-_MOST_BLOCKS:]
        if _TAG.search(block.code) and block.is_python and parsed(block.code)
    ]
    tags = [
        tag
        for tag in _TAG.finditer(text)
        if not any(start <= tag.start() < end for start, end in programs)
    ]
    start, end = 0, len(text.rstrip())
    for tag in tags:
        if tag[0] == "</think>":
            start, end = (tag.end(), end) if tag.end() < end else (start, tag.start())
    for name in _ELEMENTS:
        opened = [tag.end() for tag in tags if tag[0] == f"<{name}>" and start <= tag.start() < end]
        if opened:
            closed = (tag.start() for tag in tags if tag[0] == f"</{name}>")
            return text[opened[-1] : min((at for at in closed if at >= opened[-1]), default=end)]
    return text[start:end]


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A fenced block.

    Attributes:
        language: its label.
        code: its content.
        start, end: where it stands in the text, fences included.
    """

    language: str
    code: str
    start: int
    end: int

    @property
    def is_python(self) -> bool:
        return not self.language or _PYTHON.fullmatch(self.language) is not None


def _rank(block: _Block, defines: Sequence[str]) -> tuple[bool, ...]:
    tree = parsed(block.code)
    acts = tree is not None and any(
        not isinstance(node, ast.Expr) or any(isinstance(n, ast.Call) for n in ast.walk(node))
        for node in tree.body
    )
    defines_one = any(defined(block.code, name) for name in defines)
    can_pass = tree is not None and (defines_one if defines else acts)
    return can_pass, bool(block.language), defines_one, tree is not None, acts


def _blocks(text: str) -> list[_Block]:
    """Language and content of every fenced block, line by line: time grows with the text alone.

    Content loses the indentation of its fence, as in a list. A fence that is indented by more than
    3 characters beyond the opening one does not close the block; marks of the end of a turn may
    follow the one that does.
    """
    blocks: list[_Block] = []
    fence, language, indent, start, at = "", "", 0, 0, 0
    lines: list[str] = []
    for line in text.split("\n"):
        bare, begin = line.strip(), at
        at += len(line) + 1
        space = len(line) - len(line.lstrip())
        if not fence:
            if opening := _FENCE.match(bare):
                fence, language, lines = opening[1], opening[2], []
                indent, start = space, begin
        elif space <= indent + 3 and _closes(bare, fence):
            code = "".join(f"{line}\n" for line in lines)
            blocks.append(_Block(language=language, code=code, start=start, end=at))
            fence = ""
        else:
            lines.append(line[min(indent, space) :])
    if fence:
        code = "\n".join(lines)
        blocks.append(_Block(language=language, code=code, start=start, end=len(text)))
    return blocks


def _closes(line: str, fence: str) -> bool:
    rest = line.lstrip(fence[0])
    return line.startswith(fence) and (not rest or _END_OF_TURN.match(rest.lstrip()) is not None)


def _with_imports(code: str, earlier: Sequence[str]) -> str:
    """The program, after those imports of earlier blocks whose names it reads and lacks."""
    tree = parsed(code)
    if tree is None:
        return code
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    made = {name for node in ast.walk(tree) for name in _imported(node)}
    made |= {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    lines: list[str] = []
    for block in map(parsed, earlier):
        for node in block.body if block else ():
            if (names := _imported(node)) & used - made:
                made |= names
                lines.append(ast.unparse(node) + "\n")
    return "".join(lines) + code


def _imported(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def defined(code: str, name: str) -> bool:
    """Whether a program binds this name to a function or class at its outermost level, as far as
    can be seen: by a definition, an import, or an assignment that does not read the name.

    Example:
        >>> defined("def f(): pass", "f"), defined("f = partial(g, 1)", "f"), defined("f()", "f")
        (True, True, False)
    """
    tree = parsed(code)
    if tree is not None:
        return name in _bound(tree.body)
    return re.search(rf"^(?:async def|def|class)[ \t]+{re.escape(name)}\b", code, re.M) is not None


def _bound(body: Sequence[ast.stmt]) -> set[str]:
    """The names that statements bind, those of blocks such as `if` and `try` included."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            read = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)} - read
        else:
            names |= _imported(node)
            for inner in ("body", "orelse", "handlers", "finalbody"):
                names |= _bound(getattr(node, inner, ()))
    return names


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source, None where it does not compile."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

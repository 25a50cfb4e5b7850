"""Finding the program in a completion."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*\{?\.?([\w+.-]*)")
_TAGS = ("answer", "code", "solution")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)
_END_OF_TURN = re.compile(
    r"(?:<\|\w+\|>|<｜[\w▁]+｜>|</s>|<eos>|<end_of_turn>|\[/?INST\])+[ \t]*(?P<end>$)?",
    re.MULTILINE,  # the end is optional, so that a run of marks is passed over once
)


def extract_code(text: str, *, defines: Sequence[str] = ()) -> str:
    """The program in a completion.

    Reasoning that ends in `</think>` is left out, the last `<answer>`, `<code>` or `<solution>`
    element is taken where there is one. In what is left, the last fenced block wins that defines
    one of the wanted names, then the last that is labelled as Python, then the last that does more
    than state values (expected output does not), each time preferring blocks that compile. A block
    that is never closed reaches to the end; imports of earlier blocks that it uses are put before
    it. Text without a block is the program itself.

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
    before, _, after = text.rpartition("</think>")
    text = _END_OF_TURN.sub(
        lambda marks: marks[0] if marks["end"] is None else "", after if after.strip() else before
    )
    for tag in _TAGS:
        opening = text.rfind(f"<{tag}>")
        if opening >= 0:
            text = text[opening + len(tag) + 2 :].partition(f"</{tag}>")[0]
            break
    found = [block for block in _blocks(text)[-_MOST_BLOCKS:] if block.is_python]
    if not found:
        return text
    ranks = [_rank(block, defines) for block in found]
    best = max(range(len(found)), key=lambda i: (ranks[i], i))
    return _with_imports(found[best].code, [block.code for block in found[:best]])


_MOST_BLOCKS = 50


@dataclass(frozen=True, kw_only=True)
class _Block:
    language: str
    code: str

    @property
    def is_python(self) -> bool:
        return not self.language or _PYTHON.fullmatch(self.language) is not None


def _rank(block: _Block, defines: Sequence[str]) -> tuple[bool, ...]:
    tree = parsed(block.code)
    acts = tree is not None and any(
        not isinstance(node, ast.Expr) or any(isinstance(n, ast.Call) for n in ast.walk(node))
        for node in tree.body
    )
    return (
        any(defined(block.code, name) for name in defines),
        bool(block.language),
        tree is not None,
        acts,
    )


def _blocks(text: str) -> list[_Block]:
    """Language and content of every fenced block, line by line: time grows with the text alone.

    Content loses the indentation of its fence, as in a list.
    """
    blocks: list[_Block] = []
    fence, language, indent = "", "", 0
    lines: list[str] = []
    for line in text.split("\n"):
        bare = line.strip()
        if not fence:
            if opening := _FENCE.match(bare):
                fence, language, lines = opening[1], opening[2], []
                indent = len(line) - len(line.lstrip())
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            blocks.append(_Block(language=language, code="".join(f"{line}\n" for line in lines)))
            fence = ""
        else:
            lines.append(line[min(indent, len(line) - len(line.lstrip())) :])
    return [*blocks, _Block(language=language, code="\n".join(lines))] if fence else blocks


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
    """Whether a program has a function or class of this name at its outermost level."""
    name = re.escape(name)
    pattern = rf"^(?:(?:async def|def|class)[ \t]+{name}\b|{name}[ \t]*=[ \t]*lambda\b)"
    return re.search(pattern, code, re.M) is not None


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source, None where it does not compile."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

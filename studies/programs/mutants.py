"""Programs for `groupwise select-programs` without a model: reference solutions and mutants.

    python studies/programs/mutants.py mbpp PATH/mbpp.jsonl rows.jsonl
    python studies/programs/mutants.py humaneval PATH/HumanEval.jsonl.gz rows.jsonl

A model that solves a problem sometimes is imitated: of every problem, the share of right programs
is drawn from Beta(1, 3) (a quarter on average); a right program is the reference with its variables
renamed, and a wrong one has one to three changes of an operator, a comparison, a constant or a
returned value. What a program is worth is decided by its tests, not by how it was made. Wrong
samples of one model share mistakes, which is why half of the wrong ones repeat an earlier mutant.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = 20
SWAPS = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.Mod: (ast.FloorDiv,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


class Changes(ast.NodeTransformer):
    """Counts the places that can be changed, or changes the one of that number."""

    def __init__(self, place: int, draw: random.Random) -> None:
        self.place, self.draw, self.seen = place, draw, 0

    def due(self) -> bool:
        self.seen += 1
        return self.seen == self.place + 1

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        options = SWAPS.get(type(node))
        if options and self.due():
            return self.draw.choice(options)()
        if isinstance(node, ast.Constant) and type(node.value) is int and self.due():
            return ast.Constant(node.value + self.draw.choice((-1, 1)))
        if isinstance(node, ast.Return) and node.value is not None and self.due():
            other = self.draw.choice((ast.Constant(None), ast.List(elts=[node.value])))
            return ast.Return(value=other)
        return node


def mutant(source: str, draw: random.Random) -> str | None:
    """The source with one to three changes; None where nothing can be changed."""
    tree = ast.parse(source)
    for _ in range(draw.choice((1, 1, 2, 3))):
        count = Changes(-1, draw)
        count.visit(ast.parse(source))
        if not count.seen:
            return None
        tree = Changes(draw.randrange(count.seen), draw).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def renamed(source: str, number: int) -> str:
    """The source with other names of its assigned variables: equal behaviour, another text."""
    tree = ast.parse(source)
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    outer = {n for f in ast.walk(tree) if isinstance(f, ast.Global | ast.Nonlocal) for n in f.names}
    outer |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in stored - outer:
            node.id = f"{node.id}_{number}"
    return ast.unparse(tree)


def programs(source: str, draw: random.Random) -> list[str]:
    """Programs as a model that solves the problem sometimes would write them."""
    share, wrong, made = draw.betavariate(1, 3), [], []
    for number in range(PROGRAMS):
        if draw.random() < share:
            made.append(renamed(source, number % 3))
            continue
        again = draw.choice(wrong) if wrong and draw.random() < 0.5 else mutant(source, draw)
        if again is None:
            return []
        wrong.append(again)
        made.append(again)
    return made


def mbpp(path: Path) -> list[tuple[Any, str, dict[str, Any]]]:
    """The test problems of MBPP: the first assert is shown, the others are hidden."""
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    chosen = [row for row in rows if 11 <= row["task_id"] <= 510 and not row["test_setup_code"]]
    return [(r["task_id"], r["code"], {"test_list": r["test_list"]}) for r in chosen]


def humaneval(path: Path) -> list[tuple[Any, str, dict[str, Any]]]:
    """HumanEval: the doctests of the prompt are shown, `check` is hidden."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(text) for text in file]
    return [
        (
            row["task_id"],
            row["prompt"] + row["canonical_solution"],
            {key: row[key] for key in ("prompt", "test", "entry_point")},
        )
        for row in rows
    ]


def main(arguments: Sequence[str]) -> None:
    kind, path, output = arguments[0], Path(arguments[1]), Path(arguments[2])
    problems = {"mbpp": mbpp, "humaneval": humaneval}[kind](path)
    draw = random.Random(0)
    written = 0
    with output.open("w", encoding="utf-8") as file:
        for id, source, columns in problems[: int(arguments[3]) if arguments[3:] else None]:
            for completion in programs(source, draw):
                row: dict[str, Any] = {"id": id, "completion": completion, **columns}
                if kind == "humaneval":
                    from groupwise.rewards.code.reward import code_function

                    row["correct"] = code_function(completion, columns, seconds=2.0)
                file.write(json.dumps(row) + "\n")
                written += 1
    print(f"{written} programs for {len(problems)} problems: {output}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Which of many sampled programs to submit: clusters of equal behaviour, ranked.

A row is one sampled program, as `sample` writes it: `id` of its problem, `completion`, and the
columns of the problem, among them its tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import UsageError
from groupwise.rewards.code.behaviour import (
    Behaviour,
    Tests,
    arguments_of,
    behaviour,
    ended,
    read_tests,
    share_of_tests,
)
from groupwise.rewards.code.extraction import extract_code
from groupwise.rewards.code.mutation import mutated_arguments, mutated_texts
from groupwise.rewards.code.sandbox import Limits
from groupwise.rundir.files import append_text
from groupwise.rundir.provenance import digest, fingerprint, write_origin
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.stages.blocks import begun, whole_blocks
from groupwise.training.stages.rows import line, read_samples
from groupwise.training.stages.select import by_prompt

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How programs are distinguished.

    Attributes:
        tests: column with the tests of the problem, see `read_tests`.
        shown: how many of them are known when programs are chosen; the others are hidden and decide
            `correct` where rows have none.
        generator: column with a program that reads a number and writes an input; where a row has
            none, inputs are mutated from those of the shown tests.
        inputs: how many new inputs per problem.
        seconds: processor time per input, see `Limits`.
        memory_mb: address space of a program, MiB.
        seed: of the mutations and the generator.
    """

    tests: str = "test_list"
    shown: int = 1
    generator: str = "generator"
    inputs: int = 32
    seconds: float = 2.0
    memory_mb: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shown", "inputs"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} = {getattr(self, name)}: must be at least 0.")

    @property
    def limits(self) -> Limits:
        """What a program may use."""
        return Limits(seconds=self.seconds, memory_mb=self.memory_mb)


def select_programs(
    rows: str | Path,
    output: str | Path,
    *,
    selection: Selection | None = None,
    columns: Mapping[str, str] | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Path:
    """Rank the sampled programs of every problem by what they do, and write them in that order.

    Programs that behave equally on the shown tests and on new inputs form a cluster. Clusters are
    ordered by the share of shown tests they pass, then by size; one program of each is submitted,
    then a second of each. An interrupted call continues after the last complete problem.

    Args:
        rows: file of sampled programs.
        output: the file to write: the rows, by problem and place of submission, with `submission`
            (place, from 1), `majority` (place by cluster size alone), `cluster` (number in the
            problem), `cluster_size`, `examples` (share of shown tests passed, None without any),
            `inputs` (on which programs are compared) and `correct`.
        selection: how programs are distinguished.
        columns: other names of columns, see `read_samples`.
        workers: problems at the same time.
        progress: shows the problems under the name "select-programs", and is closed; None shows
            them on standard error.

    Returns:
        The file.

    Raises:
        UsageError: a row lacks the column of tests, there is no sandbox, or another file is in the
            way.
        SandboxError: the sandbox did not start.

    Source: AlphaCode (2203.07814), section 4.5: filtering and clustering.
    Elsewhere: AlphaCode drops the programs that fail an example; here they come last, so that every
        number of submissions is used.
    """
    chosen = selection or Selection()
    path = Path(output)
    problems = by_prompt(read_samples(rows, columns=columns))
    found = [_tests(problem, chosen) for problem in problems]
    if not any(map(len, found)):
        raise UsageError(
            f"--tests = {chosen.tests!r}: none of the {len(found)} rows has tests in this column."
        )
    settings = _settings(rows, chosen, columns or {})
    finished = begun(path, settings)
    kept = whole_blocks(path, [len(problem) for problem in problems])
    with (
        closing(progress or show_progress({"select-programs": len(problems)})) as showing,
        ThreadPoolExecutor(max_workers=workers) as pool,
    ):
        given = zip(problems[kept:], found[kept:], strict=True)
        ranked = pool.map(lambda pair: rank_programs(*pair, selection=chosen), given)
        for number, made in enumerate(ranked, start=kept + 1):
            append_text(path, "".join(map(line, made)))
            showing.step("select-programs", number, {})
    if not finished:
        write_origin(path, settings | {"finished": True, "problems": len(problems)})
    return path


def rank_programs(
    rows: Sequence[Row], tests: Tests, *, selection: Selection
) -> list[dict[str, Any]]:
    """The programs of one problem in the order of submission, see `select_programs`.

    Example:
        >>> from groupwise.rewards.code.sandbox import unavailable
        >>> bodies = ("x + 1", "1 + x", "x * 2", "x * 3", "x + 7")
        >>> rows = [{"id": 0, "completion": f"def f(x): return {body}"} for body in bodies]
        >>> if not unavailable():
        ...     tests = read_tests(["assert f(1) == 2", "assert f(5) == 6"])
        ...     ranked = rank_programs(rows, tests, selection=Selection())
        ...     found = [(row["completion"][17:], row["correct"]) for row in ranked]
        ...     assert found[:3] == [("x + 1", 1.0), ("x * 2", 0.0), ("x * 3", 0.0)], found
    """
    shown, hidden = tests[: selection.shown], tests[selection.shown :]
    wanted = [tests.function, "Solution"] if tests.function else []
    sources = [extract_code(str(row["completion"]), defines=wanted) for row in rows]
    distinct = list(dict.fromkeys(sources))
    passed = {each: share_of_tests(each, shown, limits=selection.limits) for each in distinct}
    known = _known_inputs(shown)
    inputs = known + _new_inputs(rows[0], tests.function, known, selection)
    said = {
        each: behaviour(each, inputs, function=tests.function, limits=selection.limits)
        if inputs
        else ()
        for each in distinct
    }
    places = _telling(said, passed, len(known), len(inputs))
    behaviours = [tuple(said[each][place] for place in places) for each in sources]
    shares = [passed[each] for each in sources]
    order, majority, clusters = _ranked(behaviours, shares)
    judged = _judged(rows, sources, hidden, selection)
    made = [
        {
            **row,
            "correct": judged[number],
            "submission": order.index(number) + 1,
            "majority": majority.index(number) + 1,
            "cluster": clusters[number],
            "cluster_size": clusters.count(clusters[number]),
            "examples": shares[number],
            "inputs": len(places),
        }
        for number, row in enumerate(rows)
    ]
    return sorted(made, key=lambda row: row["submission"])


def _tests(problem: Sequence[Row], selection: Selection) -> Tests:
    row = problem[0]
    if selection.tests not in row:
        raise UsageError(
            f"--tests = {selection.tests!r}: the rows have no such column; columns: "
            f"{', '.join(map(str, row))}."
        )
    return read_tests(row[selection.tests], column=selection.tests)


def _known_inputs(shown: Tests) -> list[Any]:
    return arguments_of(shown) if shown.function else [case.given for case in shown.cases]


def _new_inputs(row: Row, function: str, known: Sequence[Any], selection: Selection) -> list[Any]:
    """Inputs by the row's generator, or else mutated from the known ones."""
    draw = random.Random(f"{selection.seed}:{row['id']}")
    if source := row.get(selection.generator):
        numbers = [str(draw.randrange(1 << 31)) for _ in range(selection.inputs)]
        made = behaviour(extract_code(str(source)), numbers, limits=selection.limits)
        texts = list(dict.fromkeys(each for each in made if ended(each)))
        return [_arguments(text, row["id"]) for text in texts] if function else texts
    if function:
        return mutated_arguments(known, selection.inputs, draw)
    return mutated_texts(known, selection.inputs, draw)


def _arguments(text: str, id: Any) -> list[Any]:
    import ast

    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = None
    if not isinstance(found, list | tuple):
        raise UsageError(f"problem {id!r}: its generator wrote {text[:80]!r}: must be a list.")
    return list(found)


def _telling(
    said: Mapping[str, Behaviour], passed: Mapping[str, float | None], known: int, total: int
) -> list[int]:
    """The inputs that count: the known ones, and new ones on which at least half of the programs
    that pass most shown tests end normally. An input that breaks the rules of the problem makes
    right programs differ."""
    most = max((share or 0.0 for share in passed.values()), default=0.0)
    trusted = [said[each] for each, share in passed.items() if (share or 0.0) == most]
    fit = [
        place
        for place in range(known, total)
        if 2 * sum(ended(each[place]) for each in trusted) >= len(trusted)
    ]
    return [*range(known), *fit]


def _ranked(
    behaviours: Sequence[Behaviour], shares: Sequence[float | None]
) -> tuple[list[int], list[int], list[int]]:
    """(order of submission, order by cluster size, cluster of every program); a program that ends
    normally on no input is in no cluster but its own."""
    members: dict[Any, list[int]] = {}
    for number, said in enumerate(behaviours):
        key = (said, shares[number]) if any(map(ended, said)) else number
        members.setdefault(key, []).append(number)
    clusters = list(members.values())
    by_size = sorted(clusters, key=lambda each: (-len(each), each[0]))
    by_tests = sorted(clusters, key=lambda each: (-(shares[each[0]] or 0.0), -len(each), each[0]))
    number_of = {number: place for place, each in enumerate(by_tests) for number in each}
    return (
        list(_in_turn(by_tests)),
        list(_in_turn(by_size)),
        [number_of[number] for number in range(len(behaviours))],
    )


def _in_turn(clusters: Sequence[Sequence[int]]) -> Iterator[int]:
    """One program of every cluster, then a second of each."""
    for turn in range(max(map(len, clusters), default=0)):
        yield from (each[turn] for each in clusters if turn < len(each))


def _judged(
    rows: Sequence[Row], sources: Sequence[str], hidden: Tests, selection: Selection
) -> list[float | None]:
    """Whether each program is right: the column, or else the hidden tests."""
    known = [row.get("correct") for row in rows]
    if any(each is not None for each in known) or not len(hidden):
        return known
    found = {
        each: share_of_tests(each, hidden, stop=True, limits=selection.limits)
        for each in dict.fromkeys(sources)
    }
    shares = [found[each] for each in sources]
    return [None if share is None else float(share == 1.0) for share in shares]


def _settings(rows: str | Path, selection: Selection, columns: Mapping[str, str]) -> dict[str, Any]:
    settings = {"selection": vars(selection), "columns": dict(columns)}
    return {
        "made_by": "select-programs",
        "data_hash": fingerprint(rows),
        "settings": settings,
        "digest": digest(settings | {"rows": fingerprint(rows)}),
    }

"""Commands that make data: sample, select, select-programs, contexts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import JsonFile, Overrides, TrustRecipe, recipe_names, write_json
from groupwise.cli.output import print_table
from groupwise.errors import UsageError

if TYPE_CHECKING:
    from groupwise.evaluation import Estimate

Rows = Annotated[str, typer.Argument(help="File of sampled answers (.jsonl, .csv, .parquet).")]
Agreement = Annotated[
    str | None,
    typer.Option(
        metavar="SCORE",
        help="Print how well a score (of a judge or reward model) agrees with `correct`: "
        "accuracy and Cohen's kappa by threshold.",
    ),
]


def sample(
    model: Annotated[str, typer.Argument(help='Model folder, hub name, or "bundled".')],
    recipe: Annotated[
        str,
        typer.Option(
            "--task",
            "--recipe",
            help="Recipe with the prompts, rewards and sampling.",
            autocompletion=recipe_names,
        ),
    ] = "word-problems",
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Output file: JSON lines, one per answer.")
    ] = Path("samples.jsonl"),
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Answers per prompt.")] = 8,
    split: Annotated[str, typer.Option(help="Which prompts of the recipe: train or eval.")] = (
        "train"
    ),
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Use only this many prompts; default: all.")
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Share of the work as I/N: every N-th prompt, starting with the I-th.",
        ),
    ] = "1/1",
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
) -> None:
    """Sample answers to the prompts of a recipe and score them.

    An interrupted command continues where it stopped.
    """
    from groupwise.config import load

    config = load(recipe, overrides or [], trust_recipe=trust_recipe)
    part = _shard(shard)

    from groupwise.training.stages.sample import sample

    found = sample(config, model, output, count=count, split=split, prompts=prompts, shard=part)
    print(found)
    print(found.path)


def select(
    rows: Rows,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="correct, shortest_correct, best(count=2), pass_rate(above=0.1, below=0.9), "
            "distinct, length(least=1, most=512), language(language='korean'), at_most(count=2); "
            "repeatable, applied in order.",
        ),
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Write preference pairs instead of answers.")
    ] = False,
    ratio: Annotated[
        float,
        typer.Option(help="With --pairs: also reject right answers this many times longer."),
    ] = 1.5,
    most: Annotated[int, typer.Option(min=1, help="With --pairs: most pairs per prompt.")] = 1,
    columns: Annotated[
        str, typer.Option(metavar="A=B,C=D", help="Names of columns in the file: correct=score.")
    ] = "",
    figures: Annotated[
        bool,
        typer.Option(
            "--figures",
            help="Print the accuracy of the majority, the best reward and any of k.",
        ),
    ] = False,
    agreement: Agreement = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file: JSON lines; default: only count."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Select sampled answers by rules, and print how many each rule keeps."""
    from groupwise.training.stages.rows import read_samples, write_rows
    from groupwise.training.stages.select import preference_pairs, rules_of, select

    rules = rules_of(keep or [])
    given = read_samples(rows, columns=_columns(columns))
    found = select(given, rules)
    chosen = preference_pairs(found.rows, ratio=ratio, most=most) if pairs else found.rows
    counts = [*found.counts, *([("pairs", len(chosen))] if pairs else [])]
    print_table(("rule", "rows"), [(name, str(number)) for name, number in counts])
    told: dict[str, Any] = {"counts": counts}
    name = Path(rows).name
    if figures:
        from groupwise.evaluation.best_of import selection_figures

        told["figures"] = _shown(name, selection_figures(given))
    if agreement is not None:
        from groupwise.evaluation.agreement import agreement_figures

        told["agreement"] = _shown(name, agreement_figures(given, agreement))
    if output is not None:
        write_rows(output, chosen)
        _record(output, rows, keep or [], counts, pairs=pairs, ratio=ratio, most=most)
        print(output)
    write_json(json_file, told)


def _record(
    output: Path,
    rows: str,
    keep: Sequence[str],
    counts: Sequence[tuple[str, int]],
    **of_pairs: Any,
) -> None:
    """Write what made a selection: the file, the rules, and how many rows each left."""
    from groupwise.rundir.provenance import fingerprint, write_origin

    origin = {
        "made_by": "select",
        "data": rows,
        "data_hash": fingerprint(rows),
        "settings": {"keep": list(keep), **(of_pairs if of_pairs["pairs"] else {})},
        "counts": [list(each) for each in counts],
    }
    write_origin(output, origin)


def select_programs(
    rows: Annotated[str, typer.Argument(help="File of sampled programs (.jsonl, .csv, .parquet).")],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Output file: JSON lines, in order of submission for each problem."
        ),
    ] = Path("submissions.jsonl"),
    tests: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Column with the tests: asserts, inputs with outputs, or doctests.",
        ),
    ] = "test_list",
    shown: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of tests, from the first, that are public examples; the "
            "others are hidden.",
        ),
    ] = 1,
    generator: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Program that reads a number and writes an input; without one, the inputs of the "
            "examples are mutated.",
        ),
    ] = "generator",
    inputs: Annotated[int, typer.Option(min=0, help="Number of new inputs per problem.")] = 32,
    seconds: Annotated[float, typer.Option(help="CPU seconds per input.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of problems in parallel.")] = 2,
    columns: Annotated[
        str, typer.Option(metavar="A=B,C=D", help="Names of columns in the file: completion=code.")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Choose among many programs per problem by their behaviour, and order them for submission.

    The programs run in the sandbox on the examples and on new inputs; programs that behave the same
    form a cluster, and clusters are ordered by the examples that they pass and by size. An
    interrupted command continues where it stopped.
    """
    from groupwise.evaluation.submissions import submission_figures
    from groupwise.training.stages.rows import read_samples
    from groupwise.training.stages.select_programs import Selection, select_programs

    chosen = Selection(
        tests=tests, shown=shown, generator=generator, inputs=inputs, seconds=seconds, seed=seed
    )
    path = select_programs(
        rows, output, selection=chosen, columns=_columns(columns), workers=workers
    )
    made = read_samples(path)
    told: dict[str, Any] = {}
    if any(row["correct"] is not None for row in made):
        told = _shown(path.name, submission_figures(made))
    print(path)
    write_json(json_file, told)


def contexts(
    data: Annotated[
        str, typer.Argument(help="Questions with reference answers: a file or a generator.")
    ],
    rules: Annotated[
        Path, typer.Argument(help="Rules: a text file with one per line (.txt), or a corpus.")
    ],
    recipe: Annotated[
        str,
        typer.Option(
            "--task", "--recipe", help="Recipe whose [data] section describes the questions."
        ),
    ] = "korean-norms",
    model: Annotated[
        str | None, typer.Option(help="Model that scores the answers; default: the recipe's model.")
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="perplexity: rules that raise the probability of the answer, for training data; "
            "search: rules that share words with the question, for new questions."
        ),
    ] = "perplexity",
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Number of candidates per question.")
    ] = 5,
    rule: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="Column with the rule that is known to decide the question."
        ),
    ] = "rule",
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Output file: JSON lines, one per question.")
    ] = Path("contexts.jsonl"),
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
) -> None:
    """Find the rules that may decide each question, and add them to its prompt as numbered
    candidates.

    An interrupted command continues where it stopped.
    """
    from groupwise.config import load

    given = [*(overrides or []), f"data.train={json.dumps(data)}"]
    config = load(recipe, given, trust_recipe=trust_recipe)

    from groupwise.training.stages.contexts import find_contexts

    way: Any = by
    print(find_contexts(config, rules, output, model=model, by=way, count=count, rule=rule))


def _shown(name: str, sections: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    """Print the statistics of a file as a table, and return them for JSON."""
    from rich.console import Console

    from groupwise.evaluation import figure_table, terminal_table

    Console().print(terminal_table(figure_table({name: [sections]}), verdicts=[]))
    return {
        section: {figure: value.as_dict() for figure, value in each.items()}
        for section, each in sections.items()
    }


def _shard(text: str) -> tuple[int, int]:
    """`2/4` as (1, 4)."""
    place, slash, parts = text.partition("/")
    if not slash or not (place.isdecimal() and parts.isdecimal()):
        raise UsageError(f"--shard = {text!r}: must have the form I/N, such as 1/4.")
    if not 1 <= int(place) <= int(parts):
        raise UsageError(f"--shard = {text!r}: must be from 1/{parts} to {parts}/{parts}.")
    return int(place) - 1, int(parts)


def _columns(text: str) -> dict[str, str]:
    """`completion=code,correct=score` as a mapping."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if bad := [name for name, equals, value in pairs if not (name.strip() and equals and value)]:
        raise UsageError(f"--columns = {text!r}: {bad[0]!r} must have the form name=column.")
    return {name.strip(): value.strip() for name, _, value in pairs}

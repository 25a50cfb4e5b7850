"""Commands that measure models and report on runs: eval, report, demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import JsonFile, Overrides, TrustRecipe, task_names, write_json
from groupwise.cli.output import command_name
from groupwise.errors import UsageError

if TYPE_CHECKING:
    from groupwise.evaluation.suite import Curve

OWN_PROMPT = "recipe"
"""Name of the recipe's own prompt among the templates of files."""

Tasks = Annotated[
    str,
    typer.Option(
        "--task",
        "--recipe",
        help="Recipe with the prompts, rewards and sampling to use, or several: A,B.",
        autocompletion=task_names,
    ),
]
Ks = Annotated[
    str | None,
    typer.Option("--k", metavar="N,N", help="Values of k for pass@k and maj@k: 1,2,4,8."),
]
Budgets = Annotated[
    str | None,
    typer.Option(metavar="N,N", help="Token budgets to evaluate at: 64,128,256."),
]
Targets = Annotated[
    str | None,
    typer.Option(
        "--target-lengths",
        metavar="N,N",
        help="Lengths that the prompts ask for, instead of those of target_length: 16,32.",
    ),
]
Templates = Annotated[
    str | None,
    typer.Option(
        metavar="FILE,FILE",
        help='Prompt templates with {question}; "recipe" is the prompt of the recipe.',
    ),
]
Reflection = Annotated[
    bool,
    typer.Option(
        "--reflection",
        help="Measure recovery from solutions with an injected error, and from the model's own.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--png",
        metavar="FILE",
        help="Plot accuracy over budgets, target lengths, k or models (png, svg or pdf).",
    ),
]


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help='Model folders, hub names, or "bundled"; the first is the base.',
        ),
    ],
    task: Tasks = "word-problems",
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this model on the same prompts."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of sampling seeds.")] = 1,
    k: Ks = None,
    budgets: Budgets = None,
    targets: Targets = None,
    templates: Templates = None,
    reflection: Reflection = False,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    json_file: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Evaluate models on held-out prompts of one or more tasks.

    Reports greedy and sampled accuracy, pass@k and more, each with its 95 % interval. With several
    models or tasks, compares every model with the first.
    """
    from groupwise.config import load

    tasks = _tasks(task)
    ks = _numbers("--k", k)
    variants: dict[str, Any] = {
        "budgets": _numbers("--budgets", budgets),
        "targets": _numbers("--target-lengths", targets),
        "templates": _templates(templates),
    }
    suite = len(models) > 1 or len(tasks) > 1 or bool(ks) or any(variants.values())
    _refuse_in_suites({"--against": against, "--reflection": reflection} if suite else {})
    _check_picture(picture, suite=suite)
    configs = {name: load(name, overrides or [], trust_recipe=trust_recipe) for name in tasks}

    from rich.console import Console

    from groupwise.evaluation import terminal_table
    from groupwise.evaluation.evaluate import evaluate
    from groupwise.evaluation.suite import evaluate_suite

    if suite:
        found = evaluate_suite(configs, models, seeds=seeds, ks=ks, **variants)
        if picture is not None:
            _draw(found.curve(), picture)
    else:
        models = [*models, *([against] if against else [])]
        found = evaluate(configs[tasks[0]], models, seeds=seeds, reflection=reflection)
    Console().print(terminal_table(found.table(), verdicts=found.verdicts))
    write_json(json_file, found.as_dict())


def _tasks(text: str) -> list[str]:
    """Names of recipes, separated by commas."""
    tasks = [name.strip() for name in text.split(",")]
    if len(set(tasks)) < len(tasks):
        raise UsageError(f"--task = {text}: tasks must differ.")
    return tasks


def _templates(text: str | None) -> dict[str, str | None]:
    """Templates by file name, separated by commas; "recipe" has no template text."""
    found: dict[str, str | None] = {}
    for name in [] if text is None else [part.strip() for part in text.split(",")]:
        key = name if name == OWN_PROMPT else Path(name).stem
        if key in found:
            raise UsageError(f"--templates = {text}: two are called {key!r}; names must differ.")
        try:
            content = None if name == OWN_PROMPT else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise UsageError(
                f"--templates = {name!r}: must be a text file with {{question}}, or {OWN_PROMPT!r}."
            ) from None
        # Editors end files with a line break, which is not part of the prompt.
        found[key] = None if content is None else content.removesuffix("\n")
    return found


def _refuse_in_suites(options: dict[str, str | bool | None]) -> None:
    """Raise an error for options that need one model and one task."""
    for option, given in options.items():
        if given:
            raise UsageError(
                f"{option}: works with one model and one task, without --k, --budgets, "
                "--target-lengths and --templates. "
                "To compare several models, list them: eval BASE OTHER."
            )


def _check_picture(picture: Path | None, *, suite: bool) -> None:
    """Raise an error for a plot of a single point or of an unknown format, before anything is
    measured."""
    if picture is None:
        return
    from groupwise.report.png import picture_path

    picture_path(picture, where="--png")
    if not suite:
        raise UsageError(
            "--png: needs several models, tasks, budgets, target lengths or templates to plot."
        )


def _draw(curve: Curve, picture: Path) -> None:
    from groupwise.report.png import write_curve

    title = f"{'share of prompts' if curve.axis == 'k' else 'sampled accuracy'} (%), 95 % interval"
    place = write_curve(curve.lines, curve.places, picture, axis=curve.axis, title=title)
    print(f"picture  {place}")


def _numbers(option: str, text: str | None) -> list[int]:
    """Whole numbers of an option, separated by commas."""
    try:
        return [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise UsageError(
            f"{option} = {text!r}: must be whole numbers separated by commas, such as 1,2,4."
        ) from None


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="A run directory, several to compare, or the output folder of a comparison."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Output file; default: in the (first) run directory."),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Write a picture (png, svg or pdf) instead: this metric and the table of results. "
            '"paper" draws figure 1 and table 1 of the SoftRank-GRPO paper.',
        ),
    ] = None,
    trust_recipe: Annotated[
        bool,
        typer.Option(
            "--trust-recipe", help="Accept settings of the comparison's plan that run code."
        ),
    ] = False,
) -> None:
    """Write the report of a run or a comparison as one self-contained HTML file, or a figure."""
    from groupwise import experiments
    from groupwise.report import read_runs, write_comparison_report, write_png, write_run_report

    compared = len(runs) == 1 and (Path(runs[0]) / "experiment.toml").is_file()
    if figure is not None:
        data = (
            experiments.analysis_of(runs[0], trusted=trust_recipe).runs
            if compared
            else read_runs(runs)
        )
        place = output or Path(runs[0]) / f"figure-{figure}.png"
        print(write_png(data, place, figure=figure))
        return
    if compared and output is None:
        print(experiments.report(runs[0], trusted=trust_recipe).folder / "report.html")
        return
    if compared:
        raise UsageError("--output: the report of a comparison is written to its own folder.")
    if len(runs) == 1:
        print(write_run_report(runs[0], output))
        return
    title = " against ".join(dict.fromkeys(Path(run).name for run in runs))
    place = output or Path(runs[0]) / "comparison.html"
    print(write_comparison_report(read_runs(runs), title=title, output=place))


def watch(
    run: Annotated[str, typer.Argument(help="Directory of a run, finished or not.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 chooses a free one.")
    ] = 0,
) -> None:
    """Serve the report of a run as a local page that is refreshed after every step."""
    from groupwise.report.live import LivePage, serve

    page = LivePage(run)
    serve(page, port=port, started=lambda url: print(f"{url}  (stop with Ctrl-C)", flush=True))


def demo(
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Number of paired runs; one is an illustration, several give intervals."
        ),
    ] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path(
        "runs/demo"
    ),
    overrides: Overrides = None,
) -> None:
    """Train the bundled model with SoftRank-GRPO and GRPO and write a report."""
    from rich.console import Console

    from groupwise.cli.demo import demo
    from groupwise.evaluation import terminal_table
    from groupwise.report import results_table

    found = demo(seeds=seeds, output=output, overrides=overrides or [])
    verdicts = found.summary["comparison"]["verdicts"]
    Console().print(terminal_table(results_table(found.runs), verdicts=verdicts))
    print(f"\n{found.summary['seconds']:.0f} s. Try next:")
    command, model = command_name(), output / "softrank-seed0" / "final"
    print(f"  xdg-open {output / 'report.html'}")
    print("  echo 'A shop has 22 eggs. It sells 3. It sells 9. How many eggs are there now?' |")
    print(f"    {command} chat {model}")
    print(f"  {command} train word-problems --set algorithm.name=rloo --set output=runs/rloo")

"""The command `groupwise`: each subcommand calls one function, imported when it is called.

Settings are read first: what is wrong with them is said before torch is imported.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted (a run has written a
checkpoint by then).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise import __version__
from groupwise.cli import compare as lab
from groupwise.cli.options import JsonFile, Overrides, Recipe, write_json
from groupwise.errors import GroupwiseError, UsageError

INTERRUPTED = 130
# The base of click's usage errors. typer may carry its own copy of click, so it is reached by way
# of a class that typer names.
WrongUsage: Any = typer.BadParameter.__base__

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Critic-free reinforcement-learning post-training of reasoning language models.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; errors are one line unless `--debug` is given."""
    # Threads that wait by spinning slow a small model down tenfold as soon as anything else runs on
    # the machine; it has to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    warnings.showwarning = _show_warning
    # On a CPU it recommends a kernel that it would load from the hub, whoever imports it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        # Progress bars of the libraries below would fill a log with half-drawn lines.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        result = app(
            [a for a in given if a != "--debug"] or ["--help"], "groupwise", standalone_mode=False
        )
        sys.stdout.flush()
        if result == INTERRUPTED:
            return _failed("interrupted.", INTERRUPTED, debug=debug)
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        _drop_output()  # the reader of a pipe has seen enough
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted.", INTERRUPTED, debug=debug)
    except WrongUsage as error:
        return _failed(_misused(error), UsageError.exit_code, debug=debug)
    except GroupwiseError as error:
        return _failed(str(error), error.exit_code, debug=debug)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        hint = "" if debug else " (--debug shows where)"
        return _failed(f"{type(error).__name__}: {reason}{hint}", 1, debug=debug)


def _misused(error: Any) -> str:
    """What is wrong with a command line; a setting that was written as an option is shown right."""
    said = error.format_message()
    option = getattr(error, "option_name", None)
    taken = [name for taken in error.ctx.command.params for name in taken.opts] if error.ctx else []
    if option is None or "--set" not in taken:
        return said
    setting = option.lstrip("-").replace("-", "_")
    return f"{said.rstrip('.')}. Settings of the recipe are written as --set {setting}=VALUE."


def _drop_output() -> None:
    """Send what is still to be printed nowhere: Python must not fail when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"groupwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; allowed at any place.")
    ] = False,
) -> None:
    """Critic-free reinforcement-learning post-training of reasoning language models."""


@app.command()
def demo(
    seeds: Annotated[
        int, typer.Option(min=1, help="Paired runs; several give intervals, one an illustration.")
    ] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the runs and the report.")] = Path(
        "runs/demo"
    ),
    overrides: Overrides = None,
) -> None:
    """Train the bundled model with SoftRank-GRPO and GRPO; report."""
    from rich.console import Console

    from groupwise.cli.demo import demo
    from groupwise.evaluation import terminal_table
    from groupwise.report import results_table

    found = demo(seeds=seeds, output=output, overrides=overrides or [])
    verdicts = found.summary["comparison"]["verdicts"]
    Console().print(terminal_table(results_table(found.runs), verdicts=verdicts))
    print(f"\n{found.summary['seconds']:.0f} s. Try next:")
    command, model = _command(), output / "softrank-seed0" / "final"
    print(f"  xdg-open {output / 'report.html'}")
    print("  echo 'A shop has 22 eggs. It sells 3. It sells 9. How many eggs are there now?' |")
    print(f"    {command} chat {model}")
    print(f"  {command} train word-problems --set algorithm.name=rloo --set output=runs/rloo")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Go on from the newest checkpoint in this run directory; start where it has none.",
        ),
    ] = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Resume even if settings that affect results have changed."
        ),
    ] = False,
) -> None:
    """Train a model by a recipe."""
    from groupwise.config import load

    given = list(overrides or [])
    if resume is not None:
        given.append(f"output={json.dumps(resume)}")
    config = load(recipe, given)

    from groupwise.training.run import train_config

    run = train_config(config, resume=resume is not None, allow_changes=allow_changes)
    try:
        print(f"model   {run.folder / 'final'}")
        print(f"report  {_command()} report {run.folder}")
        print(f"chat    {_command()} chat {run.folder / 'final'}", flush=True)
    except OSError:
        _drop_output()  # the run is done, whether or not the terminal it began on is still there


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help='Model folder, hub name, or "bundled".')],
    task: Annotated[
        str,
        typer.Option(
            "--task", "--recipe", help="Recipe whose prompts, rewards and sampling are used."
        ),
    ] = "word-problems",
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this model, item by item.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of sampling seeds.")] = 1,
    reflection: Annotated[
        bool, typer.Option("--reflection", help="Recovery from solutions with an error in them.")
    ] = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Measure a model on held-out prompts.

    Accuracy, greedy and sampled, pass@k and more, each with its 95 % interval.
    """
    from groupwise.config import load

    config = load(task, overrides or [])

    from rich.console import Console

    from groupwise.evaluation import terminal_table
    from groupwise.evaluation.evaluate import evaluate

    models = [model, *([against] if against else [])]
    found = evaluate(config, models, seeds=seeds, reflection=reflection)
    Console().print(terminal_table(found.table(), verdicts=found.verdicts))
    write_json(json_file, found.as_dict())


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="Run directories; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write; report.html in the (first) run directory without it."),
    ] = None,
) -> None:
    """Write the report of a run, or of several side by side.

    It is one HTML file that needs nothing beside it.
    """
    from groupwise.report import read_runs, write_comparison_report, write_run_report

    if len(runs) == 1:
        print(write_run_report(runs[0], output))
        return
    title = " against ".join(dict.fromkeys(Path(run).name for run in runs))
    place = output or Path(runs[0]) / "comparison.html"
    print(write_comparison_report(read_runs(runs), title=title, output=place))


app.command()(lab.compare)
app.command()(lab.variance)


@app.command()
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where the model is written; `sft` in the run directory without it."
        ),
    ] = None,
) -> None:
    """Train a model on worked answers.

    The [warmup] section of RECIPE says how; word-problems-base makes the bundled model anew.
    """
    from groupwise.training.stages.recipe import supervise

    print(supervise(recipe, overrides or [], output=output))


@app.command()
def merge(
    adapter: Annotated[
        str, typer.Argument(help="Folder of an adapter, or of a run that trained one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the plain model.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; that of the base model without it."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/MODEL", help="Upload it to the Hugging Face hub."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the base model.")
    ] = False,
) -> None:
    """Make an adapter and its base model one plain model."""
    from groupwise.training.stages.merge import merge, push

    print(merge(adapter, output, dtype=dtype, trust_remote_code=trust_remote_code))
    if name is not None:
        print(push(output, name))


reward_app = typer.Typer(help="Look at rewards.", rich_markup_mode=None)
app.add_typer(reward_app, name="reward")


@reward_app.callback(invoke_without_command=True)
def rewards(context: typer.Context) -> None:
    """Look at rewards."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@reward_app.command("list")
def reward_list(json_file: JsonFile = None) -> None:
    """Print the rewards that a recipe can name, with their settings and what each pays for."""
    from groupwise.rewards.listing import listing

    found = listing()
    for name, paid_for in found.items():
        print(name, *textwrap.wrap(paid_for, 96), sep="\n    ")
    write_json(json_file, found)


@reward_app.command("try")
def reward_try(
    recipe: Recipe,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your own samples: rows with `prompt` and `text`."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Training prompts to try it on.")] = 4,
    json_file: JsonFile = None,
) -> int:
    """Judge reference answers, rubbish and your own samples, part by part."""
    from groupwise.config import load

    config = load(recipe, overrides or [])

    from groupwise.cli.reward_check import try_reward
    from groupwise.rundir.files import printable

    check = try_reward(config, prompts=prompts, samples=data)
    print(printable(str(check)))
    write_json(json_file, {"rows": check.table(), "problems": list(check.problems)})
    return 0 if check.passed else 1


@app.command()
def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe; without it the installation is looked at.")
    ] = None,
    overrides: Overrides = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=0.1, help="Plan for a card of so many GiB; what is free without it."),
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Look for what would go wrong before a run starts."""
    from groupwise.config import load

    config = None if recipe is None else load(recipe, overrides or [])

    from groupwise.cli.doctor import examine, passed
    from groupwise.rundir.files import printable

    checks = examine(config, memory_gb=memory_gb)
    for check in checks:
        print(printable(str(check)))
    write_json(json_file, [dataclasses.asdict(check) for check in checks])
    return 0 if passed(checks) else 1


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help='Model folder, hub name, or "bundled".')],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends it. Lines may also come from a pipe."""
    from groupwise.cli.chat import chat
    from groupwise.rundir.files import printable
    from groupwise.types import Sampling

    answers = chat(
        model,
        iter(_line, ""),
        system=system,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature),
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    for answer in answers:
        print(printable(answer), flush=True)


def _command() -> str:
    """How the user can call this command again: by its path where it is not on the search path."""
    here = Path(sys.argv[0])
    return str(here) if here.name == "groupwise" and not shutil.which("groupwise") else "groupwise"


def _line() -> str:
    """The next line the user types; empty at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True, file=sys.stderr)
    return sys.stdin.readline().strip()


@app.command()
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="A row of the table; all rows without it.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Print the table of algorithms, or everything about one.

    That is its formulas, its settings, and how it differs from papers and other projects.
    """
    from groupwise.algorithms import ALGORITHMS, describe, table

    if name is not None:
        print(describe(name))
        write_json(json_file, dataclasses.asdict(ALGORITHMS.get(name)))
        return
    rows = table()
    slots = ("name", "advantage", "surrogate", "weighting", "paper")
    _table(slots, [[row[slot] for slot in slots] for row in rows])
    write_json(json_file, rows)


@app.command()
def config(recipe: Recipe, overrides: Overrides = None, json_file: JsonFile = None) -> None:
    """Print the settings of a recipe and where each comes from."""
    from groupwise.config import flat, resolve

    resolved = resolve(recipe, overrides or [])
    values = flat(resolved.config)
    rows = [
        (path, json.dumps(v, ensure_ascii=False), resolved.origins[path])
        for path, v in values.items()
    ]
    _table(("setting", "value", "from"), rows)
    print()
    _table(("follows", "value"), list(resolved.derived.items()))
    write_json(
        json_file,
        {
            "config": json.loads(resolved.config.to_json()),
            "origins": dict(resolved.origins),
            "derived": dict(resolved.derived),
        },
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, aligned; the last one is as long as it likes."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings) - 1)]
    for row in (headings, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(_visible("  ".join([*cells, row[-1]]).rstrip()))


def _failed(message: str, code: int, *, debug: bool) -> int:
    """Say on standard error what went wrong, in one line, and return the exit code."""
    if debug and sys.exc_info()[1] is not None:
        traceback.print_exc()
    print(f"error: {_visible(message)}", file=sys.stderr)
    return code


def _visible(text: str) -> str:
    """Text as one line that moves no cursor, whatever the file it comes from holds."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    """A warning as one line, without the place in the code that raised it."""
    with contextlib.suppress(OSError):  # a terminal that is gone ends no run
        print(f"warning: {_visible(str(message))}", file=sys.stderr)

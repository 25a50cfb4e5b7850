"""The command `groupwise`. Each subcommand imports what it needs only when it runs.

Settings are validated before torch is imported, so that mistakes are reported at once.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted (a run has written a
checkpoint).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from groupwise import __version__, extensions
from groupwise.cli import (
    chat,
    compare,
    data,
    evaluate,
    find,
    inspect,
    launch,
    pipeline,
    plan,
    rewards,
    serve,
    train,
)
from groupwise.cli.output import drop_output, visible
from groupwise.cli.waiting import thread_count, wait_policy
from groupwise.errors import GroupwiseError, UsageError

INTERRUPTED = 130
# The base class of click's usage errors, found through typer, which may vendor its own click.
WrongUsage: Any = typer.BadParameter.__base__

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement-learning post-training of reasoning language models.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; errors are one line unless `--debug` is given."""
    os.environ.update({**wait_policy(), **thread_count()})
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    warnings.showwarning = _show_warning
    # On a CPU, bitsandbytes recommends at import a kernel that it would load from the hub.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        # Progress bars of libraries would clutter log files.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        rest, places = _imports([a for a in given if a != "--debug"])
        extensions.request(places)
        result = app(rest or ["--help"], "groupwise", standalone_mode=False)
        sys.stdout.flush()
        if result == INTERRUPTED:
            return _failed("interrupted.", INTERRUPTED, debug=debug)
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        drop_output()  # the reader of the pipe has closed it
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


def _imports(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--import MODULE`, which is allowed anywhere, and the modules."""
    rest, places = [], []
    arguments = iter(given)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--import":
            rest.append(argument)
            continue
        place = value if equals else next(arguments, "")
        if not place or place.startswith("-"):
            raise UsageError("--import: must name a module or the path of a .py file.")
        places.append(place)
    return rest, places


def _misused(error: Any) -> str:
    """The message of a usage error, with a hint if a setting was given as an option."""
    said = error.format_message()
    option = getattr(error, "option_name", None)
    taken = [name for taken in error.ctx.command.params for name in taken.opts] if error.ctx else []
    if option is None or "--set" not in taken:
        return said
    from groupwise.config.building import paths_of

    known = paths_of(option.lstrip("-").replace("-", "_"))
    settings = [f"--set {path}=VALUE" for path in known or ("KEY",)]
    return f"{said.rstrip('.')}. Write settings of the recipe as {' or '.join(settings)}."


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"groupwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; allowed anywhere.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module or .py file that registers rewards, algorithms or environments; "
            "repeatable, allowed anywhere.",
        ),
    ] = None,
) -> None:
    """Reinforcement-learning post-training of reasoning language models."""


for _function in (
    evaluate.demo,
    train.train,
    evaluate.evaluate,
    evaluate.report,
    evaluate.watch,
    compare.compare,
    compare.variance,
    train.prefer,
    train.reward_model,
    train.sft,
    data.sample,
    data.select,
    data.select_programs,
    data.contexts,
    pipeline.pipeline,
    train.merge,
    inspect.doctor,
    plan.plan,
    launch.launch,
    chat.chat,
    serve.serve_search,
    inspect.algorithms,
    inspect.config,
    find.recipes,
    find.show,
    find.runs,
):
    app.command("eval" if _function is evaluate.evaluate else None)(_function)
app.add_typer(rewards.app, name="reward")


def _failed(message: str, code: int, *, debug: bool) -> int:
    """Print an error as one line to standard error and return the exit code. A reader that has
    stopped or gone does not hold up the end of the process."""
    from groupwise.training.monitor.non_blocking import NonBlockingStream, non_blocking

    if debug and sys.exc_info()[1] is not None:
        traceback.print_exc()
    stream = non_blocking(sys.stderr)
    print(f"error: {visible(message)}", file=stream)
    if isinstance(stream, NonBlockingStream):
        stream.close()
    return code


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without the source line that raised it."""
    with contextlib.suppress(OSError):  # a closed terminal must not end a run
        print(f"warning: {visible(str(message))}", file=sys.stderr)

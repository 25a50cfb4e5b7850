"""Commands that train and merge models: train, prefer, reward-model, sft, merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.cli.options import MaybeRecipe, Overrides, TrustRecipe
from groupwise.cli.output import command_name, drop_output
from groupwise.errors import GroupwiseError, UsageError, first_line

if TYPE_CHECKING:
    from groupwise.config import Config


Resume = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Resume from the newest checkpoint in this run directory, or start a new run if it "
        "has none. Without RECIPE, use the settings of the run.",
    ),
]
AllowChanges = Annotated[
    bool,
    typer.Option(
        "--allow-changes", help="Resume even if settings that affect results have changed."
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart", help="With --resume: start again from step 0 if no checkpoint is intact."
    ),
]


def train(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    trust_recipe: TrustRecipe = False,
    allow_changes: AllowChanges = False,
    restart: Restart = False,
) -> None:
    """Train a model with a recipe.

    With several processes: torchrun --nproc-per-node N -m groupwise train RECIPE.
    """
    from groupwise.distributed.launched import follows

    if follows():
        _follow()
        return
    config = _loaded(recipe, overrides, resume, trust_recipe=trust_recipe)

    from groupwise.training.run import train_config

    run = train_config(
        config, resume=resume is not None, allow_changes=allow_changes, restart=restart
    )
    _print_results(run.folder, config)


def prefer(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    trust_recipe: TrustRecipe = False,
    allow_changes: AllowChanges = False,
    restart: Restart = False,
) -> None:
    """Train on preferences: pairs, labelled answers, or the model's own right and wrong ones.

    Uses the [preference] section of RECIPE; word-problems-dpo forms pairs from answers of the
    bundled model.
    """
    config = _loaded(recipe, overrides, resume, trust_recipe=trust_recipe)

    from groupwise.training.offline.preference import prefer

    folder = prefer(config, resume=resume is not None, allow_changes=allow_changes, restart=restart)
    _print_results(folder, config)


def _follow() -> None:
    """Take part in the run of rank 0, which does all printing."""
    import warnings

    warnings.simplefilter("ignore")
    from groupwise.distributed.ranks import serve

    serve()


def reward_model(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    resume: Resume = None,
    trust_recipe: TrustRecipe = False,
    allow_changes: AllowChanges = False,
    restart: Restart = False,
) -> None:
    """Train a reward model on pairs, rankings or scores.

    Uses the [reward_model] section of RECIPE; word-problems-reward-model is an example with known
    scores.
    """
    config = _loaded(recipe, overrides, resume, trust_recipe=trust_recipe)

    from groupwise.training.offline.reward_model import train_reward_model

    folder = train_reward_model(
        config, resume=resume is not None, allow_changes=allow_changes, restart=restart
    )
    _print_results(folder, config, chats=False)


def sft(
    recipe: MaybeRecipe = None,
    overrides: Overrides = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Output folder, for recipes without [sft]; default: `sft` in the run directory.",
        ),
    ] = None,
    resume: Resume = None,
    trust_recipe: TrustRecipe = False,
    allow_changes: AllowChanges = False,
    restart: Restart = False,
) -> None:
    """Fine-tune a model on conversations or worked answers (supervised).

    Uses the [sft] section of RECIPE, or else [warmup]; word-problems-base retrains the bundled
    model.
    """
    from groupwise.config import read

    if recipe is None or ("phases" not in read(recipe) and output is None):
        config = _loaded(recipe, overrides, resume, trust_recipe=trust_recipe)
        if config.sft is not None:
            from groupwise.training.offline.supervised import fine_tune

            folder = fine_tune(
                config, resume=resume is not None, allow_changes=allow_changes, restart=restart
            )
            return _print_results(folder, config)
    if recipe is None:
        raise UsageError(f"--resume = {resume!r}: is not a run of `groupwise sft`.")
    from groupwise.training.stages.recipe import supervise

    print(supervise(recipe, overrides or [], output=output, trust_recipe=trust_recipe))


def merge(
    adapter: Annotated[
        str, typer.Argument(help="Folder of an adapter, or of a run that trained one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Output folder of the merged model.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: the dtype of the base model."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--push", metavar="OWNER/MODEL", help="Upload the merged model to the Hugging Face hub."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run Python code that comes with the base model.")
    ] = False,
) -> None:
    """Merge an adapter into its base model."""
    from groupwise.training.hub import push
    from groupwise.training.stages.merge import merge

    print(merge(adapter, output, dtype=dtype, trust_remote_code=trust_remote_code))
    if name is not None:
        print(push(output, name))


def _loaded(
    recipe: str | None, overrides: list[str] | None, resume: str | None, *, trust_recipe: bool
) -> Config:
    """The configuration of a run, with the run directory given by --resume."""
    from groupwise.config import load, load_run

    given = list(overrides or [])
    if resume is not None:
        if other := [item for item in given if _other_output(item, resume)]:
            raise UsageError(f"--set = {other[0]!r}: --resume names the run directory; drop it.")
        given.append(f"output={json.dumps(resume)}")
    if recipe is not None:
        return load(recipe, given, trust_recipe=trust_recipe)
    if resume is None:
        raise UsageError("RECIPE: must be given, or --resume DIR to continue a run.")
    return load_run(resume, given, trust_recipe=trust_recipe)


def _print_results(folder: Path, config: Config, *, chats: bool = True) -> None:
    """Print the held-out figures before and after, the model, and commands to use it."""
    from groupwise.report.comparison import changes, results_table
    from groupwise.report.data import RunData
    from groupwise.rundir.files import read_lines

    evaluations = folder / "evaluations.jsonl"
    try:
        rows = [*read_lines(evaluations)] if evaluations.exists() else []
        run = RunData(label="run", algorithm="run", seed=0, evaluations=rows)
        lines = [f"result  {sentence}" for sentence in changes(results_table([run]))]
    except (GroupwiseError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        lines = [f"result  {evaluations} cannot be read ({first_line(error)})"]
    lines += [f"model   {folder / 'final'}", f"report  {command_name()} report {folder}"]
    lines += [f"chat    {command_name()} chat {folder / 'final'}"] if chats else []
    lines += [f"hub     {config.hub.name}"] if config.hub is not None else []
    try:
        print("\n".join(lines), flush=True)
    except OSError:
        drop_output()  # the terminal was closed during the run


def _other_output(override: str, folder: str) -> bool:
    """Whether an override sets `output` to another folder."""
    name, _, value = override.partition("=")
    given = Path(value.strip().strip("\"'")).expanduser()
    return name.strip() == "output" and given.resolve() != Path(folder).expanduser().resolve()

"""Start runs from a configuration, a recipe, or three arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config import Config, build
from groupwise.config.connect import Reward, connect
from groupwise.config.data import load_source
from groupwise.config.memory import memory_plan, memory_savings
from groupwise.config.preferences import method_of
from groupwise.config.processes import bound_to_one_process
from groupwise.distributed.launched import follows, launched
from groupwise.distributed.lost import RankLost
from groupwise.errors import GroupwiseError, RunError, UsageError, first_line
from groupwise.models import Policy, make_policy
from groupwise.models.loading import check_four_bits, with_settings
from groupwise.prompts.templates import fix_variables
from groupwise.rundir.files import SAVED, read_lines
from groupwise.training.checkpoint import files as checkpoint
from groupwise.training.hub import HubUploads, check_login, push_final
from groupwise.training.monitor.progress import Progress, show_progress
from groupwise.training.prepare import Connector, Prepared, prepare
from groupwise.types import Metrics, Prompt


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run.

    Attributes:
        config: every setting.
        folder: the run directory.
        model, tokenizer: what was trained.
    """

    config: Config
    folder: Path
    model: Any
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        """A short representation, because notebooks show the last value of a cell."""
        config = self.config
        return f"Run({method_of(config)}, {config.steps} steps, in {str(self.folder)!r})"

    @property
    def metrics(self) -> list[Metrics]:
        """One row per step, read from the run directory."""
        return list(read_lines(self.folder / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per evaluation on held-out prompts, read from the run directory."""
        path = self.folder / "evaluations.jsonl"
        return list(read_lines(path)) if path.exists() else []

    def report(self) -> Path:
        """Write the report of the run, one self-contained HTML file, and return its path."""
        from groupwise.report import write_run_report

        return write_run_report(self.folder)


def train(
    model: str | Path | PreTrainedModel,
    /,
    prompts: Any,
    reward: Reward | Sequence[Reward],
    algorithm: str | Mapping[str, Any] = "softrank",
    steps: int = 100,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_prompts: Any = None,
    resume: bool = False,
    allow_changes: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Train a model on prompts with a reward.

    Args:
        model: folder, hub name, "bundled", or a loaded `transformers` model (with `tokenizer`).
        prompts: a file, hub name or generator, or a list of strings, rows, or `Prompt`s.
        reward: a registered name, a function, or several. A function is called with what its
            parameters ask for (`text`, `answer`, `group`, …), or in TRL's way if it takes
            `completions`.
        algorithm: row of the table, or its name with changed settings, as in the section
            [algorithm]: `{"name": "grpo", "advantage": {"ddof": 1}}`.
        steps: number of training steps, one batch of rollouts each.
        tokenizer: of a loaded model.
        eval_prompts: held-out prompts; None uses the held-out split of a generator or hub data set.
        resume: continue from the newest checkpoint in `output`, or start if there is none.
        allow_changes: resume even if settings that affect results have changed.
        restart: start from step 0 where the run wrote checkpoints and none is intact.
        progress: shows the run; None shows it on standard error.
        settings: everything else as in a recipe: `group_size=8, sampling={"max_tokens": 64},
            model={"dtype": "bfloat16", "adapter": {"rank": 16}}`.

    Returns:
        The run, with `.model`, `.metrics` and `.report()`.

    Raises:
        UsageError: a setting, file or argument that cannot work; raised before training starts.
    """
    if not (isinstance(reward, str | Sequence) or callable(reward)):
        raise UsageError(
            f"reward = {reward!r}: must be a function, the name of a reward, or a list of these."
        )
    rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    named = all(isinstance(item, str) for item in rewards)
    values: dict[str, Any] = {"steps": steps, **settings}
    values["algorithm"] = {"name": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    values["rewards"] = [{"name": item} for item in rewards] if named else []
    from_data = isinstance(prompts, str | Path)
    train_on = str(prompts) if from_data else "prompts at hand"
    values["data"] = {**settings.get("data", {}), "train": train_on}
    policy = None
    if isinstance(model, str | Path):
        values["model"] = {"path": str(model), **settings.get("model", {})}
    elif tokenizer is None:
        raise UsageError("tokenizer = None: must be given with a loaded model, as tokenizer=….")
    else:
        policy = make_policy(model, tokenizer)
        named_as = getattr(model, "name_or_path", "") or type(model).__name__
        check_four_bits(model, named_as)
        values["model"] = {**settings.get("model", {}), "path": named_as}
    config = build(values)
    if policy is not None:
        policy = with_settings(policy, config.model)
        fix_variables(policy.tokenizer, config.data.chat_template_kwargs)
    held_out = None
    if eval_prompts is not None:
        held_out = load_source(config, eval_prompts, setting="eval")
    return train_config(
        config,
        policy=policy,
        functions=[] if named else rewards,
        prompts=None if from_data else load_source(config, prompts),
        eval_prompts=[] if held_out is None and not from_data else held_out,
        resume=resume,
        allow_changes=allow_changes,
        restart=restart,
        progress=progress,
    )


def train_config(
    config: Config,
    *,
    policy: Policy | None = None,
    functions: Sequence[Reward] = (),
    prompts: Sequence[Prompt] | None = None,
    eval_prompts: Sequence[Prompt] | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run a configuration to its end and write `final/` and the report.

    Under `torchrun`, rank 0 runs the loop, and the other ranks take part until it ends.

    Args:
        policy, functions, prompts, eval_prompts: instead of those of the configuration.
        resume: continue from the newest intact checkpoint of the run directory, or start.
        allow_changes: resume even if settings that affect results have changed.
        restart: start from step 0 where the run wrote checkpoints and none is intact.
        progress: shows the run; None shows it on standard error.
    """
    if follows():
        return _followed(policy)
    if config.cluster is not None and policy is not None:
        raise UsageError(
            "model: a loaded model cannot be sent to a cluster; save it to a folder that all "
            "machines share, and pass the folder."
        )
    check_login(config.hub)
    showing = progress or show_progress({method_of(config): config.steps})
    given: dict[str, Any] = {
        "policy": policy,
        "functions": functions,
        "prompts": prompts,
        "eval_prompts": eval_prompts,
        "allow_changes": allow_changes,
        "restart": restart,
        "progress": showing,
    }
    try:
        with _memory_named(config, planned=policy is None):
            prepared = _continued(config, resume=resume, given=given)
    finally:
        if progress is None:
            showing.close()
    run = Run(
        config=config,
        folder=Path(config.output),
        model=prepared.policy.model,
        tokenizer=prepared.policy.tokenizer,
    )
    run.report()
    for callback in prepared.trainer.callbacks:
        if isinstance(callback, HubUploads):
            callback.finish()
    push_final(config.hub, run.folder / "final")
    return run


def _continued(config: Config, *, resume: bool, given: Mapping[str, Any]) -> Prepared:
    """Train to the end; on a cluster, start again after a process was lost while it started, and
    continue from the last checkpoint after a rank was lost, with fewer replicas where a lost node
    leaves no room for all."""
    left = 0 if config.cluster is None else config.cluster.restarts
    connector = _connector(config)
    while True:
        prepared = None
        try:
            prepared = prepare(config, resume=resume, connector=connector, **given)
            prepared.trainer.run()
            prepared.trainer.finish()
            return prepared
        except RankLost as error:
            if not left:
                raise
            left, resume = left - 1, resume or prepared is not None
            connector = _connector(config, fewer=True)
            again = "Continuing from the last checkpoint." if resume else "Starting again."
            given["progress"].log(f"{error} {again}")
        finally:
            if prepared is not None:
                prepared.close()


def _connector(config: Config, *, fewer: bool = False) -> Connector:
    """The function that makes learner and engine, in one process or several; `fewer` as for
    `connect_cluster`."""
    if config.cluster is not None:
        if launched():
            raise UsageError(
                "[cluster]: cannot be combined with torchrun, because Ray starts the processes; "
                "run `groupwise train` directly, or remove the section."
            )
        from groupwise.distributed.cluster import connect_cluster

        return partial(connect_cluster, fewer=fewer)
    if not launched():
        return connect
    if config.streaming is not None:
        raise UsageError(
            "streaming: cannot be combined with torchrun, whose ranks alternate sampling and "
            "updates; remove it, or use the replicas of [cluster]."
        )
    if (setting := bound_to_one_process(config)) is not None:
        raise UsageError(
            f"{setting}: cannot be combined with torchrun, because its loss cannot be sent to "
            "other ranks; start a single process."
        )
    from groupwise.distributed.ranks import lead

    return lead


def _followed(policy: Policy | None) -> Run:
    """The run of rank 0, in which this rank took part."""
    from groupwise.distributed.ranks import serve

    config, policy = serve(policy)
    return Run(
        config=config,
        folder=Path(config.output),
        model=policy.model,
        tokenizer=policy.tokenizer,
    )


@contextmanager
def _memory_named(config: Config, *, planned: bool) -> Iterator[None]:
    """A readable out-of-memory error of any library.

    Args:
        planned: whether the memory plan of the run covers its model.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in said.lower():
            said = first_line(error)
            text = f"out of memory ({said}); {_smaller(config if planned else None)}."
            if checkpoint.steps(Path(config.output) / SAVED):
                text += " Checkpoints are intact: continue with --resume."
            raise RunError(text) from error
        raise


def _smaller(config: Config | None) -> str:
    """The memory plan of a run that did not fit, and what to change first."""
    try:
        if config is not None:
            first = ", ".join(map(str, islice(memory_savings(config), 3)))
            return f"the memory plan was {memory_plan(config)}; set, cumulatively: {first}"
    except (GroupwiseError, MemoryError, RuntimeError):
        pass  # There may be no memory left to plan in.
    return (
        "lower update.tokens_per_microbatch, engine.max_rows or sampling.max_tokens, or set "
        "update.gradient_checkpointing = true"
    )

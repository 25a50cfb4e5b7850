"""Checks of combinations of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupwise.config.engines import check_engine, check_registered
from groupwise.config.pool import check_pool
from groupwise.errors import UsageError, suggest
from groupwise.registry import BoundFunction, FunctionSpec
from groupwise.settings import SELF

if TYPE_CHECKING:
    from groupwise.algorithms import BoundAlgorithm
    from groupwise.config.schema import Config


def check_combinations(config: Config) -> None:
    """Raise an error for settings that are valid individually but cannot be combined.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    completions = config.prompts_per_step * config.group_size
    if completions % config.update.minibatches:
        raise UsageError(
            f"update.minibatches = {config.update.minibatches}: must divide prompts_per_step · "
            f"group_size = {config.prompts_per_step} · {config.group_size} = {completions}."
        )
    if config.sampling.temperature == 0:
        raise UsageError("sampling.temperature = 0: must be greater than 0.")
    if config.model.quantization and config.model.adapter is None:
        raise UsageError(
            f"model.quantization = {config.model.quantization!r}: 4-bit weights cannot be trained "
            "themselves; add a section [model.adapter]."
        )
    if config.model.head_dtype == "float32" and config.engine.name != "group":
        raise UsageError(
            f"model.head_dtype = 'float32': engine {config.engine.name!r} computes logits in the "
            "model's dtype, so sampler and learner would differ; set engine.name = 'group'."
        )
    _check_critic(config, completions)
    check_engine(config)
    check_pool(config)
    check_changing(config)
    if config.data.eval is None and config.data.eval_split == config.data.train_split:
        raise UsageError(
            f"data.eval_split = {config.data.eval_split!r}: is the training split; evaluation "
            "needs prompts that are not trained on."
        )


def check_ahead(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for `ahead` without a correction, or with schedules that affect sampling.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    if not config.ahead:
        return
    _check_correction(config, algorithm, f"ahead = {config.ahead}: batches are {config.ahead}")
    if config.partial_rollouts is not None:
        raise UsageError(
            f"ahead = {config.ahead}: every batch is sampled by one version of the weights, but "
            "partial_rollouts continues completions with the next one; remove one of the two."
        )
    _check_schedules_of_sampling(config, f"ahead = {config.ahead}")


def _check_correction(config: Config, algorithm: BoundAlgorithm, age: str) -> None:
    if config.update.proximal == "sampler":
        return
    if algorithm.row.correction.name == "none" and "name" not in config.algorithm.correction:
        raise UsageError(
            f"{age} steps older than the weights that learn from them, and algorithm "
            f"{config.algorithm.name!r} has no correction; set algorithm.correction.name = 'tis', "
            "'none' to train without one, or update.proximal = 'sampler'."
        )


def _check_schedules_of_sampling(config: Config, setting: str) -> None:
    scheduled = [each.setting for each in config.schedules]
    early = [s for s in scheduled if s.startswith(("sampling.", "rewards.", "algorithm.filter"))]
    if early:
        raise UsageError(
            f"schedules: {early[0]} changes with the step, but with {setting} several "
            "steps are sampled at a time; remove one of the two."
        )


def check_streaming(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for settings that cannot be combined with `streaming`.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    if config.streaming is None:
        return
    age = config.streaming.max_staleness
    _check_correction(config, algorithm, f"streaming: tokens are up to {age}")
    if config.ahead or config.partial_rollouts is not None:
        other = f"ahead = {config.ahead}" if config.ahead else "partial_rollouts"
        raise UsageError(
            f"{other}: assigns one version of the weights to a completion, but with streaming "
            "they change at any token; remove one of the two."
        )
    if config.environment is not None:
        raise UsageError(
            "environment: cannot be combined with streaming, because replies could not be "
            "repeated after a resume; remove one of the two, or replace streaming by ahead = 1."
        )
    if config.engine.name == "vllm":
        raise UsageError(
            "engine.name = 'vllm': loads new weights only between rollouts, so streaming needs "
            "another engine; set engine.name = "
            "'group', or replace streaming by ahead = 1."
        )
    if config.guards.spike is not None:
        raise UsageError(
            f"guards.spike = {config.guards.spike:g}: a rollback would continue completions of "
            "weights that it discards; remove it, or the section [streaming]."
        )
    _check_schedules_of_sampling(config, "streaming")


def check_changing(config: Config) -> None:
    """Raise an error for data and schedules that cannot work.

    Raises:
        UsageError: with the dotted path of the setting to change.
    """
    data = config.data
    if data.sources:
        from groupwise.prompts.orders import check_shares

        names = [source.name for source in data.sources]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"data.sources: two sources have the name {twice[0]!r}.")
        check_shares({source.name: source.share for source in data.sources})
        if data.order.name != "shuffled":
            raise UsageError(
                f"data.order.name = {data.order.name!r}: cannot be combined with data.sources, "
                "which have an order of their shares; remove data.order, or data.sources."
            )
    if data.transforms:
        from groupwise.prompts.transforms import transforms_of

        transforms_of(data.transforms)
    for schedule in config.schedules:
        last = schedule.points[-1][0]
        if last > config.steps:
            raise UsageError(
                f"schedules: {schedule.setting} has a point at step {last}, but the run has "
                f"only {config.steps} steps."
            )
    if config.model.reference_every and config.model.reference == "none":
        raise UsageError("model.reference_every: needs a reference; set model.reference = 'auto'.")


def validate_by_call(algorithm: BoundAlgorithm, config: Config) -> None:
    """Check `group_size` by computing the advantage of an example group.

    Raises:
        UsageError: the algorithm compares more completions than `group_size`.
    """
    import torch

    from groupwise.algorithms.advantages.inputs import example_inputs

    rewards = torch.zeros(1, config.group_size)
    examples = example_inputs(config.group_size, config.algorithm.advantage)
    parts = dict.fromkeys([*(part.name for part in config.rewards), *examples["parts"]], rewards)
    try:
        algorithm.advantage({**examples, "rewards": rewards, "correct": rewards, "parts": parts})
    except UsageError as error:
        raise UsageError(str(error).replace("group = ", "group_size = ", 1)) from None


def _check_critic(config: Config, completions: int) -> None:
    """Raise an error for more minibatches of the critic than completions."""
    own = config.critic
    counts = {"critic.minibatches": own.minibatches}
    if own.pretraining is not None:
        counts["critic.pretraining.minibatches"] = own.pretraining.minibatches
    for where, count in counts.items():
        if count > completions:
            raise UsageError(
                f"{where} = {count}: must be at most prompts_per_step · group_size = {completions}."
            )


def check_frozen(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error if the policy would be frozen during the whole run.

    Raises:
        UsageError: with the setting to change.
    """
    section = algorithm.second_learner
    frozen = 0 if section is None else getattr(config, section).freeze_policy_steps
    if frozen >= config.steps:
        raise UsageError(
            f"{section}.freeze_policy_steps = {frozen}: must be less than steps = {config.steps}, "
            "or the policy is never trained."
        )


def value_loss(config: Config) -> BoundFunction:
    """The loss of the critic.

    Raises:
        UsageError: unknown name or setting, a value of the wrong type or range.
    """
    import torch

    from groupwise.algorithms.losses import VALUE_LOSSES

    settings = {"name": "squared", **config.critic.loss}
    name = settings.pop("name")
    if name not in VALUE_LOSSES:
        raise UsageError(
            f"critic.loss.name = {name!r}: not registered; {suggest(str(name), VALUE_LOSSES)}"
        )
    loss = VALUE_LOSSES.bind(FunctionSpec(name=name, settings=settings), where="critic.loss")
    none = torch.zeros(0, 0)
    try:
        loss({"values": none, "old_values": none, "returns": none, "mask": none > 0})
    except UsageError as error:
        raise UsageError(f"critic.loss.{error}") from None
    return loss


def check_teacher(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for a missing or unused teacher.

    Raises:
        UsageError: as said.
    """
    needed = "teacher_gap" in algorithm.bound_advantage.required
    settings = config.distillation
    if needed and settings is None:
        raise UsageError(
            f"distillation.teacher: must be given, as algorithm {config.algorithm.name!r} needs a "
            "teacher."
        )
    if settings is None:
        return
    if not needed:
        raise UsageError(
            f"distillation.teacher = {settings.teacher!r}: algorithm {config.algorithm.name!r} "
            "does not use a teacher; set algorithm.name = 'opd'."
        )
    if settings.top_k is None and settings.beta != 1:
        raise UsageError(
            f"distillation.beta = {settings.beta}: without top_k, the sampled token estimates "
            "only the reverse KL (beta = 1); set distillation.top_k."
        )
    if settings.teacher == SELF and settings.prompt is None:
        raise UsageError(
            "distillation.teacher = 'self': a teacher equal to the policy, with the same prompt, "
            "has nothing to teach; set distillation.prompt, such as '{prompt} A solution: "
            "{solution}'."
        )


def check_partial_rollouts(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for settings that cannot be combined with partial rollouts.

    Raises:
        UsageError: with the settings to choose from.
    """
    settings = config.partial_rollouts
    if settings is None or settings.tokens_per_step >= config.sampling.max_tokens:
        return
    corrects = algorithm.row.correction.name != "none" or config.update.proximal == "sampler"
    if settings.old_tokens == "correct" and not corrects:
        raise UsageError(
            f"partial_rollouts.old_tokens = 'correct': algorithm {config.algorithm.name!r} does "
            "not correct for tokens of earlier policies; set algorithm.correction.name = 'tis', "
            "update.proximal = 'sampler', or partial_rollouts.old_tokens = 'mask'."
        )
    if settings.old_tokens == "mask" and algorithm.second_learner is not None:
        raise UsageError(
            f"partial_rollouts.old_tokens = 'mask': algorithm {config.algorithm.name!r} needs "
            "every token of a completion; set partial_rollouts.old_tokens = 'correct'."
        )
    if config.update.minibatches > 1:
        raise UsageError(
            f"update.minibatches = {config.update.minibatches}: with partial_rollouts a step may "
            "complete a single group; set update.minibatches = 1."
        )
    if config.guards.spike is not None:
        raise UsageError(
            f"guards.spike = {config.guards.spike:g}: a rollback would continue completions of "
            "weights that it discards; remove it, or the section [partial_rollouts]."
        )


def check_process(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for missing or unused step rewards.

    Raises:
        UsageError: as said.
    """
    needed = "step_rewards" in algorithm.bound_advantage.required
    settings = config.process
    if needed and settings is None:
        raise UsageError(
            f"process: must be given, as algorithm {config.algorithm.name!r} needs a reward for "
            "every step; set process.model or process.function."
        )
    if settings is None:
        return
    if not needed:
        raise UsageError(
            f"process: algorithm {config.algorithm.name!r} does not use rewards of steps; set "
            "algorithm.name = 'grpo_process', or use the reward 'process_reward'."
        )
    if (settings.model is None) == (settings.function is None):
        raise UsageError(
            f"process.model = {settings.model!r}, process.function = {settings.function!r}: "
            "exactly one of them must be given."
        )


def check_functions(config: Config) -> None:
    """Bind the algorithm and every reward to their functions, which checks their settings.

    Raises:
        UsageError: unknown name or setting, a value of the wrong type or range.
    """
    from groupwise.algorithms import bind
    from groupwise.config.preferences import check_online
    from groupwise.config.processes import check_processes
    from groupwise.environments import ENVIRONMENTS
    from groupwise.rewards import REWARDS, combination

    check_registered(config)
    algorithm = bind(config.algorithm.name, config.algorithm.overrides(), where="algorithm")
    validate_by_call(algorithm, config)
    check_processes(config)
    check_online(config, algorithm)
    check_ahead(config, algorithm)
    check_streaming(config, algorithm)
    value_loss(config)
    check_frozen(config, algorithm)
    check_teacher(config, algorithm)
    check_partial_rollouts(config, algorithm)
    check_process(config, algorithm)
    try:
        combination(config.combine)
    except UsageError as error:
        raise UsageError(str(error).removeprefix("reward.")) from None
    if (environment := config.environment) is not None:
        if environment.name not in ENVIRONMENTS:
            raise UsageError(
                f"environment.name = {environment.name!r}: no such environment; "
                + suggest(environment.name, ENVIRONMENTS)
            )
        ENVIRONMENTS.bind(
            FunctionSpec(name=environment.name, settings=environment.settings), where="environment"
        )
    for index, reward in enumerate(config.rewards):
        if reward.name not in REWARDS:
            raise UsageError(
                f"rewards.{index}.name = {reward.name!r}: no such reward; "
                + suggest(reward.name, REWARDS)
            )
        REWARDS.bind(
            FunctionSpec(name=reward.name, settings=reward.settings), where=f"rewards.{index}"
        )

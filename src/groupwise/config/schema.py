"""All settings of a run; combinations that cannot work raise an error when a recipe is loaded."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from groupwise.config.checks import check_combinations, check_functions
from groupwise.errors import UsageError, suggest
from groupwise.settings import (
    FREE,
    RUNS_CODE,
    AlertsSettings,
    AlgorithmSettings,
    CheckpointSettings,
    ClusterSettings,
    Count,
    CriticSettings,
    DataSettings,
    DistillationSettings,
    DistributedSettings,
    EngineSettings,
    EnvironmentSettings,
    EvaluationSettings,
    GuardsSettings,
    HubSettings,
    Location,
    LoggingSettings,
    ModelSettings,
    Names,
    OptimizerSettings,
    PartialRolloutsSettings,
    PreferenceSettings,
    ProcessSettings,
    RewardModelSettings,
    RewardPoolSettings,
    RewardSettings,
    Sampling,
    ScheduleSettings,
    Section,
    SftSettings,
    StreamingSettings,
    TokenRewardSettings,
    UpdateSettings,
    WarmupSettings,
    WatchdogSettings,
    Whole,
)


class Config(Section):
    """The settings of a run."""

    steps: Annotated[Count, FREE] = 100
    """Number of training steps; each takes one batch of rollouts."""
    seed: Whole = 0
    """Seed of all random numbers of the run."""
    output: Annotated[Location, FREE] = "runs/groupwise"
    """Run directory."""
    prompts_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Prompts per batch of rollouts (P)."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of steps between the weights that sample a batch and the update that learns from it
    (k). With 1 or more, a cluster samples while the learner updates; 0 alternates the two."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Completions per prompt (G); leave-one-out advantages take memory with its square."""
    threads: Annotated[Annotated[int, Field(ge=1, le=4096)] | None, FREE] = None
    """Number of CPU threads; None uses PyTorch's default, or the cores that a CPU quota allows if
    they are fewer."""
    imports: Annotated[Names, RUNS_CODE] = ()
    """Modules or .py files that register rewards, algorithms or environments; they are imported
    first. `--import` adds to them."""
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    sampling: Sampling = Sampling()
    engine: EngineSettings = EngineSettings()
    environment: EnvironmentSettings | None = None
    partial_rollouts: PartialRolloutsSettings | None = None
    streaming: StreamingSettings | None = None
    combine: str | dict[str, Any] | list[Any] = "weighted_sum"
    """How the components of the reward are combined into one total: a name, a table with settings,
    or a list."""
    rewards: Annotated[tuple[RewardSettings, ...], Field(strict=False)] = ()
    reward_pool: Annotated[RewardPoolSettings, FREE] = RewardPoolSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    update: UpdateSettings = UpdateSettings()
    cluster: Annotated[ClusterSettings | None, FREE] = None
    distributed: Annotated[DistributedSettings, FREE] = DistributedSettings()
    critic: CriticSettings = CriticSettings()
    token_reward: TokenRewardSettings = TokenRewardSettings()
    checkpoint: Annotated[CheckpointSettings, FREE] = CheckpointSettings()
    evaluation: Annotated[EvaluationSettings, FREE] = EvaluationSettings()
    logging: Annotated[LoggingSettings, FREE] = LoggingSettings()
    hub: Annotated[HubSettings | None, FREE] = None
    alerts: Annotated[AlertsSettings, FREE] = AlertsSettings()
    guards: Annotated[GuardsSettings, FREE] = GuardsSettings()
    watchdog: Annotated[WatchdogSettings, FREE] = WatchdogSettings()
    warmup: WarmupSettings | None = None
    distillation: DistillationSettings | None = None
    process: ProcessSettings | None = None
    sft: SftSettings | None = None
    schedules: Annotated[tuple[ScheduleSettings, ...], Field(strict=False)] = ()
    """Numeric settings that change during the run."""
    preference: PreferenceSettings | None = None
    reward_model: RewardModelSettings | None = None

    @model_validator(mode="after")
    def _can_work_together(self) -> Config:
        check_combinations(self)
        check_functions(self)
        return self

    def to_json(self) -> str:
        """All settings, including defaults, as JSON."""
        return self.model_dump_json(indent=2)


def free_to_change() -> frozenset[str]:
    """Dotted paths of the settings and sections that a resumed run may change.

    Example:
        >>> {"steps", "checkpoint", "engine.max_rows"} <= free_to_change()
        True
        >>> "optimizer.learning_rate" in free_to_change()
        False
    """
    return frozenset(path for path, *_ in _marked(Config, "free_to_change"))


def needs_trust() -> dict[str, tuple[str, Any]]:
    """Settings that a recipe file may change only if it is trusted: dotted path → (reason,
    default).

    Example:
        >>> sorted(needs_trust())
        ['engine.python', 'hub.name', 'hub.private', 'imports', 'model.trust_remote_code']
        >>> needs_trust()["hub.private"]
        ('sends the model to the hub', True)
    """
    return {path: (why, default) for path, why, default in _marked(Config, "needs_trust")}


def _marked(
    section: type[BaseModel], mark: str, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """The settings whose metadata has a mark, each with the value of the mark and its default."""
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get(mark):
            yield f"{prefix}{name}", extra[mark], field.default
        for option in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _marked(option, mark, f"{prefix}{name}.")


def check_known(steps: Sequence[str]) -> None:
    """Raise an error for a setting to be reset that does not exist; other mistakes show when the
    configuration is built."""
    fields: Any = Config.model_fields
    for step in steps:
        if step not in fields:
            raise UsageError(f"--set {'.'.join(steps)}=: no such setting; {suggest(step, fields)}")
        section = getattr(fields[step].annotation, "model_fields", None)
        if section is None or fields[step].annotation.model_config.get("extra") != "forbid":
            return
        fields = section

"""The settings of every module: light to import, so that mistakes are reported before torch loads.

`base.py` has the base class and constrained types; the other modules have the sections of a recipe.
"""

from groupwise.settings.base import (
    FREE,
    RUNS_CODE,
    Count,
    Location,
    Name,
    Names,
    Positive,
    Section,
    Whole,
)
from groupwise.settings.changing import ScheduleSettings
from groupwise.settings.distillation import SELF, DistillationSettings
from groupwise.settings.distributed import ClusterSettings, DistributedSettings
from groupwise.settings.hub import HubSettings
from groupwise.settings.learners import (
    CriticSettings,
    PretrainingSettings,
    SecondLearnerSettings,
    TokenRewardSettings,
)
from groupwise.settings.offline import (
    DatasetSettings,
    PreferenceSettings,
    RewardModelSettings,
    SftSettings,
    WarmupSettings,
)
from groupwise.settings.partial import PartialRolloutsSettings
from groupwise.settings.process import ProcessSettings
from groupwise.settings.sections import (
    AdapterSettings,
    AlertsSettings,
    AlgorithmSettings,
    CheckpointSettings,
    DataSettings,
    EngineSettings,
    EnvironmentSettings,
    EvaluationSettings,
    GuardsSettings,
    LoggingSettings,
    ModelSettings,
    OptimizerSettings,
    RewardPoolSettings,
    RewardSettings,
    Sampling,
    UpdateSettings,
    WatchdogSettings,
)
from groupwise.settings.streaming import StreamingSettings

__all__ = [
    "AdapterSettings",
    "AlertsSettings",
    "AlgorithmSettings",
    "CheckpointSettings",
    "ClusterSettings",
    "Count",
    "CriticSettings",
    "DataSettings",
    "DatasetSettings",
    "DistillationSettings",
    "SELF",
    "ProcessSettings",
    "DistributedSettings",
    "EngineSettings",
    "EnvironmentSettings",
    "EvaluationSettings",
    "FREE",
    "GuardsSettings",
    "HubSettings",
    "Location",
    "LoggingSettings",
    "ModelSettings",
    "Name",
    "Names",
    "OptimizerSettings",
    "PartialRolloutsSettings",
    "Positive",
    "PreferenceSettings",
    "PretrainingSettings",
    "RUNS_CODE",
    "RewardModelSettings",
    "RewardPoolSettings",
    "RewardSettings",
    "Sampling",
    "ScheduleSettings",
    "SecondLearnerSettings",
    "Section",
    "SftSettings",
    "StreamingSettings",
    "TokenRewardSettings",
    "UpdateSettings",
    "WarmupSettings",
    "WatchdogSettings",
    "Whole",
]

"""The preference function of a configuration, and checks of online preferences."""

from __future__ import annotations

import typing

import torch

from groupwise.algorithms.losses import REFERENCED
from groupwise.algorithms.preferences import PREFERENCES
from groupwise.errors import UsageError
from groupwise.registry import BoundFunction, FunctionSpec
from groupwise.settings import PreferenceSettings

if typing.TYPE_CHECKING:
    from groupwise.algorithms import BoundAlgorithm
    from groupwise.config.schema import Config


USED_ONLINE = frozenset({"online", "loss", "nll", "pairs"})
"""The settings of [preference] that affect online pairs."""


def preference_function(settings: PreferenceSettings) -> BoundFunction:
    """The preference function of a section, with its settings.

    Raises:
        UsageError: an unknown name or setting, or a value out of range.
    """
    given = dict(settings.loss)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise UsageError(f"preference.loss.name = {name!r}: must be the name of a function.")
    bound = PREFERENCES.bind(FunctionSpec(name=name, settings=given), where="preference.loss")
    one = torch.zeros(1)
    try:
        bound({name: one if name != "desirable" else one == 0 for name in bound.inputs})
    except UsageError as error:
        raise UsageError(f"preference.loss.{error}") from None
    return bound


def compares_with_reference(config: Config) -> bool:
    """Whether an online preference function reads log-probabilities of a reference model."""
    if config.preference is None or not config.preference.online:
        return False
    return not REFERENCED.isdisjoint(preference_function(config.preference).inputs)


def described(config: Config) -> dict[str, str]:
    """Entries of report and model card that replace the algorithm of a run with online
    preferences."""
    own = config.preference
    if own is None or not own.online:
        return {}
    return {"method": "online preference optimization", "learned_by": own.loss["name"]}


def method_of(config: Config) -> str:
    """The name of a run's method: its algorithm, or the function of its online preferences."""
    return described(config).get("learned_by", config.algorithm.name)


def check_online(config: Config, algorithm: BoundAlgorithm) -> None:
    """Raise an error for settings that cannot be combined with online preferences.

    Raises:
        UsageError: with the setting to change.
    """
    own = config.preference
    if own is None or not own.online:
        return
    function = preference_function(own)
    if own.data is not None:
        raise UsageError(
            f"preference.data = {own.data!r}: online preferences form pairs from rollouts; remove "
            "it, or set preference.online = false."
        )
    if "delta" in function.inputs:
        raise UsageError(
            f"preference.loss.name = {function.spec.name!r}: judges single answers, but online "
            "preferences need a function of pairs, such as 'logistic'."
        )
    if (second := algorithm.second_learner) is not None:
        raise UsageError(
            f"algorithm.name = {config.algorithm.name!r}: trains the second learner {second!r}, "
            "which online preferences do not use; choose another algorithm."
        )
    if config.group_size < 2:
        raise UsageError("group_size = 1: must be at least 2 to form pairs.")
    for path in ("minibatches", "epochs"):
        if (value := getattr(config.update, path)) != 1:
            raise UsageError(
                f"update.{path} = {value}: online preferences take one optimizer step for each "
                "batch; set it to 1."
            )
    for section in ("distillation", "process"):
        if getattr(config, section) is not None:
            raise UsageError(
                f"{section}: cannot be combined with preference.online; remove one of them."
            )
    for setting in ("ahead", "streaming", "partial_rollouts"):
        if getattr(config, setting):
            raise UsageError(
                f"{setting}: answers of earlier weights need a correction, which online "
                "preferences do not have; remove it."
            )
    for name, field in type(own).model_fields.items():
        if name not in USED_ONLINE and (value := getattr(own, name)) != field.default:
            raise UsageError(
                f"preference.{name} = {value!r}: applies only to pairs formed before the first "
                "step; remove it, or set preference.online = false."
            )

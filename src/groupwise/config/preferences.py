"""The preference function of a configuration, and what online preferences need."""

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
"""The settings of a section [preference] that act on online pairs."""


def preference_function(settings: PreferenceSettings) -> BoundFunction:
    """The function that a section names, with its settings.

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
    """What the report and the card of a run say of it in place of its algorithm, where it learns by
    online preferences."""
    own = config.preference
    if own is None or not own.online:
        return {}
    return {"method": "online preference optimization", "learned_by": own.loss["name"]}


def method_of(config: Config) -> str:
    """What a run is called: its algorithm, or the preference function that it learns by online."""
    return described(config).get("learned_by", config.algorithm.name)


def check_online(config: Config, algorithm: BoundAlgorithm) -> None:
    """Refuse settings that have no meaning where pairs are made of the run's own rollouts.

    Raises:
        UsageError: with the setting to change.
    """
    own = config.preference
    if own is None or not own.online:
        return
    function = preference_function(own)
    if own.data is not None:
        raise UsageError(
            f"preference.data = {own.data!r}: pairs are made of the run's own rollouts; remove it, "
            "or set preference.online = false."
        )
    if "delta" in function.inputs:
        raise UsageError(
            f"preference.loss.name = {function.spec.name!r}: judges single answers; online pairs "
            "need a function of two, such as 'logistic'."
        )
    if (second := algorithm.second_learner) is not None:
        raise UsageError(
            f"algorithm.name = {config.algorithm.name!r}: needs the learner {second!r}, which "
            "pairs have no use for; leave it out."
        )
    if config.group_size < 2:
        raise UsageError("group_size = 1: makes no pairs; set at least 2.")
    for path in ("minibatches", "epochs"):
        if (value := getattr(config.update, path)) != 1:
            raise UsageError(
                f"update.{path} = {value}: online preferences take one optimizer step for each "
                "batch; set it to 1."
            )
    for section in ("distillation", "process"):
        if getattr(config, section) is not None:
            raise UsageError(
                f"{section}: has no place beside preference.online; remove one of them."
            )
    for setting in ("ahead", "streaming", "partial_rollouts"):
        if getattr(config, setting):
            raise UsageError(
                f"{setting}: answers of earlier weights would need the algorithm's correction, "
                "which online preferences do not have; remove it."
            )
    for name, field in type(own).model_fields.items():
        if name not in USED_ONLINE and (value := getattr(own, name)) != field.default:
            raise UsageError(
                f"preference.{name} = {value!r}: is for pairs made before the first step; remove "
                "it, or set preference.online = false."
            )

"""The experiment file (TOML): arms, seeds and rules, fixed before the first run.

Defaults are filled in when it is read, so the copy beside the results is complete.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from groupwise.algorithms import ALGORITHMS
from groupwise.config import Config, load
from groupwise.config.building import checked
from groupwise.config.recipes import distrusted, read
from groupwise.errors import UsageError, suggest
from groupwise.experiments.arms import advantage_only, differences, fitting, in_words
from groupwise.extensions import names_code
from groupwise.settings import Count, Name, Names, Positive, Section, Whole

Match = Literal["samples", "tokens", "seconds"]
Seeds = Annotated[tuple[Whole, ...], Field(strict=False, min_length=1)]
Rates = Annotated[tuple[Positive, ...], Field(strict=False)]
Label = Annotated[str, Field(pattern=r"^[\w+@-][\w.+@-]*$")]

SLIM = (
    "threads=1",
    "logging.rollouts_every=0",
    "evaluation.every_steps=0",
    "evaluation.keep_best=false",
    "hub=null",
)
"""Settings that override the recipe without changing results; `set` may override them, but for the
hub: the runs of an experiment would replace each other there."""

GRID = (0.25, 0.5, 1.0, 2.0)
"""Learning rates of the tuning grid, as multiples of the recipe's."""


class Tuning(Section):
    """Tuning of each arm's learning rate, on seeds that the comparison does not use."""

    seeds: Seeds = (1000, 1001)
    """Seeds of the tuning runs."""
    learning_rates: Rates = ()
    """Ascending grid; empty takes multiples of the recipe's rate."""
    extensions: Whole = 2
    """Most extensions of the grid by one rate where the best is at an edge."""
    equal_rates: bool = False
    """Where an arm's rate differs from that of the reference arm, run both at both rates, so that
    the algorithm can be told from its learning rate. Needs `match = "samples"`."""


class Arm(Section):
    """One arm: a row of the algorithm table with its changed settings, or a finished model."""

    label: Label
    """Name in results and figures; defaults to the algorithm's."""
    algorithm: str = ""
    """Row of the table; empty for a finished model."""
    model: Name | None = None
    """A finished model, which is evaluated as it is: RL against SFT."""
    set: Names = ()
    """Settings of this arm, in the form of `--set`."""
    learning_rate: Positive | None = None
    """Peak learning rate; None takes the tuned one, or the recipe's."""

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "algorithm" in values:
            return {"label": values["algorithm"], **values}
        return values

    @model_validator(mode="after")
    def _one_of_both(self) -> Arm:
        if bool(self.algorithm) == bool(self.model):
            raise UsageError(f"arms: {self.label!r} must have either an algorithm or a model.")
        return self


class Plan(Section):
    """A whole experiment."""

    title: str = ""
    """Heading of the report."""
    recipe: Name
    """A packaged recipe by name, or the path of a TOML file."""
    set: Names = ()
    """Settings of every arm, in the form of `--set`."""
    seeds: Seeds
    """Each arm runs once per seed; runs of one seed share all random numbers."""
    splits: Names = ()
    """Held-out splits evaluated before and after training; empty takes `data.eval_split`."""
    match: Match = "samples"
    """What runs of one seed get the same amount of: sampled completions (that is, steps), generated
    tokens, or seconds. The reference arm takes its `steps`; what it used is the others' budget."""
    against: str = ""
    """Label of the reference arm, with which the others are compared; empty takes the last."""
    only: Literal["", "advantage"] = ""
    """"advantage": every arm is the reference arm's row with its own advantage."""
    metric: Literal["accuracy", "reward"] = "accuracy"
    """The learning curve that is compared."""
    threshold: float = 0.6
    """Level of the metric that counts as learned."""
    margin: Positive | None = None
    """Difference of the mean metric over training below which arms count as equivalent, in the
    metric's own unit (.01 is one percentage point); None claims no equivalence."""
    hypotheses: Names = ()
    """Expectations, in words."""
    stopping: str = "Every seed is run once; no result is looked at before all are in."
    """The stopping rule, in words."""
    most_steps: Count = 3
    """Limit of runs matched in tokens or seconds, as a multiple of the recipe's steps."""
    tuning: Tuning | None = None
    arms: Annotated[tuple[Arm, ...], Field(strict=False, min_length=1)]

    @property
    def digest(self) -> str:
        """Hash of all settings that are not defaults."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    def arm(self, label: str) -> Arm:
        """The arm of that label."""
        return next(arm for arm in self.arms if arm.label == label)

    def overrides(self, arm: Arm) -> list[str]:
        """The settings of an arm's runs, in the form of `--set`."""
        if arm.model is not None:
            return [*SLIM, *self.set, *arm.set, f"model.path={json.dumps(arm.model)}"]
        recipe = read(self.recipe)
        reference = self.arm(self.against or self.arms[-1].label).algorithm
        if self.only and reference and arm.algorithm != reference:
            left = [each for each in fitting(recipe, reference) if ".advantage." not in each]
            own = advantage_only(recipe, arm.algorithm, reference)
            return [*SLIM, *left, *self.set, *arm.set, *own]
        left = fitting(recipe, arm.algorithm)
        name = f"algorithm.name={json.dumps(arm.algorithm)}"
        return [*SLIM, *left, *self.set, *arm.set, name]

    def differences(self) -> list[str]:
        """How each arm differs from the reference arm, apart from its advantage, in words."""
        trained = {arm.label: self.config(arm) for arm in self.arms if arm.model is None}
        reference = self.against or self.arms[-1].label
        return in_words(differences(trained, reference)) if reference in trained else []

    def config(self, arm: Arm) -> Config:
        """The configuration of an arm's runs, without seed, learning rate and folder."""
        return load(self.recipe, self.overrides(arm))


def read_plan(path: str | Path, *, trusted: bool = False) -> Plan:
    """Read and check an experiment file.

    Args:
        trusted: accept overrides that can run code.

    Raises:
        UsageError: no such file, not TOML, or a setting that cannot be used.
    """
    values = _values(path)
    if not trusted:
        _refuse_code(checked(Plan, values))
    return make_plan(values)


def differing(path: str | Path, plan: Plan) -> list[str]:
    """The settings in which an experiment file differs from a plan. Nothing that the file names is
    looked up, since the file may come from elsewhere.

    Raises:
        UsageError: no such file, not TOML, or a setting that cannot be used.
    """
    file = checked(Plan, _values(path))
    filled = {name: getattr(file, name) or getattr(plan, name) for name in ("against", "splits")}
    if file.tuning is not None and plan.tuning is not None:
        rates = file.tuning.learning_rates or plan.tuning.learning_rates
        filled["tuning"] = file.tuning.model_copy(update={"learning_rates": rates})
    before, now = file.model_copy(update=filled).model_dump(), plan.model_dump()
    return [key for key in now if now[key] != before[key]]


def _values(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"plan = {str(path)!r}: is not valid TOML: {error}.") from None
    except OSError as error:
        raise UsageError(f"plan = {str(path)!r}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"plan = {str(path)!r}: must be a text file in UTF-8.") from None


def _refuse_code(plan: Plan) -> None:
    """Refuse what a file may not set, before anything of the plan is looked up."""
    for override in (*plan.set, *(each for arm in plan.arms for each in arm.set)):
        if why := distrusted(override):
            raise UsageError(
                f"set = {override!r}: {why}, so an experiment file may not set it; use "
                "compare RECIPE --set instead, or report --trust-recipe for an experiment of "
                "your own."
            )
    for place, arm in enumerate(plan.arms):
        if names_code(arm.algorithm):
            raise UsageError(
                f"arms.{place}.algorithm = {arm.algorithm!r}: names code, so an experiment file "
                "may not set it; import the file with --import and name the row, or use report "
                "--trust-recipe for an experiment of your own."
            )


def make_plan(values: Mapping[str, Any]) -> Plan:
    """Check the values of a plan and fill in defaults.

    Raises:
        UsageError: an unknown algorithm, recipe or setting, or arms that cannot be compared.

    Example:
        >>> arms = [{"algorithm": "softrank"}, {"algorithm": "grpo"}]
        >>> plan = make_plan({"recipe": "word-problems", "seeds": [0, 1], "arms": arms})
        >>> plan.against, plan.splits
        ('grpo', ('held_out',))
    """
    plan = checked(Plan, values)
    labels = [arm.label for arm in plan.arms]
    for label in labels:
        if label == "base":
            raise UsageError(
                "arms: label = 'base': is reserved for the model before training; "
                "choose another name."
            )
        if labels.count(label) > 1:
            raise UsageError(
                f"arms: two have the label {label!r}; rename one with label = … in the file, or "
                f"with NAME={label} on the command line."
            )
    for place, arm in enumerate(plan.arms):
        if arm.model is None and arm.algorithm not in ALGORITHMS:
            raise UsageError(
                f"arms.{place}.algorithm = {arm.algorithm!r}: no such row; "
                + suggest(arm.algorithm, ALGORITHMS)
            )
    if plan.against and plan.against not in labels:
        raise UsageError(
            f"against = {plan.against!r}: must be one of the arms; {suggest(plan.against, labels)}"
        )
    if plan.arm(plan.against or labels[-1]).model is not None and plan.match != "samples":
        raise UsageError(f"match = {plan.match!r}: the reference arm is a model that is not run.")
    _check_seeds(plan)
    configs = [plan.config(arm) for arm in plan.arms]
    filled = {"against": plan.against or labels[-1], "tuning": _tuning(plan, configs[0])}
    filled["splits"] = plan.splits or (configs[0].data.eval_split,)
    plan = plan.model_copy(update=filled)
    for arm, config in zip(plan.arms, configs, strict=True):
        _check_matching(plan, arm, config)
    return plan


def toml(plan: Plan) -> str:
    """The plan as an experiment file.

    JSON and TOML share the syntax of strings, numbers and lists.
    """
    values = plan.model_dump(mode="json", exclude_none=True)
    arms, tuning = values.pop("arms"), values.pop("tuning", None)
    lines = _pairs(values)
    if tuning is not None:
        lines += ["", "[tuning]", *_pairs(tuning)]
    for arm in arms:
        lines += ["", "[[arms]]", *_pairs(arm)]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in values.items()]


def _tuning(plan: Plan, config: Config) -> Tuning | None:
    """The tuning section with its grid."""
    if plan.tuning is None or plan.tuning.learning_rates:
        return plan.tuning
    rates = tuple(float(f"{factor * config.optimizer.learning_rate:.6g}") for factor in GRID)
    return plan.tuning.model_copy(update={"learning_rates": rates})


def _check_seeds(plan: Plan) -> None:
    """Refuse seeds that are used twice, and learning rates that cannot be tuned."""
    for where, seeds in (("seeds", plan.seeds), ("tuning.seeds", _tuning_seeds(plan))):
        if len(dict.fromkeys(seeds)) < len(seeds):
            raise UsageError(f"{where} = {list(seeds)}: every seed must occur once.")
    if shared := sorted({*plan.seeds} & {*_tuning_seeds(plan)}):
        raise UsageError(
            f"tuning.seeds: {', '.join(map(str, shared))} must not be seeds of the comparison, "
            "because a learning rate looks better than it is on the seeds it was chosen on."
        )
    if plan.tuning is None:
        return
    if plan.tuning.equal_rates and plan.match != "samples":
        raise UsageError(
            f"tuning.equal_rates = true: needs match = 'samples'; got match = {plan.match!r}."
        )
    rates = plan.tuning.learning_rates
    if len(rates) == 1 or any(b <= a for a, b in zip(rates, rates[1:], strict=False)):
        raise UsageError(
            f"tuning.learning_rates = {list(rates)}: must be at least two, in ascending order."
        )
    for place, arm in enumerate(plan.arms):
        if arm.learning_rate is not None:
            raise UsageError(
                f"arms.{place}.learning_rate = {arm.learning_rate}: is fixed, but [tuning] "
                "searches for it; remove one of the two."
            )


def _tuning_seeds(plan: Plan) -> tuple[int, ...]:
    return () if plan.tuning is None else plan.tuning.seeds


def _check_matching(plan: Plan, arm: Arm, config: Config) -> None:
    """Refuse runs without a curve, and schedules that need the number of steps."""
    if config.steps < 2:
        raise UsageError(f"steps = {config.steps}: a learning curve needs at least 2.")
    if plan.match != "samples" and config.optimizer.schedule != "constant":
        raise UsageError(
            f"match = {plan.match!r}: the number of steps is not known in advance, but "
            f"optimizer.schedule = {config.optimizer.schedule!r} needs it ({arm.label}); set the "
            "schedule to 'constant', or match = 'samples'."
        )
    for text in chain(plan.set, arm.set):
        key = text.partition("=")[0].strip()
        if key in ("seed", "output", "algorithm.name"):
            raise UsageError(f"set = {text!r}: the experiment sets {key} itself.")
        if key.partition(".")[0] == "hub":
            raise UsageError(
                f"set = {text!r}: models of an experiment are not uploaded; hf upload OWNER/MODEL "
                "FOLDER sends one of them."
            )
    for text in arm.set:
        if text.startswith("optimizer.learning_rate"):
            raise UsageError(
                f"arms: set = {text!r}: use learning_rate = … of the arm instead ({arm.label})."
            )

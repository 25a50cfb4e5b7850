"""Settings of data and values that change during a run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from groupwise.errors import UsageError
from groupwise.settings.base import Count, Location, Name, Section, Share, Whole


class SourceSettings(Section):
    """One of several sources of training prompts; None takes the value of [data]."""

    name: Name
    """Name of the source, in the column `source` and in messages."""
    data: Location
    """File, folder, hub name or generator."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Fraction of the run's prompts; the fractions of all sources add up to 1."""
    subset: str | None = None
    """Configuration of a hub data set."""
    revision: Name | None = None
    """Commit, tag or branch of a hub data set."""
    split: Name | None = None
    """Split to train on."""
    prompt_column: Name | None = None
    """Column with the prompt."""
    answer_column: Name | None = None
    """Column with the reference answer."""
    id_column: Name | None = None
    """Column with ids."""
    answer_style: Name | None = None
    """Format of the reference answer."""
    system: str | None = None
    """System message before every prompt."""
    wording: str | None = None
    """Template that builds the prompt from columns."""
    limit: Count | None = None
    """Maximum number of prompts from this source."""


class OrderSettings(Section):
    """The order in which training prompts are drawn."""

    name: Literal["shuffled", "curriculum", "prioritised"] = "shuffled"
    """"shuffled" reshuffles every epoch, "curriculum" goes from easy to hard, "prioritised" draws
    in proportion to 1 − the share of right answers."""
    column: Name | None = None
    """Curriculum: column with the difficulty or a measured pass rate."""
    easiest: Literal["low", "high"] = "low"
    """Curriculum: whether low or high values are easy; high pass rates are easy."""
    per_level: Count | None = None
    """Curriculum: prompts drawn from each level before the next; None uses every prompt once."""
    floor: Share = 0.0
    """Prioritised: minimum weight of a prompt, so that solved ones are drawn again."""

    @model_validator(mode="after")
    def _complete(self) -> OrderSettings:
        if self.name == "curriculum" and self.column is None:
            raise UsageError("data.order.column: must be given for a curriculum.")
        return self


Point = Annotated[tuple[Whole, float], Field(strict=False)]


class ScheduleSettings(Section):
    """A numeric setting that changes over the steps, interpolated linearly between points."""

    setting: Name
    """Dotted path of the number: "rewards.1.weight", "algorithm.advantage.tau",
    "algorithm.divergence.coefficient", "sampling.max_tokens"."""
    points: Annotated[tuple[Point, ...], Field(strict=False, min_length=1)]
    """Steps and values, as [[1, 0.0], [50, 0.5]]; steps count from 1 and ascend."""

    @model_validator(mode="after")
    def _ascending(self) -> ScheduleSettings:
        steps = [step for step, _ in self.points]
        if any(b <= a for a, b in zip(steps, steps[1:], strict=False)) or steps[0] < 1:
            raise UsageError(
                f"schedules: points of {self.setting} = {list(self.points)}: steps must ascend "
                "from 1."
            )
        if not re.fullmatch(
            r"rewards\.\d+\.weight|algorithm\..+|sampling\.max_tokens", self.setting
        ):
            raise UsageError(
                f"schedules: setting = {self.setting!r}: must be a weight of a reward, a number of "
                "the algorithm, or sampling.max_tokens."
            )
        return self

    def at(self, step: int) -> float:
        """The value at a step, on the line between the points around it.

        Example:
            >>> schedule = ScheduleSettings(setting="rewards.0.weight", points=((1, 0.0), (5, 1.0)))
            >>> schedule.at(1), schedule.at(2), schedule.at(9)
            (0.0, 0.25, 1.0)
        """
        before = [point for point in self.points if point[0] <= step]
        after = [point for point in self.points if point[0] > step]
        if not before or not after:
            return (before[-1] if before else after[0])[1]
        (start, low), (end, high) = before[-1], after[0]
        return low + (high - low) * (step - start) / (end - start)

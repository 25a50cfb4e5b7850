"""How one group is judged, apart from where the calls run: stages, calls, results, totals.

`judge_group` is a generator: it yields the calls of a stage, is sent their results, and returns the
`GroupScore`. Whoever drives it decides whether the calls run in this process, in workers that can
be killed, or on an event loop. This module imports no torch: workers load it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import RewardError
from groupwise.rewards.base import GroupScore, Unjudgeable, as_correct
from groupwise.rewards.compose import Combination
from groupwise.rewards.scoring.adapters import VALUE, MissingData

if TYPE_CHECKING:
    from groupwise.rewards.scoring.adapters import Place, RewardFn
    from groupwise.types import Completion, Group

MOST_REWARD = 1e18
"""Largest absolute reward: its square, which statistics of a group contain, is a float32."""

NOT_FINITE = "its log-probabilities are NaN or infinite"
"""Why a completion is not judged that a model without finite logits wrote."""

RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""What a reward raises itself; everything else is meant for the run, such as Ctrl-C."""

_PACKAGE = Path(__file__).parents[2]
_STANDARD = Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True, kw_only=True)
class RewardComponent:
    """One part of a composed reward, ready to be called.

    Attributes:
        label: its name in `Scores.parts`, unique within the composition.
        reward: what is called, with the names of the data that it asks for.
        weight: handed to the combination.
        verifies: its value, cut to 0 … 1, is the raw correctness.
        optional: None means "does not apply here" instead of "cannot be judged".
    """

    label: str
    reward: RewardFn
    weight: float = 1.0
    verifies: bool = False
    optional: bool = False

    @property
    def whole_group(self) -> bool:
        return self.reward.whole_group

    @property
    def place(self) -> Place:
        return self.reward.place


@dataclass(frozen=True, kw_only=True)
class Composition:
    """All parts of a reward in their order, and how their values become one total."""

    parts: tuple[RewardComponent, ...]
    combination: Combination
    max_tokens: int | None = None

    @property
    def stages(self) -> tuple[tuple[RewardComponent, ...], ...]:
        """Neighbouring parts that run in the same place, and over the same unit, go together; a
        part with a worker of its own stands alone."""
        stages: list[list[RewardComponent]] = []
        for part in self.parts:
            last = stages[-1][-1] if stages else None
            alone = part.whole_group or part.place in ("async", "in_thread", "own_worker")
            if last and not alone and (last.whole_group, last.place) == (False, part.place):
                stages[-1].append(part)
            else:
                stages.append([part])
        return tuple(map(tuple, stages))


@dataclass(frozen=True, kw_only=True)
class Call:
    """Some parts to be run on the data of one completion, or one part on those of a group."""

    stage: int
    indices: tuple[int, ...]
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What came of a call. A failure is (status, message); parts before it keep their values.

    `failures` are those of single completions of a group, one entry for each or none at all.
    """

    values: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    failure: tuple[str, str] | None = None
    failures: Sequence[tuple[str, str] | None] = ()


class ContractError(Exception):
    """A reward broke its contract in a way that concerns the whole run."""


def run(parts: Sequence[RewardComponent], call: Call, *, first: bool = False) -> CallResult:
    """Run the parts of a call one after the other, in this thread; never raises.

    A part sees the raw correctness that an earlier one found. With `first`, a value ends the call:
    later parts are not reached.
    """
    values: dict[str, Sequence[float | None]] = {}
    seconds: dict[str, float] = {}
    failure, failures = None, ()
    data = dict(call.data)
    for part in parts:
        start = time.perf_counter()
        try:
            result = check(part, part.reward(data), call, first=first)
        except Unjudgeable as reason:
            result = unjudged(part, call, str(reason), first=first)
        except RAISED as error:
            result = failed(part, error)
        seconds[part.label] = time.perf_counter() - start
        values.update(result.values)
        failure, failures = result.failure, result.failures
        value = None if part.whole_group else result.values.get(part.label, [None])[0]
        if part.verifies and value is not None:
            data["correct"] = as_correct(value)
        if failure is not None or any(failures) or (first and value is not None):
            break
    return CallResult(values=values, seconds=seconds, failure=failure, failures=failures)


async def run_async(part: RewardComponent, call: Call, *, first: bool = False) -> CallResult:
    """Await one async part; never raises, except to be cancelled."""
    start = time.perf_counter()
    try:
        returned = part.reward(call.data)
        if inspect.isawaitable(returned):
            returned = await returned
        result = check(part, returned, call, first=first)
    except Unjudgeable as reason:
        result = unjudged(part, call, str(reason), first=first)
    except RAISED as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # this call is cancelled, not something that the reward awaits
        result = failed(part, error)
    spent = {part.label: time.perf_counter() - start}
    return dataclasses.replace(result, seconds=spent)


def failed(part: RewardComponent, error: BaseException) -> CallResult:
    """The result of a call that raised, with the line of the user's code that did."""
    if isinstance(error, ContractError):
        return CallResult(failure=("contract", str(error)))
    if isinstance(error, MemoryError):
        return CallResult(failure=("error", f"{part.label}: out of memory"))
    said = str(error) if isinstance(error, MissingData) else f"{type(error).__name__}: {error}"
    said = f"{said[:400]}{_origin(error)}"
    status = "timeout" if isinstance(error, TimeoutError) else "error"
    return CallResult(failure=(status, f"{part.label}: {said}"[:600]))


def _origin(error: BaseException) -> str:
    """The innermost line of code outside of this package and of installed ones that an exception
    came through, as " (file, line: text)"; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = "site-packages" in path.parts or path.is_relative_to(_STANDARD)
        if not installed and not path.is_relative_to(_PACKAGE) and not frame.filename[0] == "<":
            return f" ({path.name}, line {frame.lineno}: {frame.line})"
    return ""


def _refused(value: float) -> str:
    """A value that is not a reward, and why."""
    if math.isfinite(value):
        return f"{value:g}; rewards must be between -{MOST_REWARD:g} and {MOST_REWARD:g}"
    return str(value)


def check(part: RewardComponent, returned: Any, call: Call, *, first: bool = False) -> CallResult:
    """The values that a part returned, as floats, or what is wrong with them.

    Raises:
        ContractError: not one value per completion.
    """
    checked: list[float | None] = []
    failures: list[tuple[str, str] | None] = []
    for item in _items(part, returned, len(call.indices)):
        if isinstance(item, Unjudgeable):
            failures.append(unjudged(part, call, str(item), first=first).failure)
            checked.append(None)
            continue
        if isinstance(item, Exception):
            failures.append(failed(part, item).failure)
            checked.append(None)
            continue
        failures.append(None)
        try:
            value = None if item is None else float(item)
        except (TypeError, ValueError):
            wrong = f"{part.label}: must return a number or None, got {type(item).__name__}"
            return CallResult(failure=("error", wrong))
        if value is not None and not abs(value) <= MOST_REWARD:
            return CallResult(failure=("error", f"{part.label}: returned {_refused(value)}"))
        checked.append(value)
    if not part.whole_group and checked[0] is None and not any(failures):
        return unjudged(part, call, first=first)
    return CallResult(values={part.label: checked}, failures=failures)


def unjudged(
    part: RewardComponent, call: Call, reason: str = "", *, first: bool = False
) -> CallResult:
    """The result of a call without a value.

    Args:
        part: that has none.
        call: to it.
        reason: why.
        first: None means that later parts are reached, as it does for optional ones.
    """
    said = f"{part.label}: {reason}"[:600] if reason else _unjudged(part, call)
    lost = not (part.optional or first)
    return CallResult(
        values={part.label: [None] * len(call.indices)},
        failure=("unjudgeable", said) if lost else None,
    )


def _unjudged(part: RewardComponent, call: Call) -> str:
    """What is said of a completion for which a part has no value."""
    asked = {"answer", "solution"} & getattr(part.reward, "required", frozenset())
    if any(call.data.get(name) is None for name in asked):
        return f"{part.label}: the row has no answer; data.answer_column names its column"
    return f"{part.label}: cannot be judged"


def _items(part: RewardComponent, returned: Any, count: int) -> Sequence[Any]:
    if not part.whole_group:
        return [returned]
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise ContractError(
            f"{part.label}: a group reward must return one value per completion, "
            f"got {type(returned).__name__}."
        )
    if len(returned) != count:
        raise ContractError(f"{part.label}: returned {len(returned)} values for {count} samples.")
    return list(returned)


Stage = tuple[tuple[RewardComponent, ...], list[Call]]
"""The parts of a stage, and their calls."""


async def driven(
    steps: Generator[Stage, list[CallResult], GroupScore],
    results: Callable[[tuple[RewardComponent, ...], list[Call]], Awaitable[list[CallResult]]],
    stage: Stage | None = None,
) -> GroupScore:
    """Drive `judge_group` to its end.

    Args:
        steps: of `judge_group`.
        results: awaits the results of a stage.
        stage: the one that `steps` has reached; None before its start.
    """
    try:
        stage = stage or next(steps)
        while True:
            stage = steps.send(await results(*stage))
    except StopIteration as end:
        return end.value


def judge_group(
    composition: Composition, group: Group
) -> Generator[Stage, list[CallResult], GroupScore]:
    """Judge a group: yields (parts, calls) of a stage and is sent the results in that order."""
    from groupwise.types import Status

    size = len(group)
    table: dict[str, list[float | None]] = {p.label: [None] * size for p in composition.parts}
    failures = [_unwritten(completion) for completion in group.completions]
    correct: list[float | None] = [None] * size
    seconds: dict[str, float] = dict.fromkeys(table, 0.0)
    first = composition.combination.stops_at_first
    for number, parts in enumerate(composition.stages):
        alive = [i for i in range(size) if failures[i] is None]
        if first:
            alive = [i for i in alive if all(row[i] is None for row in table.values())]
        if not alive:
            break
        calls = _calls(composition, group, number, parts, alive, correct)
        results = yield parts, calls
        for call, result in zip(calls, results, strict=True):
            for label, spent in result.seconds.items():
                seconds[label] += spent
            _record(parts, call, result, table, correct, failures, first=first)
    for i in range(size):
        if failures[i] is None and all(row[i] is None for row in table.values()):
            failures[i] = ("unjudgeable", "no part of the reward applies")
    valid = [i for i in range(size) if failures[i] is None]
    total = [math.nan] * size
    combined = composition.combination(
        [[table[part.label][i] for i in valid] for part in composition.parts],
        weights=[part.weight for part in composition.parts],
        labels=[part.label for part in composition.parts],
    )
    for i, value in zip(valid, combined, strict=True):
        if abs(value) <= MOST_REWARD:
            total[i] = value
        else:
            failures[i] = ("error", f"the total reward is {_refused(value)}")
    return GroupScore(
        total=total,
        correct=[_number(c) if failures[i] is None else math.nan for i, c in enumerate(correct)],
        parts={label: [_number(value) for value in row] for label, row in table.items()},
        status=[Status(failure[0]) if failure else Status.OK for failure in failures],
        errors=[failure[1] if failure else None for failure in failures],
        seconds=seconds,
    )


def _unwritten(completion: Completion) -> tuple[str, str] | None:
    """Why there is nothing to judge: the sampler or a tool failed."""
    if completion.failure is not None:
        status, message = completion.failure
        return status.value, message
    return ("error", NOT_FINITE) if completion.finish == "error" else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _record(
    parts: Sequence[RewardComponent],
    call: Call,
    result: CallResult,
    table: dict[str, list[float | None]],
    correct: list[float | None],
    failures: list[tuple[str, str] | None],
    *,
    first: bool,
) -> None:
    """Enter the values of a call, and what they mean for correctness and status."""
    for part in parts:
        for place, value in zip(call.indices, result.values.get(part.label, ()), strict=False):
            table[part.label][place] = value
            if part.verifies and value is not None and correct[place] is None:
                correct[place] = as_correct(value)
            if part.whole_group and value is None and not (part.optional or first):
                failures[place] = ("unjudgeable", _unjudged(part, call))
    for place, failure in zip(call.indices, result.failures, strict=False):
        failures[place] = failure or failures[place]
    if result.failure is not None:
        if result.failure[0] == "contract":
            raise RewardError(result.failure[1])
        for place in call.indices:
            failures[place] = result.failure


def _calls(
    composition: Composition,
    group: Group,
    stage: int,
    parts: Sequence[RewardComponent],
    alive: list[int],
    correct: list[float | None],
) -> list[Call]:
    wanted = {name for part in parts for name in part.reward.names}
    if parts[0].whole_group:
        data = _group_data(composition, group, alive, correct, wanted)
        return [Call(stage=stage, indices=tuple(alive), data=data)]
    calls = []
    for i in alive:
        data = _sample_data(composition, group, group.completions[i], wanted)
        if correct[i] is not None:
            data["correct"] = correct[i]
        calls.append(Call(stage=stage, indices=(i,), data=data))
    return calls


def _shared(composition: Composition, group: Group, wanted: set[str]) -> dict[str, Any]:
    """What is the same for every completion of a group; rows of data under their own names."""
    prompt = group.prompt
    data: dict[str, Any] = {
        "answer": prompt.answer,
        VALUE: prompt.answer if prompt.value is None else prompt.value,
        "columns": prompt.columns,
        "max_tokens": composition.max_tokens,
    }
    if "prompt" in wanted:
        data["prompt"] = str(prompt)
    if "solution" in wanted and "solution" not in prompt.columns:
        data["solution"] = prompt.answer
    data.update({k: v for k, v in prompt.columns.items() if k in wanted and k not in data})
    return {name: value for name, value in data.items() if name in wanted}


def _sample_data(
    composition: Composition, group: Group, completion: Completion, wanted: set[str]
) -> dict[str, Any]:
    data = _shared(composition, group, wanted)
    found = {
        "text": completion.own_text,
        "whole": completion.text,
        "tool_values": completion.values,
        "finish": completion.finish,
        "length": completion.own_tokens,
    }
    data.update({name: value for name, value in found.items() if name in wanted})
    if "tokens" in wanted:
        data["tokens"] = list(completion.tokens)
    return data


def _group_data(
    composition: Composition,
    group: Group,
    alive: list[int],
    correct: list[float | None],
    wanted: set[str],
) -> dict[str, Any]:
    data = _shared(composition, group, wanted)
    kept = [group.completions[i] for i in alive]
    if "group" in wanted:
        data["group"] = group if len(kept) == len(group) else _restricted(group, kept)
    if "texts" in wanted:
        data["texts"] = [completion.own_text for completion in kept]
    if "lengths" in wanted:
        data["lengths"] = [completion.own_tokens for completion in kept]
    if "corrects" in wanted:
        data["corrects"] = [_number(correct[i]) for i in alive]
    return data


def _restricted(group: Group, kept: list[Completion]) -> Group:
    return dataclasses.replace(group, completions=tuple(kept))

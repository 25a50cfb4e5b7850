"""TRL's reward functions as one scorer: called with the arguments that TRL gives them."""

from __future__ import annotations

import inspect
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from groupwise.errors import UsageError
from groupwise.integrations.trl.turns import ToolTurns
from groupwise.models.devices import best_device
from groupwise.models.loading import check_weights
from groupwise.prompts.templates import template_text
from groupwise.rewards import combination
from groupwise.rewards.scoring.adapters import Place, function_name, place_of
from groupwise.rewards.scoring.pipeline import Composition, ContractError, RewardComponent
from groupwise.rewards.scoring.scorer import InlineScorer, Ticket, stack
from groupwise.rundir.files import append_text
from groupwise.types import Group, Scores


@dataclass(frozen=True, kw_only=True)
class Notes:
    """What reward functions log besides their values.

    Attributes:
        metrics: values by name since the last log.
        table: file of the columns that `log_extra` is given; None keeps none.
    """

    metrics: dict[str, list[float]] = field(default_factory=dict)
    table: Path | None = None

    def metric(self, name: str, value: float) -> None:
        """TRL's `log_metric`: averaged until the next log."""
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's `log_extra`: a line of JSON per call."""
        if self.table is not None:
            self.table.parent.mkdir(parents=True, exist_ok=True)
            line = {"column": column, "values": list(values)}
            append_text(self.table, json.dumps(line, ensure_ascii=False, default=str) + "\n")


@dataclass(frozen=True, kw_only=True)
class TrlFunction:
    """One reward function of TRL's form, called once for every group.

    Attributes:
        function: `f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric,
            **columns) -> list`.
        decode: tokens of a completion to its text, special tokens left out.
        state: of the trainer.
        notes: what the function logs.
        turns: of completions that call tools; None without tools.
    """

    function: Callable[..., Any]
    decode: Callable[[Sequence[int]], str]
    state: Any
    notes: Notes
    turns: ToolTurns | None = None
    names: tuple[str, ...] = ("group",)
    whole_group: bool = True

    @property
    def place(self) -> Place:
        return place_of(self.function)

    def __call__(self, data: Mapping[str, Any]) -> Any:
        """The values, NaN as None; whatever the function raises ends the run, as in TRL."""
        given = self._arguments(data["group"])
        if self.place == "async":
            return self._awaited(given)
        try:
            return known(self.function(**given))
        except Exception as error:
            raise self._broken(error) from error

    async def _awaited(self, given: Mapping[str, Any]) -> list[Any]:
        try:
            return known(await self.function(**given))
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ContractError:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        name = function_name(self.function)
        return ContractError(f"{name}: {type(error).__name__}: {error} ({where})")

    def _arguments(self, group: Group) -> dict[str, Any]:
        count, prompt = len(group), group.prompt
        texts = [self.decode(completion.tokens) for completion in group.completions]
        chat = bool(prompt.messages)
        one: Any = [dict(turn) for turn in prompt.messages] if chat else prompt.text
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        environments: list[Any] = []
        if self.turns is not None:
            completions = self.turns.completions(group)
            environments = [one.instance for one in self.turns.tools.conversations(group)]
        given = {
            **{name: [value] * count for name, value in prompt.columns.items()},
            "prompts": [one] * count,
            "completions": completions if chat else texts,
            "completion_ids": [list(completion.tokens) for completion in group.completions],
            "trainer_state": self.state,
            "log_extra": self.notes.extra,
            "log_metric": self.notes.metric,
            **({"environments": environments} if any(e is not None for e in environments) else {}),
        }
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return given
        asked = {p.name for p in parameters}
        return {name: value for name, value in given.items() if name in asked}


def known(values: Any) -> list[Any]:
    """Values of a reward function; NaN means the same as None."""
    listed = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return [None if value is None or math.isnan(float(value)) else float(value) for value in listed]


class TrlScorer:
    """Scores groups by reward functions of TRL's form, in this process.

    If a function returns None, its part is left out; a completion for which all functions return
    None is excluded from its group.

    Args:
        composition: the functions.
        turns: of completions that call tools; None without tools.
    """

    def __init__(self, composition: Composition, *, turns: ToolTurns | None = None) -> None:
        self.inline, self.turns = InlineScorer(composition, timeout_s=1e6), turns

    def submit(self, group: Group) -> Ticket:
        """Score a group; only values of async functions may arrive later."""
        ticket = self.inline.submit(group)
        if (turns := self.turns) is not None:
            ticket.add_done_callback(lambda _: turns.tools.release(group))
        return ticket

    def gather(self, tickets: Sequence[Ticket]) -> Scores:
        """The scores of groups, in order.

        Raises:
            RewardError: a function raised, or did not return one value per completion.
        """
        return stack([ticket.result() for ticket in tickets])

    def close(self) -> None:
        """End the event loop, if there is one."""
        self.inline.close()

    def __enter__(self) -> TrlScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_scorer(
    functions: Sequence[Callable[..., Any]],
    *,
    weights: Sequence[float],
    tokenizer: Any,
    state: Any,
    notes: Notes,
    turns: ToolTurns | None = None,
) -> TrlScorer:
    """The scorer of a list of functions: Σ weight · value of those that said something."""

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    parts = [
        RewardComponent(
            label=label,
            reward=TrlFunction(
                function=function, decode=decode, state=state, notes=notes, turns=turns
            ),
            weight=weight,
            optional=True,
        )
        for label, function, weight in zip(labels(functions), functions, weights, strict=True)
    ]
    summed = combination("weighted_sum")
    return TrlScorer(Composition(parts=tuple(parts), combination=summed), turns=turns)


def labels(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Names of functions; of several of one name, the later ones are numbered."""
    names = list(map(function_name, functions))
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{n}#{count + 1}" if count else n for n, count in zip(names, counts, strict=True)]


def weights_of(functions: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    """TRL's `reward_weights`, one for each function.

    Raises:
        UsageError: another number of them.
    """
    found = [1.0] * len(functions) if weights is None else list(weights)
    if len(found) != len(functions):
        raise UsageError(
            f"GRPOConfig.reward_weights = {found!r}: must be one per reward function, of which "
            f"there are {len(functions)}."
        )
    return found


def functions_of(given: Any, tokenizers: Any) -> list[Callable[..., Any]]:
    """Reward functions as TRL takes them: functions, sequence classifiers, or names of such.

    Raises:
        UsageError: none, or something else.
    """
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if given is None or not listed:
        raise UsageError(
            "No reward source provided: reward_funcs must be a function or a list of them, or "
            "environments must have a method get_reward."
        )
    functions = []
    for item, reader in zip(listed, readers_of(listed, tokenizers), strict=True):
        if isinstance(item, str | torch.nn.Module):
            functions.append(_classifier(item, reader))
        elif callable(item):
            functions.append(item)
        else:
            raise UsageError(f"reward_funcs: {item!r} is neither a function nor a model.")
    return functions


def readers_of(functions: Sequence[Any], tokenizers: Any) -> list[Any]:
    """TRL's `reward_processing_classes`, one for each function.

    Raises:
        UsageError: another number of them.
    """
    readers = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    readers = readers * len(functions) if readers == [None] else readers
    if len(readers) != len(functions):
        raise UsageError(
            f"reward_processing_classes: {len(readers)} of them must match the reward functions, "
            f"of which there are {len(functions)}."
        )
    return readers


def _classifier(model: Any, tokenizer: Any) -> Callable[..., Any]:
    """A sequence classifier with one output as a reward function of its own name."""
    if isinstance(model, str):
        name = model
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, output_loading_info=True
        )
        check_weights(loaded, name, where="reward_funcs")
    path = model.config._name_or_path
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.eval().to(best_device())

    def reward(prompts: list[Any], completions: list[Any]) -> list[float]:
        return _classified(prompts, completions, model=model, tokenizer=tokenizer)

    reward.__name__ = path.rstrip("/").rpartition("/")[2] or type(model).__name__
    return reward


def _classified(
    prompts: list[Any], completions: list[Any], *, model: Any, tokenizer: Any
) -> list[float]:
    """The first output of a classifier that reads prompt and completion together."""
    if isinstance(prompts[0], str):
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
    else:
        turns = [p + c for p, c in zip(prompts, completions, strict=True)]
        texts = [template_text(each, tokenizer, where="reward model") for each in turns]
    read = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    ).to(model.device)
    with torch.inference_mode():
        return model(**read).logits[:, 0].float().tolist()

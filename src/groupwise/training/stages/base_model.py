"""The embedded base models: small Qwen2s made from nothing by supervised training in phases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from groupwise.errors import UsageError, suggest
from groupwise.models.loading import Policy, make_policy
from groupwise.prompts.examples import Example
from groupwise.prompts.generators.small_tokenizer import END, small_tokenizer
from groupwise.prompts.generators.word_problems import demonstrations
from groupwise.prompts.templates import pad_token
from groupwise.training.stages.sft import fit, save
from groupwise.types import Update

OnPhaseStep = Callable[[int, int, Update], None]


def small_policy(
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    key_value_heads: int = 2,
    feed_forward: int = 384,
    context: int = 1024,
    spread: float = 0.02,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """A fresh model of the Qwen2 architecture; 0.66 M parameters by default.

    Args:
        hidden, feed_forward: widths of the residual stream and of the gated layer.
        heads, key_value_heads: of attention; the second must divide the first.
        context: longest sequence in tokens.
        spread: standard deviation of the initial weights.
        seed: of the initial weights.
        tokenizer: with an end and a padding token; None takes the one of the word problems.
    """
    tokenizer = tokenizer or small_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=context,
        initializer_range=spread,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),  # pyright: ignore[reportArgumentType]
        pad_token_id=pad_token(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return make_policy(model, tokenizer)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A kind of base model, which recipes with phases make.

    Attributes:
        demonstrations: makes the examples of a phase from `size`, `seed` and what they are about.
        about: the settings of a phase that are handed to it; the others are of `fit`.
        tokenizer: builds the tokenizer.
    """

    demonstrations: Callable[..., Sequence[Example]]
    about: Set[str]
    tokenizer: Callable[[], PreTrainedTokenizerBase]

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Refuse a recipe that `make` could not follow.

        Raises:
            UsageError: a setting that the recipe lacks or that is not known.
        """
        _check(recipe, required={"seed", "model", "phases"}, optional={"base"}, where="recipe")
        _check(recipe["model"], required=set(), optional=_settings(small_policy), where="model")
        needed = {*self.about, "steps", "batch_size", "seed"}
        for number, phase in enumerate(recipe["phases"]):
            _check(phase, required=needed, optional=_settings(fit), where=f"phases.{number}")

    def fresh(self, recipe: Mapping[str, Any]) -> Policy:
        """The model of a recipe before its first phase."""
        return small_policy(seed=recipe["seed"], tokenizer=self.tokenizer(), **recipe["model"])

    def make(
        self,
        output: str | Path,
        *,
        recipe: Mapping[str, Any],
        on_step: OnPhaseStep | None = None,
    ) -> Policy:
        """Train a fresh model by the phases of a recipe, and save it as a Hugging Face folder.

        Args:
            output: the folder.
            recipe: `seed`, `model` and `phases`.
            on_step: called after each optimizer step with the phase and the step in it, both from
                1.

        Raises:
            UsageError: a setting that the recipe lacks or that is not known.
        """
        self.check(recipe)
        policy = self.fresh(recipe)
        for number, phase in enumerate(recipe["phases"], start=1):
            settings = {key: value for key, value in phase.items() if key not in self.about}
            examples = self.demonstrations(
                size=phase["steps"] * phase["batch_size"],
                seed=phase["seed"],
                **{key: phase[key] for key in self.about},
            )
            for step, update in enumerate(fit(policy, examples, **settings), start=1):
                if on_step is not None:
                    on_step(number, step, update)
        save(policy, output)
        return policy


WORD_PROBLEMS = Base(
    demonstrations=demonstrations, about=frozenset({"slip"}), tokenizer=small_tokenizer
)
"""The bundled model."""


def _settings(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"tokenizer"}


def _check(
    table: Mapping[str, Any],
    *,
    required: Set[str],
    optional: Set[str] = frozenset(),
    where: str,
) -> None:
    """Every required setting and no unknown one."""
    for name in sorted(required - set(table)):
        raise UsageError(f"{where}.{name}: must be given.")
    for name in table:
        if name not in required | optional:
            known = suggest(name, required | optional)
            raise UsageError(f"{where}.{name} = {table[name]!r}: no such setting; {known}")

"""The command that estimates a run on many GPUs: plan."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from groupwise.cli.options import JsonFile, Overrides, Recipe, TrustRecipe, write_json
from groupwise.cli.output import print_table

PROMPT = 256
"""Default length of a prompt in tokens."""
MEAN_SHARE = 0.25
"""Default mean length of a completion, as a share of `sampling.max_tokens`."""
STATE_BYTES = 16
"""Bytes per trained parameter: weights, gradients and two moments in float32."""


def plan(
    recipe: Recipe,
    gpus: Annotated[
        int, typer.Option("--gpus", help="Number of GPUs, including those of the learner.")
    ],
    kind: Annotated[
        str, typer.Option("--kind", help="GPU model: a100, h100, h200 or b200.")
    ] = "h100",
    mean_tokens: Annotated[
        float | None,
        typer.Option(help="Mean completion length in tokens; default: a quarter of max_tokens."),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(help="Mean prompt length in tokens; default: data.max_prompt_tokens, or 256."),
    ] = None,
    overrides: Overrides = None,
    trust_recipe: TrustRecipe = False,
    json_file: JsonFile = None,
) -> None:
    """Estimate the time of a training step on many GPUs.

    A calculation from data sheets, not a measurement; docs/scale.md has the formulas.
    """
    from groupwise.config import load
    from groupwise.distributed.cost import CARDS, Work, best_split

    config = load(recipe, overrides or [], trust_recipe=trust_recipe)
    parameters, cache = _sizes(config)
    longest = float(config.sampling.max_tokens)
    work = Work(
        parameters=parameters,
        cache=cache,
        prompts=config.prompts_per_step,
        group=config.group_size,
        prompt=prompt_tokens or config.data.max_prompt_tokens or PROMPT,
        mean=mean_tokens or MEAN_SHARE * longest,
        longest=longest,
    )
    cost = best_split(work, kind, cards=gpus)
    state = STATE_BYTES * parameters / cost.learning
    rows = [
        ("parameters", f"{parameters:,.0f}"),
        ("prompt length, tokens", f"{work.prompt:g}"),
        ("completion length, mean and maximum", f"{work.mean:g}, {longest:g}"),
        ("GPUs for sampling, for learning", f"{cost.sampling}, {cost.learning}"),
        ("concurrent completions per GPU", f"{cost.rows:.0f}"),
        ("sampling, all GPUs busy", _time(cost.bulk)),
        ("sampling, longest completion", _time(cost.tail)),
        ("update", _time(cost.train)),
        ("transfer of weights", _time(cost.weights)),
        ("step, stages in sequence", _time(cost.synchronous)),
        ("step, stages in parallel", _time(cost.asynchronous)),
        ("age of a batch, stages in parallel", f"{cost.age:.1f} steps"),
        ("optimizer and weights per learning GPU", f"{state / 1e9:.1f} GB"),
        ("checkpoint interval", _time(cost.checkpoint)),
    ]
    print_table(("estimate", f"{gpus} × {kind}"), rows)
    if state > CARDS[kind].memory:
        print("\nWeights and optimizer do not fit into the learning GPUs; use more GPUs.")
    write_json(json_file, {**dataclasses.asdict(work), **dataclasses.asdict(cost)})


def _sizes(config: Any) -> tuple[float, float]:
    """Parameters of a recipe's model, and bytes of keys and values of a token."""
    import torch
    from transformers import AutoModelForCausalLM

    from groupwise.models.loading import configuration

    shape = configuration(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    ).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    heads = shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    keys = getattr(shape, "num_key_value_heads", None) or heads
    count = float(sum(p.numel() for p in model.parameters()))
    return count, 4.0 * shape.num_hidden_layers * keys * dim


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""From TRL's settings to those of groupwise: batches, steps, the algorithm, the optimizer."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from groupwise.config import Config, build
from groupwise.config.engines import check_support
from groupwise.errors import UsageError, suggest, warn
from groupwise.integrations.trl import sampler
from groupwise.training.monitor.trackers import TRACKERS

if TYPE_CHECKING:
    from groupwise.integrations.trl.config import GRPOConfig

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
ADVANTAGES = {"group": "zscore", "batch": "batch_zscore", "none": "centered"}
LEVELS = ("token", "sequence")
SUMS_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
STRATEGIES = ("no", "steps", "epoch")
OUTPUT = "trainer_output"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "device_map": (None,),
    "attn_implementation": (None,),
    "quantization_config": (None,),
}
"""Values of `model_init_kwargs` that change nothing."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How TRL's batch sizes cut rollouts into optimizer steps.

    Attributes:
        prompts: per batch of rollouts.
        minibatches: optimizer steps per pass over it.
        epochs: passes over it.
        chunk: prompts that TRL generates for at once; an epoch leaves out an incomplete one.
        updates_per_chunk: optimizer steps that those feed, a fraction where several chunks make
            one.
    """

    prompts: int
    minibatches: int
    epochs: int
    chunk: int
    updates_per_chunk: float

    @property
    def updates(self) -> int:
        """Optimizer steps per batch of rollouts."""
        return self.minibatches * self.epochs


def wrong(args: GRPOConfig, field: str, reason: str) -> UsageError:
    """The refusal of a field's value."""
    return UsageError(f"GRPOConfig.{field} = {getattr(args, field)!r}: {reason}.")


def batches(args: GRPOConfig) -> Batches:
    """Prompts and optimizer steps of a batch of rollouts.

    Raises:
        UsageError: sizes that do not divide, as in TRL.
    """
    rows, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    group = args.num_generations or 0
    if group < 2:
        raise wrong(args, "num_generations", "an advantage compares at least 2 completions")
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise wrong(args, "generation_batch_size", "set this or steps_per_generation, not both")
    generated = args.generation_batch_size or rows * (args.steps_per_generation or accumulated)
    if generated % rows:
        raise wrong(args, "generation_batch_size", f"must be a multiple of the batch size, {rows}")
    if generated % group:
        raise wrong(
            args,
            "num_generations",
            f"must divide the completions per generation, {generated} (per_device_train_batch_size "
            f"{rows} × {generated // rows} steps), as groups stay whole",
        )
    passes, chunk = generated // rows, generated // group
    per_chunk = passes * args.num_iterations / accumulated
    if passes % accumulated == 0:
        return Batches(
            prompts=chunk,
            minibatches=passes // accumulated,
            epochs=args.num_iterations,
            chunk=chunk,
            updates_per_chunk=per_chunk,
        )
    if accumulated % passes or args.num_iterations > 1:
        raise wrong(
            args,
            "gradient_accumulation_steps",
            f"must divide the steps per generation, {passes}, or be a multiple of them with "
            "num_iterations = 1: an optimizer step would mix rollouts of different ages",
        )
    return Batches(
        prompts=chunk * (accumulated // passes),
        minibatches=1,
        epochs=1,
        chunk=chunk,
        updates_per_chunk=per_chunk,
    )


def optimizer_steps(args: GRPOConfig, rows: int | None) -> int:
    """Optimizer steps of the run, as TRL counts them.

    Args:
        rows: prompts of the data; None where that is not known.

    Raises:
        UsageError: fewer prompts than a step draws, or a `max_steps` that ends amid a batch.
    """
    cut = batches(args)
    if args.max_steps > 0:
        if args.max_steps % cut.updates:
            raise wrong(
                args,
                "max_steps",
                f"must be a multiple of {cut.updates}, the optimizer steps that one batch of "
                "rollouts feeds",
            )
        return args.max_steps
    if rows is None:
        raise wrong(args, "max_steps", "must be set, as the length of the data is not known")
    return math.ceil(args.num_train_epochs * epoch_steps(args, rows))


def epoch_steps(args: GRPOConfig, rows: int) -> int:
    """Optimizer steps of an epoch; an incomplete last generation is left out.

    Raises:
        UsageError: fewer prompts than a generation takes.
    """
    cut = batches(args)
    chunks = rows // cut.chunk
    if not chunks:
        raise UsageError(
            f"train_dataset: has {rows} prompts, and a generation takes {cut.chunk} "
            "(per_device_train_batch_size × steps per generation / num_generations); lower them."
        )
    return max(math.ceil(chunks * cut.updates_per_chunk), 1)


def _advantage(args: GRPOConfig, weights: Mapping[str, float]) -> dict[str, Any]:
    if args.multi_objective_aggregation == "normalize_then_sum":
        more = {"weights": dict(weights)} if weights else {}
        return {"name": "parts_zscore", "ddof": 1, "eps": 1e-4, "counting": "completions", **more}
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)  # pyright: ignore[reportArgumentType, reportCallIssue]
    statistics = {} if scale == "none" else {"ddof": 1, "eps": 1e-4}
    return {"name": ADVANTAGES[scale], **statistics}


def algorithm(args: GRPOConfig, weights: Mapping[str, float]) -> dict[str, Any]:
    """The section `algorithm`: TRL's default row and what the settings change in it.

    Args:
        weights: of the rewards, by name.

    Raises:
        UsageError: a combination without meaning.
    """
    divergence = "k3_weighted" if args.use_bias_correction_kl else "k3"
    kept = "not_truncated" if args.mask_truncated_completions else "all"
    if args.loss_type == "vespo" and args.importance_sampling_level == "sequence":
        raise wrong(
            args,
            "importance_sampling_level",
            "loss_type = 'vespo' takes the ratio of the sequence from token ratios; use 'token'",
        )
    return {
        "name": "grpo@trl",
        "advantage": _advantage(args, weights),
        "ratio": {"name": args.importance_sampling_level},
        "surrogate": _surrogate(args),
        "divergence": {"name": divergence, "coefficient": args.beta},
        "correction": sampler.correction(args),
        "weighting": _weighting(args),
        "filter": {"name": kept},
        "entropy": args.entropy_coef,
    }


def _surrogate(args: GRPOConfig) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        if high < 1:
            raise UsageError(
                f"GRPOConfig.epsilon_high = {args.epsilon_high!r}: with loss_type = 'cispo' it is "
                "the largest ratio, not a distance from 1, and every gradient would be multiplied "
                f"by {high:g}; set it to 1 or more (ScaleRL: 5.0)."
            )
        return {"name": "cispo", "cap": float(high), "floor": 0.0}
    if args.loss_type == "sapo":
        return {
            "name": "sapo",
            "positive": args.sapo_temperature_pos,
            "negative": args.sapo_temperature_neg,
        }
    if args.loss_type == "vespo":
        return {
            "name": "vespo",
            "power_positive": args.vespo_k_pos,
            "decay_positive": args.vespo_lambda_pos,
            "power_negative": args.vespo_k_neg,
            "decay_negative": args.vespo_lambda_neg,
        }
    if args.delta is None:
        return {"name": "ppo_clip", "low": args.epsilon, "high": high}
    if args.delta < 1 + high:
        raise wrong(
            args, "delta", f"must be at least 1 + epsilon_high = {1 + high:g}, or it clips first"
        )
    return {"name": "dual_clip", "low": args.epsilon, "high": high, "bound": args.delta}


def _weighting(args: GRPOConfig) -> dict[str, Any]:
    if args.loss_type in ("grpo", "sapo"):
        return {"name": "sequence_mean", "empty_rows": True}
    if args.loss_type == "dr_grpo":
        length = args.max_completion_length
        return {"name": "constant_length", "length": length, "empty_rows": True}
    if args.loss_type == "luspo":
        return {"name": "sequence_sum", "empty_rows": True}
    return {"name": "batch_token_mean"}


def _optimizer(args: GRPOConfig, steps: int) -> dict[str, Any]:
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind not in SCHEDULES:
        raise wrong(args, "lr_scheduler_type", f"no such schedule; {suggest(kind, SCHEDULES)[:-1]}")
    if str(getattr(args.optim, "value", args.optim)) not in ("adamw_torch_fused", "adamw_torch"):
        raise wrong(args, "optim", "the optimizer is torch's AdamW; use adamw_torch_fused")
    if kind == "constant" and args.warmup_steps:
        raise wrong(args, "warmup_steps", "use lr_scheduler_type = 'constant_with_warmup'")
    warmup = args.warmup_steps
    return {
        "learning_rate": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm or sys.float_info.max,
        "warmup_steps": int(warmup) if warmup >= 1 else math.ceil(warmup * steps),
        "schedule": SCHEDULES[kind],
        "final_fraction": _final_fraction(args, kind),
    }


def _final_fraction(args: GRPOConfig, kind: str) -> float:
    given = table(args, "lr_scheduler_kwargs")
    known = ("min_lr", "min_lr_rate") if kind == "cosine_with_min_lr" else ()
    for name in given:
        if name not in known:
            raise wrong(args, "lr_scheduler_kwargs", f"{kind} does not take {name!r} here")
    if "min_lr" in given:
        return given["min_lr"] / args.learning_rate
    return float(given.get("min_lr_rate", 0.0))


def table(args: GRPOConfig, field: str) -> dict[str, Any]:
    """A field that holds keyword arguments, as a table or as JSON.

    Raises:
        UsageError: neither.
    """
    value = getattr(args, field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise wrong(args, field, f"is not JSON ({error.msg})") from None
    if value is not None and not isinstance(value, Mapping):
        raise wrong(args, field, "must be a table of keyword arguments")
    return dict(value or {})


def _sampling(args: GRPOConfig) -> dict[str, Any]:
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "stop": _stop(args),
    }


def _stop(args: GRPOConfig) -> tuple[str, ...]:
    found: list[str] = []
    for name, value in table(args, "generation_kwargs").items():
        if name not in ("stop", "stop_strings"):
            raise wrong(
                args, "generation_kwargs", f"{name!r} is not known here; known: stop, stop_strings"
            )
        found += [value] if isinstance(value, str) else list(value)
    return tuple(found)


def _trackers(args: GRPOConfig) -> tuple[str, ...]:
    given = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    if "trackio" in given:
        warn(
            f"GRPOConfig.report_to = {args.report_to!r}: trackio is not supported; metrics are in "
            "output_dir/metrics.jsonl."
        )
    chosen = tuple(name for name in given if name not in ("none", "trackio"))
    for name in chosen:
        if name not in TRACKERS:
            raise wrong(args, "report_to", f"no such tracker; {suggest(name, TRACKERS)[:-1]}")
    return chosen


def output(args: GRPOConfig) -> str:
    """The run directory."""
    return args.output_dir or OUTPUT


def dtype(args: GRPOConfig, *, card: bool) -> str:
    """The number format of the model.

    Args:
        card: whether there is a device that computes in bfloat16, which None then chooses.

    Raises:
        UsageError: keys of `model_init_kwargs` that are not known here.
    """
    given = table(args, "model_init_kwargs")
    wanted = given.pop("dtype", None) or given.pop("torch_dtype", None) or "auto"
    wanted = str(wanted).removeprefix("torch.")
    for key in ("torch_dtype", "trust_remote_code", "revision"):
        given.pop(key, None)
    for key, value in given.items():
        if value not in NEUTRAL.get(key, ()):
            reason = f"{key!r} = {value!r} is not supported; load the model and pass it as `model`"
            raise wrong(args, "model_init_kwargs", reason)
    if wanted not in ("auto", "float32", "bfloat16"):
        raise wrong(args, "model_init_kwargs", f"dtype {wanted!r}: use float32 or bfloat16")
    low = (card if args.bf16 is None else args.bf16) or wanted == "bfloat16"
    if low and args.cast_lm_head_to_fp32:
        raise wrong(
            args,
            "cast_lm_head_to_fp32",
            "a bfloat16 model has a head in bfloat16; bf16=False computes all in float32",
        )
    return "bfloat16" if low else "float32"


def revision(args: GRPOConfig) -> str | None:
    """Commit, tag or branch of the model; None for the default branch."""
    wanted = table(args, "model_init_kwargs").get("revision")
    return None if wanted in (None, "main") else str(wanted)


def check_runs(args: GRPOConfig) -> None:
    """Refuse wrong settings of schedules and destinations.

    Raises:
        UsageError: the field.
    """
    for field in ("logging_strategy", "eval_strategy", "save_strategy"):
        value = str(getattr(getattr(args, field), "value", getattr(args, field)))
        if value not in STRATEGIES:
            raise wrong(args, field, f"no such strategy; {suggest(value, STRATEGIES)[:-1]}")
    if args.data_seed not in (None, args.seed):
        raise wrong(
            args, "data_seed", f"one seed controls all random numbers; set seed ({args.seed})"
        )
    if args.run_name not in (None, output(args), Path(output(args)).name):
        raise wrong(args, "run_name", "a run is named after the last part of output_dir")
    if args.max_completion_length is None:
        raise wrong(args, "max_completion_length", "a completion needs a budget")
    group = args.num_generations_eval or args.num_generations or 1
    if args.eval_strategy != "no" and args.per_device_eval_batch_size % group:
        raise wrong(
            args,
            "per_device_eval_batch_size",
            f"must be a multiple of the completions per prompt of an evaluation, {group}",
        )


def configuration(
    args: GRPOConfig,
    *,
    steps: int = 1,
    model: str = "given",
    card: bool = False,
    longest: int | None = None,
    weights: Mapping[str, float] = MappingProxyType({}),
    router_aux_loss: float = 0.0,
) -> Config:
    """The configuration of groupwise.

    Args:
        steps: optimizer steps of the run.
        model: its name.
        card: see `dtype`.
        longest: tokens of the longest prompt; None leaves the size of a pass to its default.
        weights: of the rewards, by name.
        router_aux_loss: coefficient of the load-balancing loss.

    Raises:
        UsageError: a value that cannot work, or cannot together with the others.
    """
    cut = batches(args)
    check_runs(args)
    every = args.logging_steps if args.logging_steps >= 1 else math.ceil(args.logging_steps * steps)
    given = args.activation_checkpointing
    checkpointing = args.gradient_checkpointing if given is None else given
    variables = table(args, "chat_template_kwargs")
    tokens = {}
    if longest is not None:
        room = longest + (args.max_completion_length or 0)
        tokens = {"tokens_per_microbatch": args.per_device_train_batch_size * room}
    return build(
        {
            "steps": math.ceil(steps / cut.updates),
            "seed": args.seed,
            "output": output(args),
            "prompts_per_step": cut.prompts,
            "group_size": args.num_generations,
            "model": {
                "path": model,
                "dtype": dtype(args, card=card),
                "trust_remote_code": trusts_remote_code(args),
            },
            "data": {"train": "train_dataset", "chat_template_kwargs": variables},
            "algorithm": algorithm(args, weights),
            "engine": sampler.engine(args),
            "sampling": _sampling(args),
            "optimizer": _optimizer(args, steps),
            "update": {
                "epochs": cut.epochs,
                "minibatches": cut.minibatches,
                "gradient_checkpointing": checkpointing,
                "router_aux_loss": router_aux_loss,
                **tokens,
            },
            # Checkpoints and evaluations are asked for by the callbacks' control.
            "checkpoint": {
                "every_steps": 0,
                "every_minutes": None,
                "keep_last": args.save_total_limit or steps + 1,
            },
            "logging": {
                "rollouts_every": max(1, round(every / cut.updates)) if args.log_completions else 0,
                "trackers": _trackers(args),
            },
        }
    )


def check_configuration(args: GRPOConfig) -> None:
    """Refuse settings that cannot work, before a model is loaded.

    Raises:
        UsageError: as `configuration`, and where the run could not be trained.
    """
    steps = optimizer_steps(args, None) if args.max_steps > 0 else 1
    check_support(configuration(args, steps=steps))


def warnings_of(args: GRPOConfig) -> list[str]:
    """What TRL's trainer warns of."""
    found = []
    if args.importance_sampling_level == "sequence" and args.loss_type in SUMS_TOKENS:
        found.append(
            f"importance_sampling_level = 'sequence' with loss_type = {args.loss_type!r}, a sum "
            "over tokens, weights each sequence by its completion length; GSPO's own loss_type is "
            "'grpo'."
        )
    if args.loss_type == "luspo" and args.importance_sampling_level != "sequence":
        found.append(
            "loss_type = 'luspo' is meant for importance_sampling_level = 'sequence', as in its "
            "paper."
        )
    return found


def trusts_remote_code(args: GRPOConfig) -> bool:
    """Whether code of the model repository may run."""
    return bool(table(args, "model_init_kwargs").get("trust_remote_code", args.trust_remote_code))

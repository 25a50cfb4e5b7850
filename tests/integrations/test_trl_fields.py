"""Every field of TRL's configuration: same names and defaults, supported or refused, documented."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from groupwise.errors import UsageError
from groupwise.integrations.trl import GRPOConfig
from groupwise.integrations.trl.fields import _equal, markdown, treatments
from groupwise.integrations.trl.settings import (
    batches,
    configuration,
    dtype,
    epoch_steps,
    optimizer_steps,
)
from trl_peer import require_trl

DOCS = Path(__file__).parents[2] / "docs" / "trl.md"
TABLE = treatments(GRPOConfig)
SUPPORTED = [name for name, (_, treatment) in TABLE.items() if treatment.becomes is not None]
REFUSED = [name for name, (_, treatment) in TABLE.items() if treatment.becomes is None]

VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}

IGNORED = [name for name, (_, treatment) in TABLE.items() if treatment.warned]

# field, its value, what else must be set, the setting, what it is then
BECOMES: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    ("output_dir", "x", {}, "output", "x"),
    ("output_dir", None, {}, "output", "trainer_output"),
    ("per_device_train_batch_size", 24, {}, "prompts_per_step", 3),
    ("gradient_accumulation_steps", 4, {}, "prompts_per_step", 4),
    ("generation_batch_size", 32, {}, "prompts_per_step", 4),
    ("generation_batch_size", 32, {}, "update.minibatches", 4),
    ("steps_per_generation", 2, {}, "update.minibatches", 2),
    # one generation per microbatch, four of them to an optimizer step
    ("steps_per_generation", 1, {"gradient_accumulation_steps": 4}, "prompts_per_step", 4),
    ("num_generations", 4, {}, "group_size", 4),
    ("num_iterations", 3, {}, "update.epochs", 3),
    ("seed", 7, {}, "seed", 7),
    ("max_completion_length", 9, {}, "sampling.max_tokens", 9),
    ("temperature", 0.5, {}, "sampling.temperature", 0.5),
    ("top_p", 0.5, {}, "sampling.top_p", 0.5),
    ("top_k", 5, {}, "sampling.top_k", 5),
    ("min_p", 0.1, {}, "sampling.min_p", 0.1),
    ("generation_kwargs", {"stop_strings": ["a", "b"]}, {}, "sampling.stop", ("a", "b")),
    ("generation_kwargs", '{"stop": "a"}', {}, "sampling.stop", ("a",)),
    ("chat_template_kwargs", {"thinking": False}, {}, "data.chat_template_kwargs.thinking", False),
    ("chat_template_kwargs", '{"a": "b"}', {}, "data.chat_template_kwargs.a", "b"),
    ("loss_type", "grpo", {}, "algorithm.weighting.name", "sequence_mean"),
    ("loss_type", "vespo", {}, "algorithm.surrogate.name", "vespo"),
    ("beta", 0.1, {}, "algorithm.divergence.coefficient", 0.1),
    ("use_bias_correction_kl", False, {}, "algorithm.divergence.name", "k3"),
    ("epsilon", 0.1, {}, "algorithm.surrogate.low", 0.1),
    ("epsilon", 0.1, {}, "algorithm.surrogate.high", 0.1),
    ("epsilon_high", 0.3, {}, "algorithm.surrogate.high", 0.3),
    ("epsilon_high", 5.0, {"loss_type": "cispo"}, "algorithm.surrogate.cap", 5.0),
    ("delta", 4.0, {}, "algorithm.surrogate.bound", 4.0),
    ("importance_sampling_level", "sequence", {}, "algorithm.ratio.name", "sequence"),
    ("sapo_temperature_pos", 2.0, {"loss_type": "sapo"}, "algorithm.surrogate.positive", 2.0),
    ("sapo_temperature_neg", 2.0, {"loss_type": "sapo"}, "algorithm.surrogate.negative", 2.0),
    ("vespo_k_pos", 1.0, {"loss_type": "vespo"}, "algorithm.surrogate.power_positive", 1.0),
    ("vespo_lambda_pos", 1.0, {"loss_type": "vespo"}, "algorithm.surrogate.decay_positive", 1.0),
    ("vespo_k_neg", 1.0, {"loss_type": "vespo"}, "algorithm.surrogate.power_negative", 1.0),
    ("vespo_lambda_neg", 1.0, {"loss_type": "vespo"}, "algorithm.surrogate.decay_negative", 1.0),
    ("scale_rewards", "batch", {}, "algorithm.advantage.name", "batch_zscore"),
    ("scale_rewards", False, {}, "algorithm.advantage.name", "centered"),
    ("scale_rewards", True, {}, "algorithm.advantage.name", "zscore"),
    (
        "multi_objective_aggregation",
        "normalize_then_sum",
        {},
        "algorithm.advantage.name",
        "parts_zscore",
    ),
    ("mask_truncated_completions", True, {}, "algorithm.filter.name", "not_truncated"),
    ("entropy_coef", 0.1, {}, "algorithm.entropy", 0.1),
    ("model_init_kwargs", {"dtype": "bfloat16"}, {}, "model.dtype", "bfloat16"),
    ("trust_remote_code", True, {}, "model.trust_remote_code", True),
    ("bf16", True, {}, "model.dtype", "bfloat16"),
    ("gradient_checkpointing", False, {}, "update.gradient_checkpointing", False),
    ("activation_checkpointing", False, {}, "update.gradient_checkpointing", False),
    ("learning_rate", 1e-3, {}, "optimizer.learning_rate", 1e-3),
    ("lr_scheduler_type", "cosine", {}, "optimizer.schedule", "cosine"),
    (
        "lr_scheduler_kwargs",
        {"min_lr": 1e-7},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "optimizer.final_fraction",
        0.1,
    ),
    ("warmup_steps", 5, {}, "optimizer.warmup_steps", 5),
    ("warmup_steps", 0.1, {}, "optimizer.warmup_steps", 3),
    ("optim", "adamw_torch", {}, "optimizer.name", "adamw"),
    ("weight_decay", 0.1, {}, "optimizer.weight_decay", 0.1),
    ("adam_beta1", 0.8, {}, "optimizer.betas", (0.8, 0.999)),
    ("adam_beta2", 0.9, {}, "optimizer.betas", (0.9, 0.9)),
    ("adam_epsilon", 1e-6, {}, "optimizer.eps", 1e-6),
    ("max_grad_norm", 0.5, {}, "optimizer.max_grad_norm", 0.5),
    ("max_grad_norm", 0.0, {}, "optimizer.max_grad_norm", 1.7976931348623157e308),
    ("log_completions", True, {}, "logging.rollouts_every", 10),
    ("log_completions", True, {"logging_steps": 0.1}, "logging.rollouts_every", 3),
    ("report_to", ["tensorboard"], {}, "logging.trackers", ("tensorboard",)),
    ("save_total_limit", 3, {}, "checkpoint.keep_last", 3),
    ("max_steps", 12, {}, "steps", 24),
    ("use_vllm", True, {}, "engine.name", "vllm"),
    ("use_vllm", True, {}, "engine.server", None),
    # what TRL corrects by unless told otherwise: ratios of whole answers, 0 above 3
    ("use_vllm", True, {}, "algorithm.correction.name", "sequence_icepop"),
    ("use_vllm", True, {}, "algorithm.correction.low", 0.0),
    ("vllm_mode", "server", VLLM, "engine.server", "http://0.0.0.0:8000"),
    ("vllm_server_base_url", "http://a:1", SERVER, "engine.server", "http://a:1"),
    ("vllm_server_host", "b", SERVER, "engine.server", "http://b:8000"),
    ("vllm_server_port", 7, SERVER, "engine.server", "http://0.0.0.0:7"),
    ("vllm_server_timeout", 120.0, SERVER, "engine.patience_minutes", 2.0),
    ("vllm_gpu_memory_utilization", 0.5, VLLM, "engine.memory_share", 0.5),
    ("vllm_enable_sleep_mode", True, VLLM, "engine.sleep", True),
    ("vllm_max_model_length", 99, VLLM, "engine.arguments", ("--max-model-len", "99")),
    ("vllm_model_impl", "transformers", VLLM, "engine.arguments", ("--model-impl", "transformers")),
    ("vllm_tensor_parallel_size", 2, VLLM, "engine.arguments", ("--tensor-parallel-size", "2")),
    ("vllm_importance_sampling_correction", False, VLLM, "algorithm.correction", {}),
    ("vllm_importance_sampling_mode", "token_mask", VLLM, "algorithm.correction.name", "icepop"),
    ("vllm_importance_sampling_mode", "token_truncate", VLLM, "algorithm.correction.cap", 3.0),
    ("vllm_importance_sampling_clip_max", 2.0, VLLM, "algorithm.correction.high", 2.0),
    (
        "vllm_importance_sampling_clip_max",
        None,
        VLLM,
        "algorithm.correction.high",
        1.7976931348623157e308,
    ),
    ("vllm_importance_sampling_clip_min", 0.5, VLLM, "algorithm.correction.low", 0.5),
]
ELSEWHERE = {
    # the loop and the trainer: test_trl_dropin
    *("remove_unused_columns", "num_train_epochs", "reward_weights", "disable_dropout", "use_cpu"),
    *("logging_strategy", "logging_steps", "logging_first_step", "disable_tqdm", "eval_strategy"),
    *("eval_steps", "eval_delay", "eval_on_start", "num_generations_eval"),
    *("per_device_eval_batch_size", "save_strategy", "save_steps", "router_aux_loss_coef"),
    # tools: test_trl_tools
    "max_tool_calling_iterations",
    # of no effect: test_trl_options
    *("pad_to_multiple_of", "cast_lm_head_to_fp32", "dataloader_num_workers"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order"),
    # of the display, ignored with a warning: below
    *IGNORED,
    # checked only
    *("data_seed", "run_name"),
    # for the script
    *("resume_from_checkpoint", "do_train", "do_eval", "do_predict"),
}
OTHER_VALUES = {bool: lambda v: not v, int: lambda v: v + 7, float: lambda v: v + 0.5}


def at(config: Any, path: str) -> Any:
    for step in path.split("."):
        config = config[step] if isinstance(config, dict) else getattr(config, step)
    return config


@pytest.mark.parametrize(("field", "value", "others", "path", "wanted"), BECOMES)
def test_a_supported_field_becomes_a_setting(
    field: str, value: Any, others: dict[str, Any], path: str, wanted: Any
) -> None:
    args = GRPOConfig(**{field: value, **others})
    found = at(configuration(args, steps=24), path)
    assert found == pytest.approx(wanted)


def test_every_supported_field_is_tested() -> None:
    assert set(SUPPORTED) == {case[0] for case in BECOMES} | ELSEWHERE


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_of_the_display_is_ignored_with_a_warning(field: str) -> None:
    default, treatment = TABLE[field]
    change = OTHER_VALUES.get(type(default), lambda _: "something")
    with pytest.warns(UserWarning, match=rf"GRPOConfig\.{field} = .*: has no effect: "):
        args = GRPOConfig(**{field: change(default)})
    assert configuration(args, steps=24) == configuration(GRPOConfig(), steps=24)


def test_trackio_is_no_tracker_and_the_others_stay() -> None:
    with pytest.warns(UserWarning, match="trackio is not supported"):
        args = GRPOConfig(report_to=["trackio", "tensorboard"])
        assert configuration(args, steps=24).logging.trackers == ("tensorboard",)


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_accepts_its_default_alone(field: str) -> None:
    default, treatment = TABLE[field]
    for value in (default, *treatment.same):
        GRPOConfig(**{field: value})
    change = OTHER_VALUES.get(type(default), lambda _: "something")
    with pytest.raises(UsageError, match=rf"^GRPOConfig\.{field} = .*: ") as caught:
        GRPOConfig(**{field: change(default)})
    assert treatment.note in str(caught.value)
    assert treatment.instead in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "dap"}, "did you mean dapo"),
        ({"scale_rewards": "groups"}, "did you mean group"),
        ({"importance_sampling_level": "word"}, "known: sequence, token"),
        ({"loss_type": "cispo"}, "every gradient would be multiplied by 0.2"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "'sapo' does not read it"),
        ({"delta": 1.1}, "at least 1 . epsilon_high = 1.2"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "use 'token'"),
        ({"num_generations": 1}, "at least 2"),
        ({"per_device_train_batch_size": 6}, "must divide the completions per generation, 6"),
        ({"generation_batch_size": 12}, "must be a multiple of the batch size, 8"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "not both"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "must divide the steps"),
        ({"max_steps": 3, "steps_per_generation": 2}, "a multiple of 2"),
        ({"lr_scheduler_type": "polynomial"}, "no such schedule"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "linear does not take 'power'"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "constant_with_warmup"),
        ({"optim": "adafactor"}, "AdamW"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams' is not known"),
        ({"generation_kwargs": "{"}, "is not JSON"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "load the model"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "use float32 or bfloat16"),
        ({"report_to": "comet_ml"}, "no such tracker"),
        ({"save_strategy": "best"}, "no such strategy"),
        ({"data_seed": 1}, "set seed"),
        ({"run_name": "x"}, "named after the last part"),
        ({"max_completion_length": None}, "needs a budget"),
        ({"eval_strategy": "steps", "num_generations_eval": 3}, "a multiple of the completions"),
        ({"temperature": 0.0}, "sampling.temperature = 0"),
        (VLLM | {"vllm_mode": "remote"}, "vllm_mode = 'remote': no such mode"),
        ({"vllm_server_port": 1}, "vllm_server_port = 1: is read with use_vllm = True alone"),
        (VLLM | {"vllm_server_port": 1}, "is read with vllm_mode = 'server' alone"),
        (SERVER | {"vllm_enable_sleep_mode": True}, "for the one who starts the server"),
        (SERVER | {"vllm_server_base_url": "http://a", "vllm_server_host": "b"}, "says it already"),
        (VLLM | {"vllm_importance_sampling_mode": "token"}, "no such mode"),
        (VLLM | {"loss_type": "vespo"}, "correction = True: loss_type = 'vespo' would"),
        (VLLM | {"vllm_importance_sampling_clip_max": 0.5}, "must enclose 1"),
        ({"vllm_importance_sampling_clip_max": 2.0}, "use_vllm and vllm_importance_sampling_corr"),
        (
            VLLM
            | {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_min": 0.5,
            },
            "truncates from above alone",
        ),
        (VLLM | {"top_p": 0.9}, "vLLM does not report which tokens"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GRPOConfig(**given)


def test_steps_are_counted_as_trl_counts() -> None:
    # 8 rows a step, 4 to a prompt: 2 prompts a step, 5 steps an epoch of 11 prompts
    args = GRPOConfig(num_generations=4, num_train_epochs=2)
    assert (epoch_steps(args, 11), optimizer_steps(args, 11)) == (5, 10)
    # twice over each batch of 4 prompts, cut into 2 steps: 2 batches an epoch feed 8 steps
    args = GRPOConfig(num_generations=4, steps_per_generation=2, num_iterations=2)
    assert (epoch_steps(args, 11), batches(args).updates) == (8, 4)
    assert optimizer_steps(args, 11) == 24
    # 4 generations of 2 prompts make one step: 5 of them an epoch, so 1.25 steps, rounded up
    args = GRPOConfig(num_generations=4, gradient_accumulation_steps=4, steps_per_generation=1)
    assert (epoch_steps(args, 11), batches(args).prompts) == (2, 8)


def test_the_format_of_none_is_that_of_the_card() -> None:
    assert dtype(GRPOConfig(), card=True) == "bfloat16"
    assert dtype(GRPOConfig(), card=False) == "float32"
    assert dtype(GRPOConfig(bf16=False), card=True) == "float32"


def test_a_command_line_can_fill_it() -> None:
    line = "--output_dir x --max_steps 4 --scale_rewards none --reward_weights 1.0 2.0"
    (args,) = HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(line.split())
    assert (args.max_steps, args.scale_rewards, args.reward_weights) == (4, "none", [1.0, 2.0])


def test_the_page_is_current() -> None:
    page = DOCS.read_text(encoding="utf-8")
    between = page.partition("<!-- fields -->\n")[2].partition("<!-- /fields -->")[0]
    assert between == markdown(GRPOConfig), "run python -m groupwise.integrations.trl"
    assert all(f"| `{name}` |" in between for name in TABLE)


def test_names_and_defaults_are_those_of_trl() -> None:
    trl = require_trl()
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the fields are those of TRL 1.16, and {trl.__version__} is installed")
    theirs = {
        field.name: field.default
        if field.default is not dataclasses.MISSING
        else field.default_factory()  # pyright: ignore[reportCallIssue]
        for field in dataclasses.fields(trl.GRPOConfig)
    }
    assert set(theirs) == set(TABLE)
    other = {
        name: (theirs[name], default)
        for name, (default, _) in TABLE.items()
        if not _equal(getattr(theirs[name], "value", theirs[name]), default)
    }
    assert other == {}

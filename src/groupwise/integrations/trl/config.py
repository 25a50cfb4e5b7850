"""TRL's `GRPOConfig`: every field with its default, and what becomes of it here.

Fields and defaults are those of TRL 1.16 with transformers 5.23. Which value goes where is said
beside each field, and done in `settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupwise.errors import UsageError, suggest
from groupwise.integrations.trl.fields import check, honoured, refused
from groupwise.integrations.trl.settings import (
    ADVANTAGES,
    CLIPPED,
    LEVELS,
    LOSSES,
    configuration,
    optimiser_steps,
)

VLLM = "rollouts are written in this process, by the model that is trained"
NO_VLLM = "leave the vllm_… fields out: there is no second copy to place or to correct for"
CLUSTER = "a run of this trainer is one process on one device"
LOADER = "there is no data loader: the prompts are in memory"
HUB = "nothing is uploaded"
TO_HUB = "call trainer.model.push_to_hub(name) after training"
EVAL = "an evaluation samples, judges and averages, with no batches of logits to collect"
BATCHES = "batches stay whole, and no pass depends on their split"
KERNELS = "the layers are those of transformers, with attention of our own"
ADAPTIVE = "the entropy bonus is constant"
PLAIN_LOG = "completions are written to output_dir/rollouts"
REFERENCE = "the reference is the model as it was before the first step"
BEST = "the last model is kept"
SCRIPT = "nothing: it is for your script to read, as in TRL"


@dataclass(frozen=True)
class GRPOConfig:
    """Settings of a `GRPOTrainer`, by TRL's names and with TRL's defaults.

    The table of all fields is in docs/trl.md.

    Raises:
        UsageError: a value that would not be heeded, with the reason and what to do instead; a
            combination that TRL refuses too.

    Example:
        >>> GRPOConfig(use_vllm=True)
        Traceback (most recent call last):
        ...
        groupwise.errors.UsageError: GRPOConfig.use_vllm = True: rollouts are written in this \
process, by the model that is trained; leave the vllm_… fields out: there is no second copy to \
place or to correct for.
    """

    # Batches and steps
    output_dir: str | None = honoured(
        None, "`output`", 'None is "trainer_output"; the run directory of groupwise'
    )
    per_device_train_batch_size: int = honoured(
        8, "`prompts_per_step`", "× gradient_accumulation_steps / num_generations prompts"
    )
    gradient_accumulation_steps: int = honoured(
        1, "`prompts_per_step`", "an optimiser step is normalised as a whole, however it is split"
    )
    generation_batch_size: int | None = honoured(
        None, "`prompts_per_step`, `update.minibatches`", "completions per batch of rollouts"
    )
    steps_per_generation: int | None = honoured(
        None, "`prompts_per_step`, `update.minibatches`", "minibatches hold whole groups"
    )
    num_generations: int | None = honoured(8, "`group_size`")
    num_iterations: int = honoured(1, "`update.epochs`")
    num_train_epochs: float = honoured(3.0, "`steps`", "counted as TRL counts")
    max_steps: int = honoured(
        -1, "`steps`", "optimiser steps; must be a multiple of those that one batch of rollouts has"
    )
    shuffle_dataset: bool | None = refused(
        True, "prompts are drawn in an order that follows from the seed"
    )
    remove_unused_columns: bool | None = honoured(
        False, "columns that rewards see", "True leaves the prompt alone"
    )
    seed: int = honoured(42, "`seed`")
    data_seed: int | None = honoured(None, "`seed`", "must be the seed itself")

    # Sampling
    max_completion_length: int | None = honoured(512, "`sampling.max_tokens`")
    temperature: float = honoured(1.0, "`sampling.temperature`")
    top_p: float = honoured(
        1.0, "`sampling.top_p`", "the learner sees the truncated distribution too, TRL's does not"
    )
    top_k: int = honoured(0, "`sampling.top_k`", "as top_p")
    min_p: float | None = honoured(None, "`sampling.min_p`", "as top_p")
    generation_kwargs: dict[str, Any] | str | None = honoured(
        None, "`sampling.stop`", "takes stop or stop_strings only"
    )
    repetition_penalty: float = refused(
        1.0,
        "it would draw from another distribution than the one that is trained",
        "punish repetition by a reward",
    )
    chat_template_kwargs: dict[str, Any] | str | None = refused(
        None,
        "the chat template is called as it is",
        "put the variable into it: tokenizer.chat_template = "
        "'{% set enable_thinking = false %}' + tokenizer.chat_template",
    )
    cache_implementation: str | None = refused(None, "the engine has a cache of its own")
    use_vllm: bool = refused(False, VLLM, NO_VLLM)
    vllm_mode: str = refused("colocate", VLLM, NO_VLLM)
    vllm_model_impl: str = refused("vllm", VLLM, NO_VLLM)
    vllm_enable_sleep_mode: bool = refused(False, VLLM, NO_VLLM)
    vllm_structured_outputs_regex: str | None = refused(None, VLLM, "reward the format")
    vllm_server_base_url: str | None = refused(None, VLLM, NO_VLLM)
    vllm_server_host: str = refused("0.0.0.0", VLLM, NO_VLLM)
    vllm_server_port: int = refused(8000, VLLM, NO_VLLM)
    vllm_server_timeout: float = refused(240.0, VLLM, NO_VLLM)
    vllm_group_port: int = refused(51216, VLLM, NO_VLLM)
    vllm_gpu_memory_utilization: float = refused(0.3, VLLM, NO_VLLM)
    vllm_max_model_length: int | None = refused(None, VLLM, NO_VLLM)
    vllm_tensor_parallel_size: int = refused(1, VLLM, NO_VLLM)
    vllm_importance_sampling_correction: bool = refused(True, VLLM, NO_VLLM)
    vllm_importance_sampling_mode: str = refused("sequence_mask", VLLM, NO_VLLM)
    vllm_importance_sampling_clip_max: float | None = refused(3.0, VLLM, NO_VLLM)
    vllm_importance_sampling_clip_min: float | None = refused(None, VLLM, NO_VLLM)
    vllm_importance_sampling_cap: float | None = refused(None, VLLM, NO_VLLM)
    use_transformers_continuous_batching: bool = refused(
        False, VLLM, "leave it out: waiting prompts take the place of finished ones here too"
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = refused(None, VLLM)
    use_transformers_paged: bool = refused(False, VLLM)
    ds3_gather_for_generation: bool = refused(True, CLUSTER)
    max_tool_calling_iterations: int | None = refused(None, "completions are of one turn")
    pad_to_multiple_of: int | str | None = refused("auto", "nothing is padded", same=(None,))

    # The algorithm
    loss_type: str = honoured("dapo", "`algorithm.surrogate`, `algorithm.weighting`")
    beta: float = honoured(0.0, "`algorithm.divergence.coefficient`")
    use_bias_correction_kl: bool = honoured(True, "`algorithm.divergence`: k3_weighted or k3")
    epsilon: float = honoured(0.2, "`algorithm.surrogate.low`", of=CLIPPED)
    epsilon_high: float | None = honoured(
        None,
        "`algorithm.surrogate.high`, or `cap` with cispo",
        "cispo needs a cap of 1 or more: at TRL's default of 0.2 every gradient would shrink to it",
        of=(*CLIPPED, "cispo"),
    )
    delta: float | None = honoured(
        None, "`algorithm.surrogate.bound`", "at least 1 + epsilon_high", of=CLIPPED
    )
    importance_sampling_level: str = honoured("token", "`algorithm.ratio`")
    sapo_temperature_pos: float = honoured(1.0, "`algorithm.surrogate.positive`", of=("sapo",))
    sapo_temperature_neg: float = honoured(1.05, "`algorithm.surrogate.negative`", of=("sapo",))
    vespo_k_pos: float = honoured(2.0, "`algorithm.surrogate.power_positive`", of=("vespo",))
    vespo_lambda_pos: float = honoured(3.0, "`algorithm.surrogate.decay_positive`", of=("vespo",))
    vespo_k_neg: float = honoured(3.0, "`algorithm.surrogate.power_negative`", of=("vespo",))
    vespo_lambda_neg: float = honoured(2.0, "`algorithm.surrogate.decay_negative`", of=("vespo",))
    scale_rewards: str = honoured(
        "group",
        "`algorithm.advantage`: zscore, batch_zscore or centered",
        "groups of equal rewards get exactly 0",
    )
    reward_weights: list[float] | None = honoured(None, "weights of the rewards")
    multi_objective_aggregation: str = refused(
        "sum_then_normalize",
        "rewards are summed before they are normalised",
        'use groupwise.train(…, algorithm="gdpo")',
    )
    mask_truncated_completions: bool = honoured(
        False,
        "`algorithm.filter`: not_truncated",
        "a prompt with no finished answer at all is drawn again",
    )
    entropy_coef: float = honoured(
        0.0,
        "`algorithm.entropy`",
        "weighted like the loss",
        of=("bnpo", "dapo", "cispo", "vespo"),
    )
    use_adaptive_entropy: bool = refused(False, ADAPTIVE, "set entropy_coef")
    entropy_coef_min: float = refused(0.0, ADAPTIVE)
    entropy_coef_max: float = refused(1.0, ADAPTIVE)
    entropy_coef_delta: float = refused(0.005, ADAPTIVE)
    entropy_target: float = refused(0.2, ADAPTIVE)
    top_entropy_quantile: float = refused(1.0, "every token of an answer is trained")
    off_policy_mask_threshold: float | None = refused(None, "the ratio is clipped, not masked")
    sync_ref_model: bool = refused(False, REFERENCE, "train again from final/ for a new reference")
    ref_model_mixup_alpha: float = refused(0.6, REFERENCE)
    ref_model_sync_steps: int = refused(512, REFERENCE)
    router_aux_loss_coef: float | None = honoured(
        None,
        "nothing: the load-balancing loss is not computed",
        "0.0 is accepted; None is refused for a mixture of experts, where it would switch it on",
    )

    # The model
    model_init_kwargs: dict[str, Any] | str | None = honoured(
        None, "`model.dtype`, `model.trust_remote_code`", "other keys: load the model yourself"
    )
    trust_remote_code: bool = honoured(False, "`model.trust_remote_code`")
    bf16: bool | None = honoured(
        None,
        "`model.dtype`",
        "weights in bfloat16 with float32 masters; None: on a card that has it, unless fp16",
    )
    fp16: bool = refused(False, "there is no loss scaling", "use bf16, or float32 by bf16=False")
    disable_dropout: bool = honoured(False, "dropout of the model set to 0")
    cast_lm_head_to_fp32: bool = refused(
        False, "the head computes in the model's format", "bf16=False computes all in float32"
    )
    gradient_checkpointing: bool = honoured(True, "`update.gradient_checkpointing`")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = refused(
        None, "checkpointing is not reentrant", same=({"use_reentrant": False},)
    )
    activation_checkpointing: bool | None = honoured(None, "`update.gradient_checkpointing`")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = refused(
        None, "checkpointing is not reentrant", same=({"use_reentrant": False},)
    )
    torch_compile: bool = refused(False, KERNELS)
    torch_compile_backend: str | None = refused(None, KERNELS)
    torch_compile_mode: str | None = refused(None, KERNELS)
    use_liger_kernel: bool = refused(False, KERNELS, "leave it out: logits are never held whole")
    liger_kernel_config: dict[str, bool] | None = refused(None, KERNELS)
    use_cache: bool = refused(False, "training needs no cache")
    neftune_noise_alpha: float | None = refused(None, "no noise is added to embeddings")
    use_cpu: bool = honoured(
        False, "nothing: a run takes a card where there is one", "hide it: CUDA_VISIBLE_DEVICES=''"
    )
    tf32: bool | None = refused(
        None,
        "it is a setting of torch for the whole process",
        "call torch.set_float32_matmul_precision('high') yourself",
    )
    full_determinism: bool = refused(
        False,
        "it is a setting of torch for the whole process",
        "call torch.use_deterministic_algorithms(True) yourself",
    )

    # The optimiser
    learning_rate: float = honoured(1e-6, "`optimizer.learning_rate`")
    lr_scheduler_type: str = honoured(
        "linear",
        "`optimizer.schedule`",
        "linear, cosine, cosine_with_min_lr, constant, constant_with_warmup",
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = honoured(
        None, "`optimizer.final_fraction`", "min_lr or min_lr_rate of cosine_with_min_lr"
    )
    warmup_steps: float = honoured(
        0, "`optimizer.warmup_steps`", "the first step has 1/warmup_steps of the rate, TRL's has 0"
    )
    optim: str = honoured("adamw_torch_fused", "`optimizer.name`", "adamw_torch is the same")
    optim_args: str | None = refused(None, "AdamW takes no more settings")
    optim_target_modules: str | list[str] | None = refused(None, "AdamW trains every weight")
    weight_decay: float = honoured(
        0.0, "`optimizer.weight_decay`", "decays biases and norms too, TRL leaves them out"
    )
    adam_beta1: float = honoured(0.9, "`optimizer.betas`")
    adam_beta2: float = honoured(0.999, "`optimizer.betas`")
    adam_epsilon: float = honoured(1e-8, "`optimizer.eps`")
    max_grad_norm: float = honoured(1.0, "`optimizer.max_grad_norm`", "0 clips nothing")
    label_smoothing_factor: float = refused(0.0, "there are no labels")
    average_tokens_across_devices: bool = refused(True, CLUSTER)
    torch_empty_cache_steps: int | None = refused(
        None, "memory is given back by torch", "lower per_device_train_batch_size"
    )
    auto_find_batch_size: bool = refused(
        False, "groups must stay whole (TRL refuses it too)", "lower per_device_train_batch_size"
    )

    # Logging
    logging_strategy: str = honoured("steps", "when `on_log` and `log_history` get the figures")
    logging_steps: float = honoured(10, "when `on_log` and `log_history` get the figures")
    logging_first_step: bool = honoured(False, "when `on_log` and `log_history` get the figures")
    log_completions: bool = honoured(
        False, "`logging.rollouts_every`", "every logging_steps, as JSON lines in rollouts/"
    )
    report_to: str | list[str] | None = honoured(
        "none", "`logging.trackers`", "tensorboard, wandb; figures by groupwise's own names"
    )
    disable_tqdm: bool | None = honoured(None, "True shows no progress")
    logging_nan_inf_filter: bool = refused(True, "a step without a finite gradient is left out")
    log_level: str = refused("passive", "there is one level", "filter the logger of your script")
    log_level_replica: str = refused("warning", CLUSTER)
    log_on_each_node: bool = refused(True, CLUSTER)
    include_num_input_tokens_seen: str | bool = refused(
        "no", "num_tokens is always logged", same=(False,)
    )
    log_multimodal: bool = refused(True, "prompts are text")
    num_completions_to_print: int | None = refused(None, PLAIN_LOG)
    log_unique_prompts: bool = refused(False, PLAIN_LOG)
    log_completions_hub_repo: str | None = refused(None, HUB, PLAIN_LOG)
    run_name: str | None = honoured(None, "nothing", "must be the last part of output_dir")
    project: str = refused("huggingface", "trackers take their project from their own variables")
    trackio_space_id: str | None = refused(None, "there is no such tracker")
    trackio_bucket_id: str | None = refused(None, "there is no such tracker")
    trackio_static_space_id: str | None = refused(None, "there is no such tracker")
    skip_memory_metrics: bool = refused(True, "memory_mb is in output_dir/metrics.jsonl")
    debug: str | list[str] = refused("", "a step that is not finite is written to suspects/")

    # Evaluation
    eval_strategy: str = honoured("no", "when `evaluate` runs")
    eval_steps: float | None = honoured(None, "when `evaluate` runs", "None: as logging_steps")
    eval_delay: float = honoured(0, "when `evaluate` runs")
    eval_on_start: bool = honoured(False, "when `evaluate` runs")
    num_generations_eval: int | None = honoured(None, "completions per prompt of an evaluation")
    per_device_eval_batch_size: int = honoured(8, "completions written at once in an evaluation")
    prediction_loss_only: bool = refused(False, EVAL)
    eval_do_concat_batches: bool = refused(True, EVAL)
    eval_use_gather_object: bool = refused(False, EVAL)
    eval_accumulation_steps: int | None = refused(None, EVAL)
    include_for_metrics: list[str] | None = refused(None, EVAL, "use a callback's on_evaluate")
    batch_eval_metrics: bool = refused(False, EVAL)
    bf16_full_eval: bool = refused(False, "an evaluation computes as training does")
    fp16_full_eval: bool = refused(False, "an evaluation computes as training does")
    label_names: list[str] | None = refused(None, "there are no labels")

    # Checkpoints
    save_strategy: str = honoured("steps", "when checkpoints are written", "steps, epoch or no")
    save_steps: float = honoured(
        500, "when checkpoints are written", "in output_dir/checkpoints, for resuming only"
    )
    save_total_limit: int | None = honoured(None, "`checkpoint.keep_last`")
    resume_from_checkpoint: str | None = honoured(None, SCRIPT)
    do_train: bool = honoured(False, SCRIPT)
    do_eval: bool = honoured(False, SCRIPT)
    do_predict: bool = honoured(False, SCRIPT)
    save_only_model: bool = refused(
        False, "a checkpoint is for resuming", "final/ holds the model alone"
    )
    save_on_each_node: bool = refused(False, CLUSTER)
    enable_jit_checkpoint: bool = refused(False, "a signal always leaves a checkpoint")
    load_best_model_at_end: bool = refused(False, BEST, "evaluate in a callback and save_model()")
    metric_for_best_model: str | None = refused(None, BEST)
    greater_is_better: bool | None = refused(None, BEST)
    ignore_data_skip: bool = refused(False, "a resumed run goes on with the next prompt")
    restore_callback_states_from_checkpoint: bool = refused(False, "callbacks keep their own state")
    push_to_hub: bool = refused(False, HUB, TO_HUB)
    hub_token: str | None = refused(None, HUB, TO_HUB)
    hub_private_repo: bool | None = refused(None, HUB, TO_HUB)
    hub_model_id: str | None = refused(None, HUB, TO_HUB)
    hub_strategy: str = refused("every_save", HUB, TO_HUB)
    hub_always_push: bool = refused(False, HUB, TO_HUB)
    hub_revision: str | None = refused(None, HUB, TO_HUB)

    # Data loading and many devices
    dataloader_drop_last: bool = refused(False, LOADER)
    dataloader_num_workers: int = refused(0, LOADER)
    dataloader_pin_memory: bool = refused(True, LOADER)
    dataloader_persistent_workers: bool = refused(False, LOADER)
    dataloader_prefetch_factor: int | None = refused(None, LOADER)
    dataloader_multiprocessing_context: str | None = refused(None, LOADER)
    dataloader_in_order: bool = refused(True, LOADER)
    train_sampling_strategy: str = refused("random", LOADER)
    length_column_name: str = refused("length", LOADER)
    accelerator_config: dict[str, Any] | str | None = refused(None, CLUSTER)
    parallelism_config: dict[str, Any] | str | None = refused(None, CLUSTER)
    ddp_find_unused_parameters: bool | None = refused(None, CLUSTER)
    ddp_bucket_cap_mb: int | None = refused(None, CLUSTER)
    ddp_broadcast_buffers: bool | None = refused(None, CLUSTER)
    ddp_static_graph: bool | None = refused(None, CLUSTER)
    ddp_backend: str | None = refused(None, CLUSTER)
    ddp_timeout: int = refused(1800, CLUSTER)
    fsdp: str | None = refused(None, CLUSTER)
    fsdp_config: dict[str, Any] | str | None = refused(None, CLUSTER)
    deepspeed: dict[str, Any] | str | None = refused(None, CLUSTER)
    local_rank: int = refused(-1, CLUSTER, same=(0,))

    def __post_init__(self) -> None:
        for name, known in (
            ("loss_type", LOSSES),
            ("scale_rewards", (*ADVANTAGES, True, False)),
            ("importance_sampling_level", LEVELS),
        ):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                hint = suggest(str(value), map(str, known))
                raise UsageError(f"GRPOConfig.{name} = {value!r}: not known; {hint}")
        check(self, loss_type=self.loss_type)
        configuration(self, steps=optimiser_steps(self, None) if self.max_steps > 0 else 1)

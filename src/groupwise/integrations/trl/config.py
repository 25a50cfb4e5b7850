"""TRL's `GRPOConfig`: every field with its default, and the setting of groupwise that it becomes.

Fields and defaults are those of TRL 1.16 with transformers 5.23; `settings` does the conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from groupwise.errors import UsageError, suggest
from groupwise.integrations.trl.fields import check, honoured, ignored, refused
from groupwise.integrations.trl.sampler import KINDS
from groupwise.integrations.trl.settings import (
    ADVANTAGES,
    AGGREGATIONS,
    CLIPPED,
    LEVELS,
    LOSSES,
    check_configuration,
)

OWN = "groupwise's own engine or vLLM generates completions"
OTHER = "completions would come from a distribution that is not the trained one"
SERVER, COLOCATED = "with vllm_mode = 'server'", "with vllm_mode = 'colocate'"
CORRECTS, MASKS = "`algorithm.correction`", "only in the modes that mask"
CLUSTER = "this trainer runs in one process on one device"
TRACKERS = "tensorboard, wandb, mlflow; metrics have groupwise's names; trackio is ignored"
LOADER = "there is no data loader: the prompts are in memory"
NO_LOADER = honoured("no effect", "the prompts are in memory")
HUB = "nothing is uploaded"
TO_HUB = "call trainer.model.push_to_hub(name) after training"
LOGS = "when metrics reach `on_log` and `log_history`"
EVAL = "evaluations sample and score completions; they collect no logits"
GLOBAL = "it is a setting of torch for the whole process"
KERNELS = "groupwise has its own kernels"
ADAPTIVE = "the entropy bonus is constant"
PLAIN_LOG = "completions are in output_dir/rollouts"
TRACKIO = "trackio is not supported; metrics are in output_dir/metrics.jsonl"
REFERENCE = "the reference is the model before the first step"
BEST = "the last model is kept"
SCRIPT = "no effect: your script may read it, as in TRL"


@dataclass
class GRPOConfig:
    """Settings of a `GRPOTrainer`, by TRL's names and with TRL's defaults.

    The table of all fields is in docs/trl.md.

    Raises:
        UsageError: a value that would have no effect, with the reason and what to do instead; a
            combination that TRL refuses too.

    Example:
        >>> GRPOConfig(use_liger_kernel=True)
        Traceback (most recent call last):
        ...
        groupwise.errors.UsageError: GRPOConfig.use_liger_kernel = True: groupwise has its own \
kernels; remove it; logits are computed in chunks.
    """

    # Batches and steps
    output_dir: Annotated[
        str | None, honoured("`output`", 'None is "trainer_output"; the run directory of groupwise')
    ] = None
    per_device_train_batch_size: Annotated[
        int,
        honoured("`prompts_per_step`", "times the accumulation steps, divided by num_generations"),
    ] = 8
    gradient_accumulation_steps: Annotated[
        int,
        honoured(
            "`prompts_per_step`", "an optimizer step is normalised as a whole, however it is split"
        ),
    ] = 1
    generation_batch_size: Annotated[
        int | None,
        honoured("`prompts_per_step`, `update.minibatches`", "completions per batch of rollouts"),
    ] = None
    steps_per_generation: Annotated[
        int | None,
        honoured("`prompts_per_step`, `update.minibatches`", "minibatches hold whole groups"),
    ] = None
    num_generations: Annotated[int | None, honoured("`group_size`")] = 8
    num_iterations: Annotated[int, honoured("`update.epochs`")] = 1
    num_train_epochs: Annotated[float, honoured("`steps`", "counted as in TRL")] = 3.0
    max_steps: Annotated[
        int,
        honoured(
            "`steps`", "optimizer steps; a multiple of the number of steps per batch of rollouts"
        ),
    ] = -1
    shuffle_dataset: Annotated[bool | None, refused("the seed determines the order of prompts")] = (
        True
    )
    remove_unused_columns: Annotated[
        bool | None, honoured("columns that rewards receive", "True: only the prompt")
    ] = False
    seed: Annotated[int, honoured("`seed`")] = 42
    data_seed: Annotated[int | None, honoured("`seed`", "must equal seed")] = None

    # Sampling
    max_completion_length: Annotated[int | None, honoured("`sampling.max_tokens`")] = 512
    temperature: Annotated[float, honoured("`sampling.temperature`")] = 1.0
    top_p: Annotated[
        float,
        honoured(
            "`sampling.top_p`",
            "the learner also uses the truncated distribution; TRL's does not",
        ),
    ] = 1.0
    top_k: Annotated[int, honoured("`sampling.top_k`", "like top_p")] = 0
    min_p: Annotated[float | None, honoured("`sampling.min_p`", "like top_p")] = None
    generation_kwargs: Annotated[
        dict[str, Any] | str | None, honoured("`sampling.stop`", "only stop or stop_strings")
    ] = None
    repetition_penalty: Annotated[float, refused(OTHER, "penalise repetition in a reward")] = 1.0
    chat_template_kwargs: Annotated[
        dict[str, Any] | str | None,
        honoured(
            "`data.chat_template_kwargs`",
            "stored in the chat template that is saved with the model",
        ),
    ] = None
    cache_implementation: Annotated[str | None, refused("the engine has its own cache")] = None
    use_vllm: Annotated[bool, honoured("`engine.name`", "the other vllm_ fields need it")] = False
    vllm_mode: Annotated[str, honoured("`engine.server`, or vLLM in this process")] = "colocate"
    vllm_model_impl: Annotated[str, honoured("`engine.arguments`", COLOCATED)] = "vllm"
    vllm_enable_sleep_mode: Annotated[bool, honoured("`engine.sleep`", COLOCATED)] = False
    vllm_structured_outputs_regex: Annotated[str | None, refused(OTHER, "reward the format")] = None
    vllm_server_base_url: Annotated[str | None, honoured("`engine.server`", SERVER)] = None
    vllm_server_host: Annotated[str, honoured("`engine.server`", SERVER)] = "0.0.0.0"
    vllm_server_port: Annotated[int, honoured("`engine.server`", SERVER)] = 8000
    vllm_server_timeout: Annotated[float, honoured("`engine.patience_minutes`", SERVER)] = 240.0
    vllm_group_port: Annotated[int, refused("new weights are sent as files")] = 51216
    vllm_gpu_memory_utilization: Annotated[float, honoured("`engine.memory_share`", COLOCATED)] = (
        0.3
    )
    vllm_max_model_length: Annotated[int | None, honoured("`engine.arguments`", COLOCATED)] = None
    vllm_tensor_parallel_size: Annotated[int, honoured("`engine.arguments`", COLOCATED)] = 1
    vllm_importance_sampling_correction: Annotated[bool, honoured(CORRECTS)] = True
    vllm_importance_sampling_mode: Annotated[str, honoured(CORRECTS, KINDS)] = "sequence_mask"
    vllm_importance_sampling_clip_max: Annotated[float | None, honoured(CORRECTS)] = 3.0
    vllm_importance_sampling_clip_min: Annotated[float | None, honoured(CORRECTS, MASKS)] = None
    vllm_importance_sampling_cap: Annotated[
        float | None, refused("deprecated in TRL", "set vllm_importance_sampling_clip_max")
    ] = None
    use_transformers_continuous_batching: Annotated[
        bool,
        refused(OWN, "remove it; waiting prompts replace finished ones here too"),
    ] = False
    transformers_continuous_batching_config: Annotated[
        dict[str, Any] | str | None, refused(OWN)
    ] = None
    use_transformers_paged: Annotated[bool, refused(OWN)] = False
    ds3_gather_for_generation: Annotated[bool, refused(CLUSTER)] = True
    max_tool_calling_iterations: Annotated[int | None, honoured("calls per completion")] = None
    pad_to_multiple_of: Annotated[int | str | None, honoured("no effect", "no padding")] = "auto"

    # The algorithm
    loss_type: Annotated[str, honoured("`algorithm.surrogate`, `algorithm.weighting`")] = "dapo"
    beta: Annotated[float, honoured("`algorithm.divergence.coefficient`")] = 0.0
    use_bias_correction_kl: Annotated[
        bool, honoured("`algorithm.divergence`: k3_weighted or k3")
    ] = True
    epsilon: Annotated[float, honoured("`algorithm.surrogate.low`", of=CLIPPED)] = 0.2
    epsilon_high: Annotated[
        float | None,
        honoured(
            "`algorithm.surrogate.high`, or `cap` with cispo",
            "at least 1 with cispo, where TRL's default multiplies every gradient by 0.2",
            of=(*CLIPPED, "cispo"),
        ),
    ] = None
    delta: Annotated[
        float | None,
        honoured("`algorithm.surrogate.bound`", "at least 1 + epsilon_high", of=CLIPPED),
    ] = None
    importance_sampling_level: Annotated[str, honoured("`algorithm.ratio`")] = "token"
    sapo_temperature_pos: Annotated[
        float, honoured("`algorithm.surrogate.positive`", of=("sapo",))
    ] = 1.0
    sapo_temperature_neg: Annotated[
        float, honoured("`algorithm.surrogate.negative`", of=("sapo",))
    ] = 1.05
    vespo_k_pos: Annotated[
        float, honoured("`algorithm.surrogate.power_positive`", of=("vespo",))
    ] = 2.0
    vespo_lambda_pos: Annotated[
        float, honoured("`algorithm.surrogate.decay_positive`", of=("vespo",))
    ] = 3.0
    vespo_k_neg: Annotated[
        float, honoured("`algorithm.surrogate.power_negative`", of=("vespo",))
    ] = 3.0
    vespo_lambda_neg: Annotated[
        float, honoured("`algorithm.surrogate.decay_negative`", of=("vespo",))
    ] = 2.0
    scale_rewards: Annotated[
        str,
        honoured(
            "`algorithm.advantage`: zscore, batch_zscore or centered",
            "the advantage of a group with equal rewards is exactly 0",
        ),
    ] = "group"
    reward_weights: Annotated[list[float] | None, honoured("weights of the rewards")] = None
    multi_objective_aggregation: Annotated[
        str,
        honoured("`algorithm.advantage`: parts_zscore", "whitens without a second 1e-4"),
    ] = "sum_then_normalize"
    mask_truncated_completions: Annotated[
        bool,
        honoured(
            "`algorithm.filter`: not_truncated",
            "a prompt without a finished completion is drawn again",
        ),
    ] = False
    entropy_coef: Annotated[
        float,
        honoured("`algorithm.entropy`", "multiplies the mean token entropy of a step"),
    ] = 0.0
    use_adaptive_entropy: Annotated[bool, refused(ADAPTIVE, "set entropy_coef")] = False
    entropy_coef_min: Annotated[float, refused(ADAPTIVE)] = 0.0
    entropy_coef_max: Annotated[float, refused(ADAPTIVE)] = 1.0
    entropy_coef_delta: Annotated[float, refused(ADAPTIVE)] = 0.005
    entropy_target: Annotated[float, refused(ADAPTIVE)] = 0.2
    top_entropy_quantile: Annotated[float, refused("every token of a completion is trained")] = 1.0
    off_policy_mask_threshold: Annotated[
        float | None,
        refused(
            "completions are not masked by their distance from the policy that sampled them",
            "num_iterations = 1 keeps completions on-policy; delta bounds their ratio",
        ),
    ] = None
    sync_ref_model: Annotated[
        bool, refused(REFERENCE, "train again from final/ for a new reference")
    ] = False
    ref_model_mixup_alpha: Annotated[float, refused(REFERENCE)] = 0.6
    ref_model_sync_steps: Annotated[int, refused(REFERENCE)] = 512
    router_aux_loss_coef: Annotated[
        float | None,
        honoured(
            "`update.router_aux_loss`",
            "None: the model's; over the tokens of an update, in which a prompt counts once",
        ),
    ] = None

    # The model
    model_init_kwargs: Annotated[
        dict[str, Any] | str | None,
        honoured("`model.dtype`, `model.trust_remote_code`", "other keys: load the model yourself"),
    ] = None
    trust_remote_code: Annotated[bool, honoured("`model.trust_remote_code`")] = False
    bf16: Annotated[
        bool | None,
        honoured(
            "`model.dtype`",
            "bfloat16 weights with float32 masters; None: on GPUs with bfloat16, unless fp16",
        ),
    ] = None
    fp16: Annotated[
        bool,
        refused("only recipes support float16", "use bf16, or bf16=False for float32"),
    ] = False
    disable_dropout: Annotated[bool, honoured("dropout of the model set to 0")] = False
    cast_lm_head_to_fp32: Annotated[
        bool,
        honoured("no effect in float32", "not with bfloat16, where the head stays in bfloat16"),
    ] = False
    gradient_checkpointing: Annotated[bool, honoured("`update.gradient_checkpointing`")] = True
    gradient_checkpointing_kwargs: Annotated[
        dict[str, Any] | str | None,
        refused("checkpointing is not reentrant", same=({"use_reentrant": False},)),
    ] = None
    activation_checkpointing: Annotated[
        bool | None, honoured("`update.gradient_checkpointing`")
    ] = None
    activation_checkpointing_kwargs: Annotated[
        dict[str, Any] | str | None,
        refused("checkpointing is not reentrant", same=({"use_reentrant": False},)),
    ] = None
    torch_compile: Annotated[bool, refused(KERNELS)] = False
    torch_compile_backend: Annotated[str | None, refused(KERNELS)] = None
    torch_compile_mode: Annotated[str | None, refused(KERNELS)] = None
    use_liger_kernel: Annotated[
        bool, refused(KERNELS, "remove it; logits are computed in chunks")
    ] = False
    liger_kernel_config: Annotated[dict[str, bool] | None, refused(KERNELS)] = None
    use_cache: Annotated[bool, refused("training needs no cache")] = False
    neftune_noise_alpha: Annotated[float | None, refused("no noise is added to embeddings")] = None
    use_cpu: Annotated[
        bool,
        honoured(
            "no effect: a run uses a GPU if there is one", "hide the GPU: CUDA_VISIBLE_DEVICES=''"
        ),
    ] = False
    tf32: Annotated[
        bool | None, refused(GLOBAL, "call torch.set_float32_matmul_precision('high') yourself")
    ] = None
    full_determinism: Annotated[
        bool, refused(GLOBAL, "call torch.use_deterministic_algorithms(True) yourself")
    ] = False

    # The optimizer
    learning_rate: Annotated[float, honoured("`optimizer.learning_rate`")] = 1e-6
    lr_scheduler_type: Annotated[
        str,
        honoured(
            "`optimizer.schedule`",
            "linear, cosine, cosine_with_min_lr, constant, constant_with_warmup",
        ),
    ] = "linear"
    lr_scheduler_kwargs: Annotated[
        dict[str, Any] | str | None,
        honoured("`optimizer.final_fraction`", "min_lr or min_lr_rate of cosine_with_min_lr"),
    ] = None
    warmup_steps: Annotated[
        float,
        honoured(
            "`optimizer.warmup_steps`",
            "the first step uses 1/warmup_steps of the rate; TRL's uses 0",
        ),
    ] = 0
    optim: Annotated[str, honoured("`optimizer.name`", "adamw_torch has the same effect")] = (
        "adamw_torch_fused"
    )
    optim_args: Annotated[str | None, refused("AdamW has no further settings")] = None
    optim_target_modules: Annotated[
        None | str | list[str], refused("AdamW trains every weight")
    ] = None
    weight_decay: Annotated[
        float,
        honoured("`optimizer.weight_decay`", "also decays biases and norms; TRL does not"),
    ] = 0.0
    adam_beta1: Annotated[float, honoured("`optimizer.betas`")] = 0.9
    adam_beta2: Annotated[float, honoured("`optimizer.betas`")] = 0.999
    adam_epsilon: Annotated[float, honoured("`optimizer.eps`")] = 1e-8
    max_grad_norm: Annotated[float, honoured("`optimizer.max_grad_norm`", "0: no clipping")] = 1.0
    label_smoothing_factor: Annotated[float, refused("there are no labels")] = 0.0
    average_tokens_across_devices: Annotated[bool, refused(CLUSTER)] = True
    torch_empty_cache_steps: Annotated[
        int | None, refused("torch manages its memory", "lower per_device_train_batch_size")
    ] = None
    auto_find_batch_size: Annotated[
        bool,
        refused(
            "groups must stay whole (as in TRL)",
            "lower per_device_train_batch_size",
        ),
    ] = False

    # Logging
    logging_strategy: Annotated[str, honoured(LOGS)] = "steps"
    logging_steps: Annotated[float, honoured(LOGS)] = 10
    logging_first_step: Annotated[bool, honoured(LOGS)] = False
    log_completions: Annotated[
        bool,
        honoured("`logging.rollouts_every`", "every logging_steps, as JSON lines in rollouts/"),
    ] = False
    report_to: Annotated[
        None | str | list[str],
        honoured("`logging.trackers`", TRACKERS),
    ] = "none"
    disable_tqdm: Annotated[bool | None, honoured("True hides the progress display")] = None
    logging_nan_inf_filter: Annotated[
        bool, refused("a step without a finite gradient is skipped")
    ] = True
    log_level: Annotated[
        str, refused("there is a single log level", "filter the logger of your script")
    ] = "passive"
    log_level_replica: Annotated[str, refused(CLUSTER)] = "warning"
    log_on_each_node: Annotated[bool, refused(CLUSTER)] = True
    include_num_input_tokens_seen: Annotated[
        str | bool, refused("num_tokens is always logged", same=(False,))
    ] = "no"
    log_multimodal: Annotated[bool, refused("prompts are text")] = True
    num_completions_to_print: Annotated[int | None, ignored(PLAIN_LOG)] = None
    log_unique_prompts: Annotated[bool, ignored(PLAIN_LOG)] = False
    log_completions_hub_repo: Annotated[str | None, refused(HUB, PLAIN_LOG)] = None
    run_name: Annotated[
        str | None, honoured("no effect", "must be the last part of output_dir")
    ] = None
    project: Annotated[
        str, refused("trackers read their project from their environment variables")
    ] = "huggingface"
    trackio_space_id: Annotated[str | None, ignored(TRACKIO)] = None
    trackio_bucket_id: Annotated[str | None, ignored(TRACKIO)] = None
    trackio_static_space_id: Annotated[str | None, ignored(TRACKIO)] = None
    skip_memory_metrics: Annotated[bool, refused("memory_mb is in output_dir/metrics.jsonl")] = True
    debug: Annotated[
        str | list[str], refused("steps that are not finite are stored in suspects/", same=(None,))
    ] = ""

    # Evaluation
    eval_strategy: Annotated[str, honoured("when `evaluate` runs")] = "no"
    eval_steps: Annotated[
        float | None, honoured("when `evaluate` runs", "None: like logging_steps")
    ] = None
    eval_delay: Annotated[float, honoured("when `evaluate` runs")] = 0
    eval_on_start: Annotated[bool, honoured("when `evaluate` runs")] = False
    num_generations_eval: Annotated[
        int | None, honoured("completions per prompt of an evaluation")
    ] = None
    per_device_eval_batch_size: Annotated[
        int, honoured("completions generated at once in an evaluation")
    ] = 8
    prediction_loss_only: Annotated[bool, refused(EVAL)] = False
    eval_do_concat_batches: Annotated[bool, refused(EVAL)] = True
    eval_use_gather_object: Annotated[bool, refused(EVAL)] = False
    eval_accumulation_steps: Annotated[int | None, refused(EVAL)] = None
    include_for_metrics: Annotated[
        list[str] | None, refused(EVAL, "use a callback's on_evaluate")
    ] = None
    batch_eval_metrics: Annotated[bool, refused(EVAL)] = False
    bf16_full_eval: Annotated[bool, refused("evaluations use the dtype of training")] = False
    fp16_full_eval: Annotated[bool, refused("evaluations use the dtype of training")] = False
    label_names: Annotated[list[str] | None, refused("there are no labels")] = None

    # Checkpoints
    save_strategy: Annotated[
        str, honoured("when checkpoints are written", "steps, epoch or no")
    ] = "steps"
    save_steps: Annotated[
        float,
        honoured("when checkpoints are written", "in output_dir/checkpoints, for resuming only"),
    ] = 500
    save_total_limit: Annotated[int | None, honoured("`checkpoint.keep_last`")] = None
    resume_from_checkpoint: Annotated[str | None, honoured(SCRIPT)] = None
    do_train: Annotated[bool, honoured(SCRIPT)] = False
    do_eval: Annotated[bool, honoured(SCRIPT)] = False
    do_predict: Annotated[bool, honoured(SCRIPT)] = False
    save_only_model: Annotated[
        bool, refused("checkpoints are for resuming", "final/ contains only the model")
    ] = False
    save_on_each_node: Annotated[bool, refused(CLUSTER)] = False
    enable_jit_checkpoint: Annotated[bool, refused("every signal writes a checkpoint")] = False
    load_best_model_at_end: Annotated[
        bool, refused(BEST, "evaluate in a callback, and call save_model()")
    ] = False
    metric_for_best_model: Annotated[str | None, refused(BEST)] = None
    greater_is_better: Annotated[bool | None, refused(BEST)] = None
    ignore_data_skip: Annotated[bool, refused("a resumed run continues with the next prompt")] = (
        False
    )
    restore_callback_states_from_checkpoint: Annotated[
        bool, refused("callbacks keep their own state")
    ] = False
    push_to_hub: Annotated[bool, refused(HUB, TO_HUB)] = False
    hub_token: Annotated[str | None, refused(HUB, TO_HUB)] = None
    hub_private_repo: Annotated[bool | None, refused(HUB, TO_HUB)] = None
    hub_model_id: Annotated[str | None, refused(HUB, TO_HUB)] = None
    hub_strategy: Annotated[str, refused(HUB, TO_HUB)] = "every_save"
    hub_always_push: Annotated[bool, refused(HUB, TO_HUB)] = False
    hub_revision: Annotated[str | None, refused(HUB, TO_HUB)] = None

    # Data loading and many devices
    dataloader_drop_last: Annotated[bool, refused(LOADER)] = False
    dataloader_num_workers: Annotated[int, NO_LOADER] = 0
    dataloader_pin_memory: Annotated[bool, NO_LOADER] = True
    dataloader_persistent_workers: Annotated[bool, NO_LOADER] = False
    dataloader_prefetch_factor: Annotated[int | None, NO_LOADER] = None
    dataloader_multiprocessing_context: Annotated[str | None, NO_LOADER] = None
    dataloader_in_order: Annotated[bool, NO_LOADER] = True
    train_sampling_strategy: Annotated[str, refused(LOADER)] = "random"
    length_column_name: Annotated[str, refused(LOADER)] = "length"
    accelerator_config: Annotated[dict[str, Any] | str | None, refused(CLUSTER)] = None
    parallelism_config: Annotated[dict[str, Any] | str | None, refused(CLUSTER)] = None
    ddp_find_unused_parameters: Annotated[bool | None, refused(CLUSTER)] = None
    ddp_bucket_cap_mb: Annotated[int | None, refused(CLUSTER)] = None
    ddp_broadcast_buffers: Annotated[bool | None, refused(CLUSTER)] = None
    ddp_static_graph: Annotated[bool | None, refused(CLUSTER)] = None
    ddp_backend: Annotated[str | None, refused(CLUSTER)] = None
    ddp_timeout: Annotated[int, refused(CLUSTER)] = 1800
    fsdp: Annotated[str | None, refused(CLUSTER)] = None
    fsdp_config: Annotated[dict[str, Any] | str | None, refused(CLUSTER)] = None
    deepspeed: Annotated[dict[str, Any] | str | None, refused(CLUSTER)] = None
    local_rank: Annotated[int, refused(CLUSTER, same=(0,))] = -1

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check all fields; a trainer repeats it, since scripts assign fields after construction.

        Raises:
            UsageError: a field that has no effect here, or a combination that TRL refuses too.
        """
        choices = {
            "loss_type": LOSSES,
            "scale_rewards": (*ADVANTAGES, True, False),
            "importance_sampling_level": LEVELS,
            "multi_objective_aggregation": AGGREGATIONS,
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                hint = suggest(str(value), map(str, known))
                raise UsageError(f"GRPOConfig.{name} = {value!r}: not known; {hint}")
        check(self, loss_type=self.loss_type)
        check_configuration(self)

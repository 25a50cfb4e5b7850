"""The settings of every module, one frozen model each.

A section of a recipe is the settings object of the module that uses it. Every field states its
meaning and its unit; a recipe overrides the defaults given here. Settings of algorithms and rewards
are the keyword-only parameters of the registered functions and are checked against their
signatures.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from groupwise.settings.base import (
    FREE,
    RUNS_CODE,
    Count,
    Decay,
    Location,
    Minutes,
    Name,
    Names,
    NonNegative,
    Positive,
    Section,
    Share,
    Whole,
)
from groupwise.settings.changing import OrderSettings, SourceSettings


class AdapterSettings(Section):
    """A low-rank adapter (LoRA), trained instead of the model's weights."""

    rank: Count = 16
    """Rank of each matrix update."""
    alpha: Positive = 32.0
    """Scaling factor; updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the adapter's inputs during training."""
    targets: Names = ("all-linear",)
    """Names of the modules that get an adapter; "all-linear" means every linear layer except the
    head."""


class ModelSettings(Section):
    """The policy and its reference model."""

    path: Location = "bundled"
    """Hub name, Hugging Face model folder, or a small model in the package: "bundled" (word
    problems) or "bundled:search" (calls a search tool)."""
    revision: Name | None = None
    """Commit, tag or branch on the hub; only a commit never changes."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the computation; trained weights have float32 masters."""
    trust_remote_code: Annotated[bool, RUNS_CODE] = False
    """Whether Python code that comes with the model may run."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation of `transformers`, for models that do not support grouped
    attention."""
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of the logits in sampler and learner; "model" uses the model's dtype."""
    kernels: Name = "auto"
    """Compute kernels: the fastest that machine and model support ("auto"), or PyTorch
    ("torch")."""
    reference: Literal["auto", "none", "frozen"] = "auto"
    """Frozen reference model of the KL term: kept if the algorithm needs it ("auto"), always
    ("frozen"), or never ("none")."""
    reference_every: Whole = 0
    """Steps between replacements of the reference by the current policy; 0 never replaces it."""
    adapter: AdapterSettings | None = None
    """Train a low-rank adapter; None trains every weight."""
    quantization: Literal["nf4"] | None = None
    """Quantise the frozen weights to 4 bits; needs an adapter and the extra `quant`."""


class DataSettings(Section):
    """Training and evaluation data, and how rows become prompts."""

    train: Location = "word_problems"
    """File (.jsonl, .json, .csv, .parquet), folder, hub name, or the generator "word_problems"."""
    eval: Annotated[Location | None, FREE] = None
    """Held-out prompts, given like `train`; None uses the split `eval_split` of `train`."""
    subset: str | None = None
    """Configuration (subset) of a hub data set, such as "main"."""
    revision: Name | None = None
    """Commit, tag or branch of a hub data set; only a commit never changes."""
    train_split: Name = "train"
    """Training split of a hub data set or generator."""
    eval_split: Annotated[Name, FREE] = "test"
    """Evaluation split of a hub data set or generator."""
    prompt_column: Name = "prompt"
    """Column with the prompt, as text or chat messages."""
    answer_column: Name | None = None
    """Column with the reference answer; None uses "answer" if that column exists."""
    id_column: Name | None = None
    """Column with stable ids; None derives ids from the content."""
    answer_style: Name = "plain"
    """Format of the reference answer: "plain", "gsm8k" (after the last ####) or "boxed"."""
    system: str | None = None
    """System message before every prompt."""
    wording: str | None = None
    """Template that builds the prompt from columns, such as "{context} {question}"; replaces
    `prompt_column`."""
    chat: bool = True
    """Apply the chat template; False passes prompts to the model unchanged."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template, such as enable_thinking = false; saved with the model."""
    max_prompt_tokens: Count | None = None
    """Maximum prompt length in tokens; None is the context length minus `sampling.max_tokens`."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Whether longer prompts stop the run before it starts ("refuse") or are left out and counted
    ("drop")."""
    limit: Count | None = None
    """Maximum number of training prompts; None uses all."""
    sources: Annotated[tuple[SourceSettings, ...], Field(strict=False)] = ()
    """Several sources of training prompts with their shares, instead of `train`."""
    order: OrderSettings = OrderSettings()
    """Order in which training prompts are drawn."""
    transforms: Names = ()
    """Transforms applied to every prompt, such as "target_length(low=100, high=4000)"."""


class AlgorithmSettings(Section):
    """A row of the table of algorithms, and changes to its slots."""

    name: Name = "softrank"
    """Name of the algorithm; `groupwise algorithms` lists them."""
    advantage: dict[str, Any] = {}
    """Settings of the advantage; "name" replaces the function, as in every slot below. "rms"
    rescales the advantages of each batch to that root mean square."""
    ratio: dict[str, Any] = {}
    """Settings of the importance ratio."""
    surrogate: dict[str, Any] = {}
    """Settings of the surrogate, such as clip ranges."""
    divergence: dict[str, Any] = {}
    """The KL term: its name, "coefficient", and "in" ("loss" or "reward")."""
    correction: dict[str, Any] = {}
    """Settings of the correction for the gap between sampler and learner."""
    weighting: dict[str, Any] = {}
    """Settings of the weighting that aggregates token losses."""
    filter: dict[str, Any] = {}
    """Settings of the filter of groups and completions."""
    entropy: float | None = None
    """Coefficient of the entropy bonus; None uses the algorithm's value."""
    max_draws: Count = 10
    """Maximum batches of prompts that dynamic sampling draws to fill one batch."""

    def overrides(self) -> dict[str, dict[str, Any]]:
        """The slots that this section changes."""
        slots = type(self).model_fields.keys() - {"name", "entropy", "max_draws"}
        changes = {slot: dict(getattr(self, slot)) for slot in sorted(slots) if getattr(self, slot)}
        if self.entropy is not None:
            changes["entropy"] = {"coefficient": self.entropy}
        return changes


class Sampling(Section):
    """How completions are sampled. The defaults sample the untruncated distribution."""

    max_tokens: Count = 256
    """Maximum length of a completion in tokens."""
    max_turn_tokens: Whole = 0
    """Maximum tokens of a completion before its first call of a tool, between two calls and after
    the last one; a longer turn ends the completion. 0 sets no limit."""
    temperature: NonNegative = 1.0
    """Sampling temperature, applied in sampler and learner; 0 is greedy. Training needs a positive
    value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens up to this cumulative probability; 1 keeps all."""
    top_k: Whole = 0
    """Sample from this many most probable tokens; 0 keeps all."""
    min_p: Share = 0.0
    """Drop tokens whose probability is below this fraction of the most probable token's."""
    stop: Names = ()
    """Strings that end a completion; the tokens that complete a string are kept."""


class EngineSettings(Section):
    """The engine that samples completions."""

    name: Name = "group"
    """Engine: "group" computes each prompt once per group, "generate" calls `generate` of
    `transformers`, "vllm" uses vLLM. The settings below, except `max_rows`, are for vLLM."""
    max_rows: Annotated[Count, FREE] = 128
    """Maximum number of completions decoded at the same time."""
    server: Annotated[Name | None, FREE] = None
    """Address of a running vLLM server, such as "http://127.0.0.1:8000"."""
    python: Annotated[Location | None, RUNS_CODE] = None
    """Python interpreter of another environment from which to start a vLLM server, such as
    ".venv-vllm/bin/python". Without it and without `server`, vLLM runs in this process."""
    weights: Annotated[Literal["auto", "adapter", "reload", "restart", "shared_memory"], FREE] = (
        "auto"
    )
    """How vLLM loads new weights: as an adapter, by reloading, or by a restart; "auto" takes the
    first that passes a trial. "shared_memory" writes no files; it needs `python`."""
    arguments: Annotated[Names, FREE] = ()
    """Further arguments of `vllm serve`, such as ["--tensor-parallel-size", "2"]."""
    memory_share: Annotated[Annotated[float, Field(gt=0, le=1)], FREE] = 0.3
    """Fraction of the memory that a vLLM started by the run may use."""
    sleep: Annotated[bool, FREE] = False
    """Release vLLM's memory during updates (GPU only)."""
    canary_limit: Annotated[Positive, FREE] = 0.1
    """After a weight update, stop the run if vLLM's log-probabilities of known tokens differ from
    the learner's by more than this on average, in nats."""
    patience_minutes: Annotated[Minutes, FREE] = 5.0
    """Minutes to wait for a vLLM server that does not answer."""

    @property
    def patience_s(self) -> float:
        """The same in seconds."""
        return 60 * self.patience_minutes


class EnvironmentSettings(Section):
    """The environment that answers tool calls inside a completion: a registered function, its
    settings as further keys, and budgets."""

    model_config = ConfigDict(extra="allow")

    name: Name
    """Name of the environment."""
    layout: Literal["inline", "turns"] = "inline"
    """Whether replies are inserted into the assistant turn ("inline") or as turns of their own,
    built by the chat template ("turns")."""
    max_result_tokens: Count = 256
    """Maximum tokens of one reply; a longer result is cut inside its tags."""
    max_injected_tokens: Count = 1024
    """Maximum tokens of all replies in a completion; a reply that does not fit ends the
    completion."""
    workers: Annotated[Count, FREE] = 8
    """Maximum number of concurrent calls."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 30.0
    """Time limit of a call in seconds; after it, the completion is not judged."""

    @property
    def settings(self) -> dict[str, Any]:
        """Every other key: keyword-only parameters of the function."""
        return dict(self.model_extra or {})


class RewardSettings(Section):
    """A component of the reward: a registered function, its weight, and its settings as further
    keys."""

    model_config = ConfigDict(extra="allow")

    name: Name
    """Name of the reward."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight of this component in the total."""
    label: Name | None = None
    """Name in metrics and reports; None uses the name of the reward."""
    optional: bool = False
    """Whether a completion that this component cannot judge is scored by the others alone."""
    correct: bool | None = None
    """Whether its value is the correctness of the answer; None uses the first verifier."""

    @property
    def settings(self) -> dict[str, Any]:
        """Every other key: keyword-only parameters of the function."""
        return dict(self.model_extra or {})


class RewardPoolSettings(Section):
    """Worker processes for rewards, and their limits."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of worker processes; 0 runs rewards in the trainer's process, where only the watchdog
    ends one that hangs, and the run with it (`watchdog.limit_minutes`).
    Rewards that load a model (`reward_model`, `judge`, `bertscore` …) always have a separate
    worker."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 10.0
    """Time limit in seconds for one completion, or for a whole group with rewards that load a
    model; needs workers. Async rewards need none, and get at least 60 s then."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Address-space limit of each worker in MiB; workers of rewards that load a model have no
    limit."""


OptimizerName = Literal["adamw", "adamw_8bit"]
Schedule = Literal["constant", "linear", "cosine"]


class OptimizerSettings(Section):
    """AdamW and its learning rate."""

    name: OptimizerName = "adamw"
    """The optimizer; "adamw_8bit" stores its moments in 8 bits (extra `quant`)."""
    offload: bool = False
    """Keep master weights and moments of a model on a GPU in CPU memory."""
    learning_rate: NonNegative = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """Term added to the denominator for numerical stability."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    max_grad_norm: Positive | None = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. None disables clipping."""
    warmup_steps: Whole = 0
    """Optimizer steps of the linear warm-up of the learning rate."""
    schedule: Schedule = "constant"
    """Learning-rate schedule after the warm-up."""
    final_fraction: Share = 0.0
    """Final learning rate of "linear" and "cosine", as a fraction of the peak."""
    reset_every: Whole = 0
    """Steps between resets of AdamW's moments; 0 never resets them."""


class UpdateSettings(Section):
    """How a batch of rollouts is divided into optimizer steps and microbatches."""

    tokens_per_microbatch: Annotated[Count, FREE] = 2048
    """Tokens per forward pass, prompts included; up to 1.5 times as many if the completions of a
    prompt would otherwise be split. Larger values need more memory and use a large GPU better, but
    are no faster on a CPU."""
    epochs: Count = 1
    """Passes over each batch of rollouts."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    proximal: Literal["learner", "sampler"] = "learner"
    """Probabilities against which ratios are clipped: the learner's at the start of the update
    (`algorithm.correction` then weights tokens by what separates them from the sampler's), or those
    of the sampler, which saves a pass over the batch where it has several optimizer steps."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """Recompute activations in the backward pass to save memory."""
    skip_zero_rows: Annotated[bool, FREE] = True
    """Skip completions that contribute nothing to the gradient; the result is the same."""
    share_equal_rows: Annotated[bool, FREE] = False
    """Compute equal completions of a prompt once; the gradient is the same within rounding."""
    router_aux_loss: NonNegative = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts, over the tokens of an update;
    0 leaves it out."""


class CheckpointSettings(Section):
    """When checkpoints are written and which are kept."""

    every_steps: Whole = 0
    """Steps between checkpoints; 0 uses `every_minutes` only."""
    every_minutes: Minutes | None = 5.0
    """Minutes between checkpoints; None uses `every_steps` only."""
    keep_last: Count = 2
    """Number of recent checkpoints to keep; the best one is kept too with
    `evaluation.keep_best`."""
    keep_every: Whole = 0
    """Never delete checkpoints at multiples of this number of steps; 0 disables this."""


class EvaluationSettings(Section):
    """Evaluation on held-out prompts during training."""

    every_steps: Whole = 0
    """Steps between evaluations after the first step; 0 evaluates only after the last one."""
    at_start: bool = True
    """Whether RL training begins with an evaluation of the initial model, to compare later ones
    with. Training on data always does."""
    prompts: Count = 200
    """Number of held-out prompts; the same ones in every evaluation."""
    samples: Count = 8
    """Completions per prompt for sampled accuracy and pass@k; greedy accuracy is always
    measured."""
    keep_best: bool = True
    """Keep the model of the best evaluation as well as the last one."""
    validation: Whole = 0
    """Number of training prompts set aside to select the best model; 0 selects on the held-out
    prompts, which makes the best model's figures too optimistic."""
    patience: Whole = 0
    """Stop after this many consecutive evaluations without a new best; 0 never stops."""


class LoggingSettings(Section):
    """What a run records."""

    rollouts_every: Whole = 10
    """Steps between files with complete rollouts, and between tables of completions that trackers
    receive; 0 writes none."""
    trackers: Names = ()
    """Experiment trackers that also receive every metric: "tensorboard" and "wandb" (extra
    `trackers`), "mlflow" (extra `mlflow`)."""


class AlertsSettings(Section):
    """Threshold of each alert; None disables it. Shares lie between 0 and 1."""

    patience: Count = 3
    """Consecutive steps beyond a threshold before its alert fires."""
    equal_rewards: NonNegative | None = 1e-8
    """Fires when the standard deviation of a step's rewards is at or below this value."""
    no_signal: Share | None = 0.9
    """Fires when the share of groups whose rewards are all equal exceeds this value."""
    length_growth: Positive | None = 3.0
    """Fires when the mean length, relative to the first steps, exceeds this factor."""
    truncated: Share | None = 0.5
    """Fires when the share of truncated completions exceeds this value."""
    entropy: Share | None = 0.1
    """Fires when the entropy, relative to the first steps, is at or below this value."""
    kl: NonNegative | None = 1.0
    """Fires when KL(π‖π_ref), in nats per token, exceeds this value."""
    parts_against: Annotated[float, Field(ge=-1, le=1)] | None = -0.5
    """Fires when the correlation of two reward components within groups is at or below this
    value."""
    sampler_gap: NonNegative | None = 0.02
    """Fires when learner and sampler differ by more than this in nats per token."""
    unmoved_parameters: Share | None = 0.0
    """Fires when the share of parameters that the second step did not change exceeds this value."""
    duplicates: Share | None = 0.8
    """Fires when the share of duplicate completions exceeds this value; groups that are entirely
    correct do not count."""
    hacking: NonNegative | None = 0.05
    """Fires when held-out accuracy falls by more than this while the training reward rises."""
    not_judged: Share | None = 0.1
    """Fires when the share of completions that could not be judged exceeds this value."""


class GuardsSettings(Section):
    """Handling of bad steps."""

    max_bad_steps: Count = 3
    """Stop after this many consecutive steps without a finite gradient or without any judged
    completion."""
    spike: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Roll back to the last checkpoint and skip the batches since then when the gradient norm
    exceeds the usual one by this factor; None never rolls back."""
    rollbacks: Whole = 3
    """Stop after this many rollbacks."""
    silent_rewards: Literal["stop", "say"] = "stop"
    """Whether to stop, or to warn and continue ("say"), if the rewards of the first three batches
    are all equal or mostly missing."""


class WatchdogSettings(Section):
    """Time limit for a run that makes no progress."""

    limit_minutes: Minutes = 30.0
    """Minutes without progress, or ten times the longest wait so far if that is longer."""
    stop: bool = True
    """End the run (its checkpoints are kept); False only reports what the run is waiting for."""

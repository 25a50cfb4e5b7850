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
    """A low-rank adapter (LoRA) that is trained in place of the weights."""

    rank: Count = 16
    """Rank of the update of each matrix."""
    alpha: Positive = 32.0
    """Scale of the update; it is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that is dropped while training."""
    targets: Names = ("all-linear",)
    """Modules that get an adapter, by name; "all-linear" is every linear layer but the head."""


class ModelSettings(Section):
    """The policy, and what it is kept close to."""

    path: Location = "bundled"
    """Hub name, folder in Hugging Face form, or a small model in the package: "bundled", or
    "bundled:search", which searches."""
    revision: Name | None = None
    """Commit, tag or branch of a hub name; a commit stays the same for ever."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the computation; the weights that are trained are kept in float32."""
    trust_remote_code: Annotated[bool, RUNS_CODE] = False
    """Whether Python code that comes with the model may run."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of `transformers`, for models that cannot be attended group by group."""
    head_dtype: Literal["model", "float32"] = "model"
    """Number format in which sampler and learner compute logits; "model" is the model's own."""
    kernels: Literal["auto", "torch"] = "auto"
    """What computes: the fastest kernels that machine and model allow ("auto"), or PyTorch."""
    reference: Literal["auto", "none", "frozen"] = "auto"
    """The model of the KL term: kept where the algorithm needs it ("auto"), always, or never."""
    reference_every: Whole = 0
    """Steps after which the reference becomes the policy of that step; 0 keeps the first one."""
    adapter: AdapterSettings | None = None
    """Train a low-rank adapter; None trains every weight."""
    quantization: Literal["nf4"] | None = None
    """Hold the frozen weights in 4 bits; needs an adapter and the extra `quant`."""


class DataSettings(Section):
    """Where prompts come from and how the model sees them."""

    train: Location = "word_problems"
    """File (.jsonl, .json, .csv, .parquet), folder, hub name, or the generator "word_problems"."""
    eval: Annotated[Location | None, FREE] = None
    """Held-out prompts, in the same forms; None takes `train` with `eval_split`."""
    subset: str | None = None
    """Configuration of a hub data set, such as "main"."""
    revision: Name | None = None
    """Commit, tag or branch of a hub data set; a commit stays the same for ever."""
    train_split: Name = "train"
    """Split to train on, of a hub data set or a generator."""
    eval_split: Annotated[Name, FREE] = "test"
    """Split to evaluate on, of a hub data set or a generator."""
    prompt_column: Name = "prompt"
    """Column with the question as text, or with chat messages."""
    answer_column: Name | None = None
    """Column with the reference answer; None takes "answer" where there is one."""
    id_column: Name | None = None
    """Column with ids that stay the same; None makes them of the content."""
    answer_style: Name = "plain"
    """How the answer is written: "plain", "gsm8k" (after the last ####), "boxed"."""
    system: str | None = None
    """System message in front of every question."""
    wording: str | None = None
    """The question made of several columns: "{context} {question}"; replaces `prompt_column`."""
    chat: bool = True
    """Put questions through the chat template; False gives them to the model as they are."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the chat template, such as enable_thinking = false; the model keeps them."""
    max_prompt_tokens: Count | None = None
    """Most tokens of a prompt; None is what the context leaves beside `sampling.max_tokens`."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of longer prompts: the run is refused, or they are left out and counted."""
    limit: Count | None = None
    """Use only this many of the training prompts; None uses all."""
    sources: Annotated[tuple[SourceSettings, ...], Field(strict=False)] = ()
    """Several sources of training prompts with their shares, in place of `train`."""
    order: OrderSettings = OrderSettings()
    """In which order training prompts are drawn."""
    transforms: Names = ()
    """Changes of every prompt: "target_length(low=100, high=4000)"."""


class AlgorithmSettings(Section):
    """One row of the table of algorithms, and what is changed in it."""

    name: Name = "softrank"
    """Row of the table: `groupwise algorithms` prints it."""
    advantage: dict[str, Any] = {}
    """Settings of the advantage; "name" replaces the function. So for every slot below. "rms"
    scales the advantages of every batch to that root mean square."""
    ratio: dict[str, Any] = {}
    """Settings of the importance ratio."""
    surrogate: dict[str, Any] = {}
    """Settings of the surrogate, such as clip ranges."""
    divergence: dict[str, Any] = {}
    """The KL term: its name, "coefficient", and "in" ("loss" or "reward")."""
    correction: dict[str, Any] = {}
    """Settings of the correction of the gap between sampler and learner."""
    weighting: dict[str, Any] = {}
    """Settings of the weights that sum token losses to the loss."""
    filter: dict[str, Any] = {}
    """Settings of the filter of groups."""
    entropy: float | None = None
    """Coefficient of the entropy bonus in the loss; None keeps the row's own."""
    max_draws: Count = 10
    """Dynamic sampling gives up filling a batch after drawing this many batches of prompts."""

    def overrides(self) -> dict[str, dict[str, Any]]:
        """The slots that this section changes."""
        slots = type(self).model_fields.keys() - {"name", "entropy", "max_draws"}
        changes = {slot: dict(getattr(self, slot)) for slot in sorted(slots) if getattr(self, slot)}
        if self.entropy is not None:
            changes["entropy"] = {"coefficient": self.entropy}
        return changes


class Sampling(Section):
    """How completions are drawn. The defaults sample the untruncated distribution."""

    max_tokens: Count = 256
    """Longest completion, in tokens."""
    temperature: NonNegative = 1.0
    """Logits are divided by it, in the sampler and in the learner; 0 is greedy, and training needs
    a positive one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the most probable tokens up to this mass; 1 keeps all."""
    top_k: Whole = 0
    """Keep this many of the most probable tokens; 0 keeps all."""
    min_p: Share = 0.0
    """Drop tokens less probable than this share of the most probable one."""
    stop: Names = ()
    """Strings that end a completion where they first appear in its text; the tokens that complete
    them are kept."""


class EngineSettings(Section):
    """What makes the completions."""

    name: Literal["group", "generate", "vllm"] = "group"
    """"group" shares each prompt among its completions, "generate" is the model's own, and "vllm"
    is vLLM, which the settings below are about."""
    max_rows: Annotated[Count, FREE] = 128
    """Completions that are written at the same time."""
    server: Annotated[Name | None, FREE] = None
    """Address of a vLLM server that is running, such as "http://127.0.0.1:8000"."""
    python: Annotated[Location | None, RUNS_CODE] = None
    """Interpreter of another environment to start a vLLM server from, such as
    ".venv-vllm/bin/python"; None, with no server either, runs vLLM in this process."""
    weights: Annotated[Literal["auto", "adapter", "reload", "restart"], FREE] = "auto"
    """How new weights get to vLLM: read while it runs, or by a new start; "auto" takes the first
    way that a trial shows to work."""
    arguments: Annotated[Names, FREE] = ()
    """Further arguments of `vllm serve`, such as ["--tensor-parallel-size", "2"]."""
    memory_share: Annotated[Annotated[float, Field(gt=0, le=1)], FREE] = 0.3
    """Share of the memory that vLLM takes, if it is started here."""
    sleep: Annotated[bool, FREE] = False
    """Whether vLLM gives its memory back while the model learns (graphics cards only)."""
    canary_limit: Annotated[Positive, FREE] = 0.1
    """After new weights, the run stops where vLLM's log-probabilities of known tokens differ from
    the learner's by more than this on average, in nats."""
    patience_minutes: Annotated[Minutes, FREE] = 5.0
    """Minutes to wait for a vLLM server that does not answer."""

    @property
    def patience_s(self) -> float:
        """The same in seconds."""
        return 60 * self.patience_minutes


class EnvironmentSettings(Section):
    """What answers a model that calls a tool in the middle of its completion: a registered
    function, its settings as more keys, and budgets."""

    model_config = ConfigDict(extra="allow")

    name: Name
    """Name of the environment."""
    layout: Literal["inline", "turns"] = "inline"
    """Where replies stand: in the turn of the model ("inline"), or in turns of their own, between
    what the chat template puts around a reply."""
    max_result_tokens: Count = 256
    """Tokens of one reply; the rest of a result is cut inside its tags."""
    max_injected_tokens: Count = 1024
    """Tokens of all replies in a completion; one for which there is no room ends the completion."""
    workers: Annotated[Count, FREE] = 8
    """Calls that run at the same time."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 30.0
    """Seconds after which a call is given up; its completion is then not judged."""

    @property
    def settings(self) -> dict[str, Any]:
        """Every other key: keyword-only parameters of the function."""
        return dict(self.model_extra or {})


class RewardSettings(Section):
    """One part of the reward: a registered function, its weight, and its settings as more keys."""

    model_config = ConfigDict(extra="allow")

    name: Name
    """Name of the reward."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this part in the total."""
    label: Name | None = None
    """Name in the logs; None takes the name of the reward."""
    optional: bool = False
    """Whether a completion that this part cannot judge is judged by the others."""
    correct: bool | None = None
    """Whether its value is raw correctness; None takes the first part that is a verifier."""

    @property
    def settings(self) -> dict[str, Any]:
        """Every other key: keyword-only parameters of the function."""
        return dict(self.model_extra or {})


class RewardPoolSettings(Section):
    """Where rewards run, and when one is given up."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Worker processes; 0 judges in the trainer's own process, where nothing can be killed. A
    `reward_model` has a worker of its own either way."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 10.0
    """Seconds after which judging one completion is given up (needs workers)."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Address space of each worker, in MiB; a reward model's is not limited."""


OptimizerName = Literal["adamw", "adamw_8bit"]
Schedule = Literal["constant", "linear", "cosine"]


class OptimizerSettings(Section):
    """AdamW and its learning rate."""

    name: OptimizerName = "adamw"
    """The optimiser; "adamw_8bit" holds its moments in 8 bits (extra `quant`)."""
    offload: bool = False
    """Keep float32 weights and moments of a model on a card in the memory of the CPU."""
    learning_rate: NonNegative = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Decay of the running means of gradient and squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the squared gradient's mean."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay, multiplied by the learning rate."""
    max_grad_norm: Positive | None = 1.0
    """Gradients of a larger norm are scaled down to it; None scales none."""
    warmup_steps: Whole = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = "constant"
    """How the learning rate falls after warm-up."""
    final_fraction: Share = 0.0
    """Share of the peak that "linear" and "cosine" end at."""
    reset_every: Whole = 0
    """Steps after which the running means of AdamW begin anew; 0 never resets them."""


class UpdateSettings(Section):
    """How a batch of rollouts becomes optimiser steps."""

    tokens_per_microbatch: Annotated[Count, FREE] = 2048
    """Tokens, prompts included, that go through the model at once, or up to half again as many
    where the answers to one prompt would be split; more of them take memory and keep a large card
    busy, a CPU is no faster with more."""
    epochs: Count = 1
    """Passes over each batch of rollouts."""
    minibatches: Count = 1
    """Optimiser steps per pass."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """Compute activations twice to hold fewer of them."""
    skip_zero_rows: Annotated[bool, FREE] = True
    """Leave out completions that no term of the loss depends on; the gradient is the same."""
    share_equal_rows: Annotated[bool, FREE] = False
    """Compute equal completions of a prompt once; the gradient is the same within rounding."""


class PretrainingSettings(Section):
    """Training of the critic alone, on Monte-Carlo returns of the policy as it starts."""

    batches: Count = 50
    """Most batches of rollouts; each has `prompts_per_step` · `group_size` completions."""
    epochs: Count = 1
    """Passes over each batch."""
    minibatches: Count = 4
    """Optimiser steps per pass."""
    learning_rate: Positive = 1e-3
    """Peak learning rate; a cosine leads from it to a tenth of it."""
    explained_variance: Share | None = None
    """Stop once the last five batches, before they are learned from, reach this on average; None
    trains on all batches."""


class CriticSettings(Section):
    """The critic of an algorithm whose advantages need values."""

    model: Location | None = None
    """Hub name or folder, also of a classifier with one label; None copies the policy as it
    starts."""
    adapter: AdapterSettings | None = None
    """Train a low-rank adapter and the head; None trains every weight."""
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """The critic's own AdamW and learning rate."""
    loss: dict[str, Any] = {"name": "squared"}
    """Registered value loss, "squared" or "clipped", and its settings."""
    lam: Share = 1.0
    """λ of the returns that it learns; with 1 they are Monte-Carlo returns, and the values come
    from its first update at no further cost."""
    epochs: Count = 1
    """Passes over each batch of rollouts."""
    minibatches: Count = 1
    """Optimiser steps per pass."""
    bootstrap: bool = False
    """Whether its value follows the last token of a truncated completion; otherwise 0 does."""
    freeze_policy_steps: Whole = 0
    """Steps at the start that train the critic alone."""
    pretraining: PretrainingSettings | None = None
    """Training of the critic before the first step; None starts with values of 0."""


class DistributedSettings(Section):
    """A run in several processes, started by `torchrun`."""

    sharding: Literal["auto", "none", "full"] = "auto"
    """Whether every process holds the whole model ("none") or a part of weights, gradients and
    moments ("full", FSDP2); "auto" shards a model that would fill more than half of a card."""
    timeout_minutes: Minutes = 10.0
    """Minutes that processes wait for each other before the run ends and names the missing ones."""

    @property
    def timeout_s(self) -> float:
        """The same in seconds."""
        return 60 * self.timeout_minutes


class ClusterSettings(Section):
    """A run on a Ray cluster (extra `ray`): ranks that learn and replicas that sample."""

    address: Name | None = None
    """Address of a cluster, such as "10.0.0.1:6379" or "auto"; None starts one on this machine."""
    ranks: Count = 1
    """Processes that share the update."""
    replicas: Count = 1
    """Processes that sample, each with its own copy of the model."""
    rank_cpus: Count = 1
    """CPUs of each rank."""
    rank_gpus: Annotated[float, Field(ge=0, le=8)] = 0.0
    """GPUs of each rank."""
    replica_cpus: Count = 1
    """CPUs of each replica."""
    replica_gpus: Annotated[float, Field(ge=0, le=8)] = 0.0
    """GPUs of each replica."""
    restarts: Whole = 3
    """How often the run goes on from its checkpoint after a rank was lost."""


class CheckpointSettings(Section):
    """When a run can be resumed from."""

    every_steps: Whole = 0
    """Steps between checkpoints; 0 writes them by time only."""
    every_minutes: Minutes | None = 5.0
    """Minutes between checkpoints; None writes them by steps only."""
    keep_last: Count = 2
    """Older checkpoints are deleted, but for the best one where `evaluation.keep_best`."""
    keep_every: Whole = 0
    """Checkpoints at multiples of so many steps are never deleted; 0 keeps none for that."""


class EvaluationSettings(Section):
    """Measurements on held-out prompts while training."""

    every_steps: Whole = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    at_start: bool = False
    """Evaluate the base model too, before the first step, to compare the others with."""
    prompts: Count = 200
    """Held-out prompts, the same ones every time."""
    samples: Count = 8
    """Completions per prompt for sampled accuracy and pass@k; greedy is measured beside it."""
    keep_best: bool = True
    """Keep the model of the best evaluation as well as the last one."""
    validation: Whole = 0
    """Training prompts that are kept apart to choose the best model on; 0 chooses on the held-out
    ones, which then flatter it."""
    patience: Whole = 0
    """End the run after this many evaluations in a row without a new best; 0 never ends it."""


class LoggingSettings(Section):
    """What a run writes down."""

    rollouts_every: Whole = 10
    """Steps between files of complete rollouts; 0 writes none."""
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)
    ] = ()
    """Experiment trackers that get every metric too (extra `trackers`)."""


class AlertsSettings(Section):
    """Threshold of each alert; None switches it off. Shares are of 1."""

    patience: Count = 3
    """Consecutive steps beyond a threshold before its alert fires."""
    equal_rewards: NonNegative | None = 1e-8
    """Spread (standard deviation) of all rewards of a step, at or below."""
    no_signal: Share | None = 0.9
    """Share of groups whose rewards are all equal, above."""
    length_growth: Positive | None = 3.0
    """Mean length over that of the first steps, above."""
    truncated: Share | None = 0.5
    """Share of completions that ran out of tokens, above."""
    entropy: Share | None = 0.1
    """Share of the entropy of the first steps, at or below."""
    kl: NonNegative | None = 1.0
    """KL(π‖π_ref) in nats per token, above."""
    parts_against: Annotated[float, Field(ge=-1, le=1)] | None = -0.5
    """Correlation of two parts of the reward within groups, at or below."""
    sampler_gap: NonNegative | None = 0.02
    """Difference of log-probabilities of learner and sampler in nats per token, above."""
    unmoved_parameters: Share | None = 0.0
    """Share of parameters that the second step with a gradient did not move, above."""
    duplicates: Share | None = 0.8
    """Share of completions that repeat another of their group, where it is not all right, above."""
    hacking: NonNegative | None = 0.05
    """Fall of held-out accuracy while the training reward rises, above."""
    not_judged: Share | None = 0.1
    """Share of completions without a verdict, above."""


class GuardsSettings(Section):
    """Handling of bad steps."""

    max_bad_steps: Count = 3
    """Stop after this many consecutive steps without a finite gradient, or without any verdict."""
    spike: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """A gradient norm this many times the usual one rolls back to the last checkpoint and skips the
    batches since then; None never rolls back."""
    rollbacks: Whole = 3
    """Stop after this many of them."""
    silent_rewards: Literal["stop", "say"] = "stop"
    """Whether a run stops, or warns and continues, when the rewards of its first three batches are
    all equal or mostly missing."""


class WatchdogSettings(Section):
    """How long a run waits for anything before it says what it waits for."""

    limit_minutes: Minutes = 30.0
    """Minutes without progress; ten times the longest wait so far where that is more."""
    stop: bool = True
    """End the run then (its checkpoints stay); False only reports and goes on waiting."""

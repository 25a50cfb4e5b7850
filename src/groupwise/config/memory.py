"""Peak memory of a run, computed before anything is loaded.

The model is built from fake tensors, which have shapes but no content. The largest step of the
rollout and of the update runs on it with the code of a real run, and the sizes of all tensors alive
at the same time are added up, those that kernels allocate included (`Backend.shapes_only`).
Fragmentation, and buffers inside operators, are not included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from groupwise.algorithms import BoundAlgorithm, bind
from groupwise.config import Config, build
from groupwise.config.connect import best_device, reference_kind
from groupwise.config.data import has_eval
from groupwise.config.dry_run import (
    microbatches,
    place_without_content,
    rollout_bytes,
    update_bytes,
)
from groupwise.errors import UsageError
from groupwise.kernels import active
from groupwise.models.adapters import new_adapter
from groupwise.models.loading import DTYPES, configuration
from groupwise.rollouts.limits import slots_for
from groupwise.settings import SELF, SecondLearnerSettings
from groupwise.types import Limits
from groupwise.updates import MasterOptimizer
from groupwise.updates.learner import recompute_activations
from groupwise.updates.masters import master_of

GIB = 2**30
PROMPT = 256
"""Assumed tokens of a prompt if `data.max_prompt_tokens` is not set."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per 4-bit weight: the weight, an 8-bit scale per 64 weights, a 32-bit scale per 256
scales."""
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Bytes per trained weight for the two moments."""


def size_text(size: float) -> str:
    """An amount of memory as people read it.

    Example:
        >>> size_text(3 * 2**30), size_text(5 * 2**20)
        ('3.00 GiB', '5 MiB')
    """
    return f"{size / GIB:.2f} GiB" if size >= GIB / 2 else f"{size / 2**20:.3g} MiB"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run in bytes.

    Attributes:
        held: memory that is allocated all the time, by name.
        rollout, update: what the two phases of a step need in addition at their peaks; empty if the
            model does not support grouped attention.
        prompt: assumed tokens of a prompt.
        parameters, trained: number of all and of trained parameters.
    """

    held: Mapping[str, int]
    rollout: Mapping[str, int]
    update: Mapping[str, int]
    prompt: int
    parameters: int
    trained: int

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        update = sum(self.update.values()) >= sum(self.rollout.values())
        return "update" if update else "rollout"

    @property
    def peak(self) -> int:
        """Peak memory."""
        return sum(self.held.values()) + sum(getattr(self, self.phase).values())

    def __str__(self) -> str:
        parts = {**self.held, **getattr(self, self.phase)}
        largest = sorted(parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {size_text(size)}" for name, size in largest if size)
        whole = "" if self.update else "; rollouts and updates of this model are not included"
        return f"{size_text(self.peak)} at the peak, in the {self.phase} ({listed}){whole}"


@dataclass(frozen=True, kw_only=True)
class MemorySaving:
    """A setting that lowers the peak, and the plan with this setting."""

    setting: str
    value: Any
    plan: MemoryPlan

    @property
    def peak(self) -> int:
        return self.plan.peak

    def __str__(self) -> str:
        shown = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        return f"{self.setting} = {shown} ({size_text(self.peak)})"


UNPLANNED = (AttributeError, TypeError, ValueError, RuntimeError, KeyError)
"""Raised by models that do not support grouped attention."""


def memory_plan(config: Config, *, sizes: PretrainedConfig | None = None) -> MemoryPlan:
    """The peak memory of a run if every completion has the maximum length.

    Args:
        sizes: configuration of the model; None reads it from `model.path`, without the weights.

    Raises:
        UsageError: the model has no configuration.
    """
    sizes = sizes or _sizes(config)
    context = getattr(sizes.get_text_config(), "max_position_embeddings", None) or 1 << 30
    longest = config.data.max_prompt_tokens or PROMPT
    prompt = max(1, min(longest, context - config.sampling.max_tokens))
    candidates = microbatches(config, prompt=prompt)
    device = best_device()
    algorithm = bind(config.algorithm.name, config.algorithm.overrides())
    with torch.device("meta"):
        model = _model(config, sizes)
    with FakeTensorMode() as mode, device:
        place_without_content(model, device)
        plain = config.optimizer.model_copy(update={"name": "adamw", "offload": False})
        optimizer = MasterOptimizer(dict(model.named_parameters()), plain)
        held = _held(config, algorithm, model, optimizer)
        if (second := algorithm.second_learner) is not None:
            held[second] = _second_bytes(config, getattr(config, second), sizes)
        if config.distillation is not None and config.distillation.teacher != SELF:
            held["teacher"] = _teacher_bytes(config, config.distillation.teacher)
        rollout, update = {}, {}
        with suppress(*UNPLANNED):
            if config.engine.name != "vllm":  # That has memory of its own.
                limits = rollout_limits(config, prompt=prompt)
                rollout = rollout_bytes(config, model, limits=limits, device=device)
            masters = optimizer.masters.values()
            for laid, several in candidates:
                found = update_bytes(model, laid, several=several, mode=mode, device=device)
                step = {
                    "gradients": sum(0 if m.grad is None else m.grad.nbytes for m in masters),
                    "weights and gradients of a step": optimizer.step_bytes(config.optimizer.name),
                }
                both = (found, step) if _steps_here(config) else (found,)
                update = max(update, *both, key=lambda parts: sum(parts.values()))
                optimizer.clear()
    if rollout and config.engine.name == "group":
        rollout["laid-out weights"] = _laid_out(config, model)
        if update and config.streaming is not None and config.cluster is None:
            # Completions wait in the cache during the update.
            update |= {name: size for name, size in rollout.items() if name != "buffers"}
    if update and config.model.quantization is not None:
        update["a matrix of more than 4 bits"] = max(
            layer.weight.nbytes for layer in _four_bit(model)
        )
    return MemoryPlan(
        held=held,
        rollout=rollout,
        update=update,
        prompt=prompt,
        parameters=model.num_parameters(),
        trained=sum(p.numel() for p in optimizer.parameters.values()),
    )


def rollout_limits(config: Config, *, prompt: int) -> Limits:
    """The shapes of the largest rollout, of a step's or of an evaluation's, with prompts of at most
    `prompt` tokens. An evaluation may have many more prompts than a step."""
    tools, rows = config.environment, config.engine.max_rows
    length = config.sampling.max_tokens + (tools.max_injected_tokens if tools else 0)
    batches = 1 if config.streaming is None else config.streaming.max_staleness + 1
    asked = [(config.group_size, batches * config.prompts_per_step)]
    if has_eval(config):
        asked += [(group, config.evaluation.prompts) for group in (1, config.evaluation.samples)]
    shapes = [
        Limits(
            prompt=prompt,
            group=group,
            suffix=length,
            slots=(2 if tools else 1) * slots_for(max_rows=rows, group=group, prompts=prompts),
        )
        for group, prompts in asked
    ]
    return max(shapes, key=lambda limits: limits.slots * (prompt + limits.group * length))


def _sizes(config: Config) -> PretrainedConfig:
    """The configuration of the model to train."""
    model = config.model
    return configuration(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def memory_savings(config: Config, *, room: float = 0.0) -> Iterator[MemorySaving]:
    """Settings that make a run smaller, each on top of those before it, until it fits into `room`
    bytes. Those that change no result come first."""
    sizes = _sizes(config)
    peak = memory_plan(config, sizes=sizes).peak
    for setting, value in _candidates(config):
        if peak <= room:
            break
        try:
            smaller = _with(config, setting, value)
        except UsageError:
            continue  # It cannot be combined with the other settings.
        lower = memory_plan(smaller, sizes=sizes)
        if lower.peak < 0.98 * peak:
            yield MemorySaving(setting=setting, value=value, plan=lower)
            config, peak = smaller, lower.peak


def _candidates(config: Config) -> Iterator[tuple[str, Any]]:
    section = config.model
    yield "update.gradient_checkpointing", True
    for part in (2, 4, 8):
        yield "update.tokens_per_microbatch", max(1, config.update.tokens_per_microbatch // part)
    for part in (2, 4):
        yield "engine.max_rows", max(config.group_size, config.engine.max_rows // part)
    if best_device().type != "cpu":
        yield "optimizer.offload", True
    if section.dtype == "float32":
        yield "model.dtype", "bfloat16"
    if section.adapter is None:
        yield "optimizer.name", "adamw_8bit"
        yield "model.adapter", {"rank": 16}
    if section.quantization is None:
        yield "model.quantization", "nf4"


def _with(config: Config, path: str, value: Any) -> Config:
    """The configuration with one setting replaced."""
    section, name = path.split(".")
    values = config.model_dump()
    values[section][name] = value
    return build(values)


def _model(config: Config, sizes: PretrainedConfig) -> Any:
    """The model as it will be trained, without its data."""
    section = config.model
    model = AutoModelForCausalLM.from_config(
        sizes, dtype=DTYPES[section.dtype], trust_remote_code=section.trust_remote_code
    )
    if section.head_dtype != "model":
        model.config.head_dtype = section.head_dtype
    if section.adapter is not None:
        model = new_adapter(model, section.adapter)
    if config.update.gradient_checkpointing:
        recompute_activations(model, preserve_rng_state=False)
    return model


def _held(
    config: Config, algorithm: BoundAlgorithm, model: Any, optimizer: MasterOptimizer
) -> dict[str, int]:
    adapter = {n: p for n, p in model.named_parameters() if "lora_" in n}
    base = {n: p for n, p in model.named_parameters() if n not in adapter}
    weights = sum(p.nbytes for p in base.values())
    if config.model.quantization is not None:
        small = [layer.weight for layer in _four_bit(model)]
        weights += sum(math.ceil(p.numel() * NF4_BYTES) - p.nbytes for p in small)
    masters = [tensor for master in optimizer.masters.values() for tensor in master.held]
    trained = sum(p.numel() for p in optimizer.parameters.values())
    here = _steps_here(config)
    held = {
        "weights": weights,
        "adapter": sum(p.nbytes for p in adapter.values()),
        "float32 masters": here * sum(tensor.nbytes for tensor in masters),
        "moments": here * trained * MOMENT_BYTES[config.optimizer.name],
        "reference": 0,
    }
    kind = reference_kind(config, algorithm, model)
    if kind != "none":
        held["reference"] = weights if kind == "frozen" else held["adapter"]
    return held


def _steps_here(config: Config) -> bool:
    """Whether the optimizer works in the memory of the model."""
    return not config.optimizer.offload or best_device().type == "cpu"


def _second_bytes(config: Config, own: SecondLearnerSettings, sizes: PretrainedConfig) -> int:
    """Weights, masters and moments of a second learner; its updates are smaller than the policy's,
    which have logits, unless its model is larger."""
    if own.model is not None:
        sizes = configuration(own.model, trust_remote_code=config.model.trust_remote_code)
    sizes = copy.deepcopy(sizes)
    sizes.num_labels = 1
    with torch.device("meta"):
        model: Any = AutoModelForTokenClassification.from_config(
            sizes,
            dtype=DTYPES[config.model.dtype],
            trust_remote_code=config.model.trust_remote_code,
        )
        if own.adapter is not None:
            model = new_adapter(model, own.adapter, task="TOKEN_CLS")
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = sum(t.nbytes for p in trained for t in master_of(p, offload=False).held)
    moments = sum(p.numel() for p in trained) * MOMENT_BYTES[own.optimizer.name]
    return sum(p.nbytes for p in model.parameters()) + masters + moments


def _teacher_bytes(config: Config, path: str) -> int:
    """Weights of a teacher. It scores without gradients, which needs less beside them than an
    update of the policy does, unless its model is much larger."""
    trust = config.model.trust_remote_code
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            configuration(path, trust_remote_code=trust),
            dtype=DTYPES[config.model.dtype],
            trust_remote_code=trust,
        )
    return sum(parameter.nbytes for parameter in model.parameters())


def _laid_out(config: Config, model: Any) -> int:
    """Copies of weights in the layout of a rollout's kernels."""
    four = _four_bit(model) if config.model.quantization is not None else []
    return active().copied_bytes(model, four_bit=four)


def _four_bit(model: Any) -> list[torch.nn.Linear]:
    """The layers whose weights nf4 quantises: all linear layers except the head."""
    head = model.get_output_embeddings()
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and "lora_" not in name
    ]

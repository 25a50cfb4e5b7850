"""TRL's settings of vLLM, as those of the engine and of the correction."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from groupwise.errors import UsageError, suggest

if TYPE_CHECKING:
    from groupwise.integrations.trl.config import GRPOConfig

MODES = ("colocate", "server")
CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_icepop",
}
KINDS = ", ".join(f"{theirs}: {ours}" for theirs, ours in CORRECTIONS.items())
PLACE = ("vllm_server_host", "vllm_server_port")
OF_SERVER = ("vllm_server_base_url", *PLACE, "vllm_server_timeout")
ARGUMENTS = {
    "vllm_max_model_length": "--max-model-len",
    "vllm_model_impl": "--model-impl",
    "vllm_tensor_parallel_size": "--tensor-parallel-size",
}
"""Fields that become arguments of `vllm serve`."""
OF_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", *ARGUMENTS)
PREFIX = "vllm_importance_sampling_"
CLIPS = (f"{PREFIX}clip_min", f"{PREFIX}clip_max")
OF_CORRECTION = (f"{PREFIX}mode", *CLIPS)


def engine(args: GRPOConfig) -> dict[str, Any]:
    """The engine section: empty without vLLM.

    Raises:
        UsageError: an unknown mode, or a field that nothing would read.
    """
    if not args.use_vllm:
        fields = ("vllm_mode", *OF_SERVER, *OF_COLOCATED)
        _refuse_unread(args, fields, "is read with use_vllm = True alone")
        return {}
    if args.vllm_mode not in MODES:
        hint = suggest(str(args.vllm_mode), MODES)
        raise UsageError(f"GRPOConfig.vllm_mode = {args.vllm_mode!r}: no such mode; {hint}")
    if args.vllm_mode == "colocate":
        _refuse_unread(args, OF_SERVER, "is read with vllm_mode = 'server' alone")
        given = {ARGUMENTS[name]: value for name, value in _changed(args, ARGUMENTS)}
        return {
            "name": "vllm",
            "memory_share": args.vllm_gpu_memory_utilization,
            "sleep": args.vllm_enable_sleep_mode,
            "arguments": tuple(text for pair in given.items() for text in map(str, pair)),
        }
    _refuse_unread(args, OF_COLOCATED, "is for the one who starts the server to say")
    url = args.vllm_server_base_url
    if url is not None:
        _refuse_unread(args, PLACE, "vllm_server_base_url says it already")
    return {
        "name": "vllm",
        "server": url or f"http://{args.vllm_server_host}:{args.vllm_server_port}",
        "patience_minutes": args.vllm_server_timeout / 60,
    }


def correction(args: GRPOConfig) -> dict[str, Any]:
    """The correction of the gap between vLLM and the learner: the row's own, none, without vLLM.

        truncate: min(r, clip_max);  mask: r where clip_min ≤ r ≤ clip_max, else 0

    Raises:
        UsageError: an unknown mode, limits that do not fit it, or a field that nothing would read.
    """
    corrects = args.vllm_importance_sampling_correction
    if not (args.use_vllm and corrects):
        fields = OF_CORRECTION if args.use_vllm else (*OF_CORRECTION, f"{PREFIX}correction")
        reason = f"is read with use_vllm and {PREFIX}correction = True alone"
        _refuse_unread(args, fields, reason)
        return {}
    mode = args.vllm_importance_sampling_mode
    low, high = (getattr(args, name) for name in CLIPS)
    if mode not in CORRECTIONS:
        hint = suggest(str(mode), CORRECTIONS)
        raise UsageError(f"GRPOConfig.{PREFIX}mode = {mode!r}: no such mode; {hint}")
    if args.loss_type == "vespo":
        raise UsageError(
            f"GRPOConfig.{PREFIX}correction = True: loss_type = 'vespo' would include the ratio "
            "in its own weight, which is not supported; set it to False."
        )
    name = CORRECTIONS[mode]
    if mode.endswith("_mask"):
        return {
            "name": name,
            "low": low or 0.0,
            "high": sys.float_info.max if high is None else high,
        }
    if high is None or low is not None:
        raise UsageError(
            f"GRPOConfig.{PREFIX}mode = {mode!r}: truncates from above alone; set "
            f"{CLIPS[1]} and remove {CLIPS[0]}, or use a mode that masks."
        )
    return {"name": name, "cap": high}


def _changed(args: GRPOConfig, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Fields among these that are not at their default, with their values."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    values = {name: getattr(args, name) for name in names}
    return [(name, value) for name, value in values.items() if value != defaults[name]]


def _refuse_unread(args: GRPOConfig, names: Iterable[str], reason: str) -> None:
    for name, value in _changed(args, names):
        raise UsageError(f"GRPOConfig.{name} = {value!r}: {reason}; remove it.")

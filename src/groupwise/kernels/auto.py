"""The backend "auto": the fastest kernel for each operation that machine and tensors allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.kernels import adamw, cpu, gpu, gpu_attention, layers, log_softmax, onednn
from groupwise.kernels.build import compiled, shapes_only
from groupwise.kernels.decoder import CpuDecoder
from groupwise.kernels.decoding import decode_attention
from groupwise.kernels.four_bits import FourBits
from groupwise.kernels.gpu import reason
from groupwise.kernels.gpu_decoder import GpuDecoder
from groupwise.kernels.graphs import DecodingGraphs, GraphMemory
from groupwise.kernels.interface import (
    BACKENDS,
    COPY_LIMIT,
    Affine,
    Decoder,
    DecoderLayer,
    DecodeRows,
    LayerCache,
    Norm,
    SplitAdamW,
    Tree,
)
from groupwise.kernels.reference import Reference
from groupwise.kernels.tree_attention import tree_attention

CPP = layers.KINDS | {
    "matmul", "low_rank", "draw", "prefill_attention", "tree_attention", "decode_attention",
    "decoder", "gradient_norm", "log_softmax", "split_adamw",
}  # fmt: skip
GPU = ("triton", "triton_attention", "graphs")
"""Those for GPUs; attention of updates is a kernel by itself."""
KERNELS = CPP | {"onednn_layers", *GPU}
"""Names of the kernels, each of which can be turned off."""


class Auto(Reference):
    """Kernels where they can compute, the reference elsewhere. `Backend` documents the methods.

    Args:
        without: names of kernels that are not used, for measurements of what each one gains.
    """

    def __init__(self, *, without: Set[str] = frozenset()) -> None:
        if unknown := without - KERNELS:
            raise ValueError(f"unknown kernels: {', '.join(sorted(unknown))}")
        self.on = KERNELS - without
        self.graph_memory: dict[torch.device, GraphMemory] = {}

    def description(self, device: torch.device) -> str:
        if device.type == "cuda":
            return "+".join(name for name in GPU if name in self.on) or "torch"
        if device.type != "cpu":
            return "torch"
        used = ["cpp"] if self.on & CPP and compiled() is not None else []
        used += ["onednn"] if "onednn_layers" in self.on and onednn.dtypes() else []
        return "+".join(used) or "torch"

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return super().linear(x, weight) if recorded else self.matmul(x, weight.t())

    def _multiplies(self, left: Tensor, right: Tensor) -> bool:
        return "matmul" in self.on and (
            cpu.can_multiply(left, right) or cpu.can_multiply_in_tiles(left, right)
        )

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        if self._multiplies(left, right):
            return cpu.matmul(left, right)
        return super().matmul(left, right)

    def add_matmul(self, total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
        if self._multiplies(left, right):
            if total is None and left.dtype != torch.float32:
                total = left.new_zeros(len(left), right.shape[1], dtype=torch.float32)
            return cpu.matmul(left, right, onto=total)
        if gpu.can_add_matmul(total, left):
            return gpu.add_matmul(total, left, right)
        return super().add_matmul(total, left, right)

    def low_rank(
        self, x: Tensor, a: Tensor, b: Tensor, *, onto: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor]:
        rows = [x] if onto is None else [x, onto]
        if "low_rank" in self.on and cpu.can_use_low_rank(rows, [a, b]):
            return cpu.low_rank(x, a, b, onto=onto, scaling=scaling)
        return super().low_rank(x, a, b, onto=onto, scaling=scaling)

    def low_rank_gradient(self, inner: Tensor, x: Tensor, *, scaling: float) -> Tensor:
        if "low_rank" in self.on and cpu.can_use_low_rank([x], [inner]):
            return cpu.low_rank_gradient(inner, x, scaling=scaling)
        return super().low_rank_gradient(inner, x, scaling=scaling)

    def draw(self, logits: Tensor, uniform: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        if "draw" in self.on and cpu.can_use_cpu(logits):
            return cpu.draw_tokens(logits, uniform, temperature=temperature)
        if self._on_gpu(logits):
            try:
                return gpu.draw(logits, uniform, temperature=temperature)
            except Exception as error:
                self._without_triton(error, logits.device)
        return super().draw(logits, uniform, temperature=temperature)

    def selective_log_softmax(
        self, logits: Tensor, target: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if "log_softmax" in self.on and log_softmax.can_use_log_softmax(logits):
            return log_softmax.selective_log_softmax(logits, target, **how)
        if "triton" in self.on and gpu.can_use_log_softmax(logits):
            try:
                return gpu.selective_log_softmax(logits, target, **how)
            except Exception as error:
                self._without_triton(error, logits.device)
        return super().selective_log_softmax(logits, target, **how)

    def selective_log_softmax_backward_(
        self, logits: Tensor, target: Tensor, grad: Tensor, **how: Any
    ) -> None:
        if "log_softmax" in self.on and log_softmax.can_use_log_softmax(logits):
            log_softmax.selective_log_softmax_backward_(logits, target, grad, **how)
        elif "triton" in self.on and gpu.can_use_log_softmax(logits):
            gpu.selective_log_softmax_backward_(logits, target, grad, **how)
        else:
            super().selective_log_softmax_backward_(logits, target, grad, **how)

    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, length: int, **how: Any
    ) -> Tensor:
        if not self._attends("prefill_attention", query, key, value, **how):
            return super().causal_attention(query, key, value, length=length, **how)
        first = torch.arange(0, len(query), length)
        spans = torch.stack([first, torch.full_like(first, length), torch.full_like(first, -1)])
        return tree_attention(
            query, key, value, spans,
            prompts=len(first), scaling=how["scaling"], window=how["window"],
        )  # fmt: skip

    def tree_attention(
        self, tree: Tree, query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> Tensor:
        scaling, window, softcap = how["scaling"], how["window"], how["softcap"]
        if self._attends("tree_attention", query, key, value, **how):
            return tree_attention(
                query, key, value, tree.spans,
                prompts=len(tree.prompt_length), scaling=scaling, window=window,
            )  # fmt: skip
        if "triton_attention" in self.on and gpu_attention.can_use_gpu_attention(
            query, key, value, softcap=softcap, window=window
        ):
            try:
                return gpu_attention.gpu_tree_attention(
                    query, key, value, tree.spans, tree.blocks, **how
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # other strides may compile another kernel than the trial's
                self.on -= {"triton_attention"}
                gpu_attention.warn_unused(query.device, reason(error))
        return super().tree_attention(tree, query, key, value, **how)

    def decode_attention(
        self,
        rows: DecodeRows,
        layer: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **how: Any,
    ) -> Tensor:
        if self._attends("decode_attention", query, key, value, **how):
            scaling, window = how["scaling"], how["window"]
            return decode_attention(rows, layer, query, key, value, scaling=scaling, window=window)
        if rows.order is None and self._on_gpu(query, key, value, *layer.tensors()):
            try:
                return gpu.decode_attention(rows, layer, query, key, value, **how)
            except Exception as error:
                self._without_triton(error, query.device)
        if rows.recorded:
            raise RuntimeError("attention needs the lengths of completions on the CPU")
        return super().decode_attention(rows, layer, query, key, value, **how)

    def _on_gpu(self, *tensors: Tensor) -> bool:
        return "triton" in self.on and gpu.can_use_gpu(*tensors)

    def _without_triton(self, error: Exception, device: torch.device) -> None:
        """Leave Triton's kernels out from here on: other sizes may compile another one than the
        trial's."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.on -= {"triton"}
        gpu.warn_unused(device, reason(error))

    def _attends(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softcap: float | None,
        **_: Any,
    ) -> bool:
        return name in self.on and cpu.can_use_attention(query, key, value, softcap=softcap)

    def gradient_norm(self, grad: Tensor) -> Tensor:
        if "gradient_norm" in self.on and adamw.can_sum_squares(grad):
            return adamw.norm(grad)
        return super().gradient_norm(grad)

    def split_adamw(self, parameter: Tensor) -> SplitAdamW | None:
        on = "split_adamw" in self.on and adamw.can_step(parameter)
        return adamw.split_adamw if on else None

    def training_layers(self, model: nn.Module) -> AbstractContextManager[None]:
        devices = ("cpu", "cuda") if "triton" in self.on else ("cpu",)
        return layers.use_kernels(model, kinds=self.on & layers.KINDS, devices=devices)

    def inference_layers(self, model: nn.Module, *, rows: int) -> AbstractContextManager[None]:
        if any(p.is_cuda for p in model.parameters()):
            return self.training_layers(model)
        if "onednn_layers" not in self.on:
            return super().inference_layers(model, rows=rows)
        if torch.bfloat16 not in onednn.dtypes() and any(
            p.dtype == torch.bfloat16 for p in model.parameters()
        ):
            return layers.use_kernels(model, kinds=self.on & {"training_linear"})
        return onednn.reordered_layers(model, rows=rows)

    def shapes_only(self) -> AbstractContextManager[None]:
        return shapes_only()

    def copied_bytes(self, model: nn.Module, *, four_bit: Collection[nn.Module]) -> int:
        if "decoder" in self.on and compiled() is not None:
            copies = sum(
                math.ceil(layer.weight.numel() * FourBits.COPY_BYTES)
                if layer in four_bit
                else layer.weight.nbytes
                for layer in onednn.large_layers(model, cpu.TYPES)
            )
            if copies <= COPY_LIMIT:
                return copies
        if "onednn_layers" not in self.on:
            return 0
        layers = onednn.copied_layers(model, without=four_bit)
        return sum(layer.weight.nbytes for layer in layers)

    def decoder(
        self,
        layers: Sequence[DecoderLayer],
        *,
        norm: Norm,
        rotation: tuple[Tensor, Tensor],
        head: Affine | None,
    ) -> Decoder | None:
        if self._on_gpu(norm.weight):
            return GpuDecoder(layers, norm=norm, rotation=rotation, head=head)
        on_cpu = norm.weight.device.type == "cpu" and cpu.multiplies(norm.weight.dtype)
        if "decoder" not in self.on or not on_cpu:
            return None
        return CpuDecoder(layers, norm=norm, rotation=rotation, head=head)

    def replayed(
        self, hidden: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
    ) -> Callable[..., Tensor]:
        if not {"triton", "graphs"} <= self.on or not gpu.can_use_device(device, dtype):
            return hidden
        if device not in self.graph_memory:
            self.graph_memory[device] = GraphMemory(device)
        return DecodingGraphs(hidden, self.graph_memory[device])


BACKENDS["auto"] = Auto

"""Kernels for GPUs, compiled for an H100 without one: what an interpreter accepts, a compiler may
not, and a card has so much shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.kernels.gpu_attention import _sizes

pytest.importorskip("triton")
SHARED = 99 * 1024
"""Bytes of a consumer's card; an H100 has 227 KiB."""
TYPES = {
    **dict.fromkeys(("query", "key", "value", "out", "grad", "d_query", "logits"), "*bf16"),
    **dict.fromkeys(("d_keys", "d_values", "norms", "shares", "logp"), "*fp32"),
    **dict.fromkeys(("entropy", "entropies", "d_entropy"), "*fp32"),
    **dict.fromkeys(("of_block", "layout", "branches"), "*i32"),
    **dict.fromkeys(("scaling", "softcap", "temperature"), "fp32"),
    "target": "*i64",
}
"""Types of arguments; the others are whole numbers."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def shared_memory(kernel: Any, constants: dict[str, Any], **options: int) -> int:
    """What a program of the compiled kernel takes, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: TYPES.get(name, "i32") for name in kernel.arg_names}
    # As Triton finds pointers and strides in a run; only then are steps loaded ahead.
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith(("_row", "_head"))
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "given"), [(64, True), (128, False)])
@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
def test_attention_compiles_for_a_card(name: str, dim: int, given: bool) -> None:
    """With and without a window and a soft cap."""
    from groupwise.kernels import triton_attention

    sizes = _sizes(torch.bfloat16, dim)[name != "forward"]
    constants = {
        "dim": dim, "DIM": dim, "BLOCK": sizes.block, "STEP": sizes.step,
        "WINDOWED": given, "CAPPED": given, "PRECISION": "tf32",
    }  # fmt: skip
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    assert 0 < shared_memory(getattr(triton_attention, name), constants, **options) <= SHARED


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", ["log_softmax", "log_softmax_backward"])
def test_log_probabilities_compile_for_a_card(name: str, entropy: bool) -> None:
    from groupwise.kernels import triton_kernels

    constants = {"ENTROPY": entropy, "SIZE": 4096}
    assert shared_memory(getattr(triton_kernels, name), constants, num_warps=8) <= SHARED

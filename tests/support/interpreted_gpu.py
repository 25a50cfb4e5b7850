"""The kernels for GPUs on a CPU, where Triton interprets them, and the group engine with them; a
CUDA graph takes its step again when it is replayed. `python interpreted_gpu.py` prints what became
of the models of `CASES` and how far the kernels are from PyTorch.

Triton decides at its import whether it interprets, so tests start this in a process of its own.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config

from groupwise.kernels import (
    DecodeRows,
    GroupCache,
    Norm,
    Reference,
    auto,
    gpu,
    gpu_attention,
    graphs,
    using,
)
from groupwise.kernels.auto import CPP, Auto
from groupwise.kernels.graphs import GraphMemory
from groupwise.models import AdapterSettings, Policy, with_adapter
from groupwise.rollouts import GroupEngine
from groupwise.testing.engines import make_requests
from groupwise.types import Sampling
from tiny_models import NAMES, SHAPE, random_model, tiny_model, tiny_policy
from trees import GROUPS, attended, laid_out, tensors

EXACT = {torch.float32: 1e-5, torch.float16: 3e-3}
"""The error that is rounding, by dtype."""
ENDS = (1, 5, 9, 20, 21, 22, 23, 24, 25)


def _policy(name: str) -> Policy:
    return _distinct(tiny_model(name))


def _distinct(model: PreTrainedModel) -> Policy:
    """A policy whose norms and biases show in what it computes."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
    return tiny_policy(model, ends=ENDS)


def _adapted() -> Policy:
    """An adapter of a model that has all that fused steps know: norms of heads, biases, layers with
    and without a window."""
    config = Qwen3Config(
        **{**SHAPE, "num_hidden_layers": 2}, head_dim=8, attention_bias=True,
        use_sliding_window=True, sliding_window=9, max_window_layers=1,
    )  # fmt: skip
    policy = with_adapter(_distinct(random_model(config)), AdapterSettings(rank=2, alpha=4))
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    return policy


CASES: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: _policy(name) for name in NAMES},
    "adapter": _adapted,
}
INTERPRETED = ("gemma2", "adapter")
"""Together they have every part that the others have; an interpreter is slow."""


@dataclass
class Again:
    """In place of a CUDA graph."""

    step: Callable[[], Tensor]
    hidden: Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.hidden.copy_(self.step())


class Memory(GraphMemory):
    """Where there is no GPU: steps are computed again in place of being replayed."""

    def __init__(self, device: torch.device) -> None:
        self.beside = nullcontext
        self.works = True

    def record(self, step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        again = Again(step, step())
        return again, again.hidden


@contextmanager
def interpreted() -> Iterator[list[Again]]:
    """A context in which tensors of the CPU count as those of a GPU; the graphs made in it."""
    made: list[Again] = []

    class Counted(Memory):
        def record(self, step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
            graph, hidden = super().record(step)
            made.append(graph)
            return graph, hidden

    replacements: list[tuple[Any, str, Any]] = [
        (gpu, "can_use_device", lambda device, kind: kind in gpu.TYPES),
        (auto, "GraphMemory", Counted),
        (graphs, "FEWEST", 4),  # rows; an interpreter is slow
    ]
    with ExitStack() as stack:
        for holder, name, instead in replacements:
            stack.enter_context(patch.object(holder, name, instead))
        stack.enter_context(using(Auto(without=CPP)))
        yield made


def completions(policy: Policy) -> list[Any]:
    """Of prompts and completions of different lengths, more than fit at once."""
    engine = GroupEngine(policy, max_rows=4)
    sampling = Sampling(max_tokens=7, temperature=0.9)
    groups = sorted(engine.generate(make_requests(3, group=2), sampling), key=lambda g: g.prompt.id)
    return [one for group in groups for one in group.completions]


def compared(policy: Policy) -> dict[str, Any]:
    """The completions of a policy by the kernels against those of the reference."""
    with using(Reference()):
        wanted = completions(policy)
    with interpreted() as made:
        found = completions(policy)
        fused = GroupEngine(policy).calls is not None
    return {
        **differences(found, wanted),
        "fused": fused,
        "graphs": len(made),
        "replays": sum(graph.replays for graph in made),
    }


def differences(found: list[Any], wanted: list[Any]) -> dict[str, Any]:
    """How completions differ: their tokens, and log-probabilities up to the first other token."""
    gap, same = 0.0, True
    for one, two in zip(found, wanted, strict=True):
        for a, b, p, q in zip(one.tokens, two.tokens, one.logprobs, two.logprobs, strict=False):
            gap = max(gap, abs(p - q)) if a == b else gap
            if a != b:
                break
        same = same and list(one.tokens) == list(two.tokens)
    return {"same": same, "gap": gap, "lengths": len({len(one.tokens) for one in found})}


def attention_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of attention: heads of several sizes, windows, soft caps."""
    random, found = torch.Generator().manual_seed(0), {}

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, kind)

    sizes = ((14, 2, 64, None, None), (4, 4, 24, 5, None), (6, 2, 128, 70, 3.0))
    for heads, key_heads, dim, window, softcap in sizes:
        cache = GroupCache(
            slots=3, group=2, prompt_capacity=130, suffix_capacity=90,
            device=torch.device(device),
        )  # fmt: skip
        cache.prompt_length += torch.tensor([130, 7, 66], device=device)
        places = [[0, 0, 1, 2, 2], [0, 1, 1, 0, 1], [0, 80, 3, 64, 89]]
        slot, sample, time = torch.tensor(places, device=device)
        rows = DecodeRows(
            cache=cache, slot=slot, sample=sample, time=time, used=3, rows=2 * slot + sample,
            clock=0, prompt=130, suffix=90, aligned=False, in_step=False,
        )  # fmt: skip
        layer = cache.layer(0, some(1, key_heads, dim))
        for tensor in layer.tensors():
            tensor.copy_(some(*tensor.shape))
        given = [some(5, each, dim) for each in (heads, key_heads, key_heads)]
        # As layers of transformers hand them in: heads before rows.
        given = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in given]
        how: Any = {"scaling": 0.3, "window": window, "softcap": softcap}
        own = copy.deepcopy(layer)
        wanted = Reference().decode_attention(rows, layer, *given, **how)
        made = gpu.decode_attention(rows, own, *given, **how)
        assert all(map(torch.equal, own.tensors(), layer.tensors())), "keys are written"
        found[f"{heads}/{key_heads} x {dim}, {window}, {softcap}"] = _gap(made, wanted)
    return found


def tree_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of attention of packed groups, and of its gradients: all kinds of spans, with
    and without windows and soft caps."""
    found, names = {}, [*GROUPS]
    cases = [(2, 1, 32, None, None), (2, 2, 24, 70, 2.0)]
    if device == "cpu":  # where an interpreter is slow
        names.remove("equal")
        cases = cases if kind == torch.float32 else cases[1:]
    else:
        cases += [(6, 2, 32, 70, None), (14, 2, 64, None, None)]
        cases += [(4, 2, 128, None, 2.0), (2, 1, 256, None, None)]
    for name in names:
        spans = laid_out(GROUPS[name])
        for heads, key_heads, dim, window, softcap in cases:
            given = tensors(heads, key_heads, dim, int(spans[1].sum()))
            *wide, grad = (x.to(kind).double() for x in given)
            wide = [x.requires_grad_() for x in wide]
            exact = attended(*wide, spans, 0.3, window, softcap)
            wanted = [exact, *torch.autograd.grad(exact, wide, grad)]
            # As layers of transformers hand them in: heads before rows.
            own = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in wide]
            own = [x.to(device, kind).requires_grad_() for x in own]
            made = gpu_attention.gpu_tree_attention(
                *own, spans.to(device), {}, scaling=0.3, window=window, softcap=softcap
            )
            parts = [made, *torch.autograd.grad(made, own, grad.to(device, kind))]
            for what, one, two in zip(("out", "dq", "dk", "dv"), parts, wanted, strict=True):
                label = f"{name}: {heads}/{key_heads} x {dim}, {window}, {softcap}, {what}"
                found[label] = _gap(one.cpu(), two)
    return found


def far_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of attention whose scores are far below 0, where what lies beyond the last
    key has one of 0."""
    spans = laid_out([(5, [40])])
    query, key, value, grad = tensors(2, 2, 16, 45)
    far = (-4.5 * query.abs(), 4.5 * key.abs(), value)
    wide = [x.to(kind).double().requires_grad_() for x in far]
    exact = attended(*wide, spans, 1.0, None, None)
    wanted = torch.autograd.grad(exact, wide, grad.to(kind).double())
    own = [x.detach().to(device, kind).requires_grad_() for x in wide]
    made = gpu_attention.gpu_tree_attention(
        *own, spans.to(device), {}, scaling=1.0, window=None, softcap=None
    )
    parts = torch.autograd.grad(made, own, grad.to(device, kind))
    gaps = (_gap(one.cpu(), two) for one, two in zip(parts, wanted, strict=True))
    return dict(zip(("far dq", "far dk", "far dv"), gaps, strict=True))


def log_softmax_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of log-probabilities, entropies and gradients of logits. Most logits of the
    first row are infinitely small."""
    random, found = torch.Generator().manual_seed(0), {}
    for vocab in (7, 9000):
        logits = (5 * torch.randn(6, vocab, generator=random)).to(kind)
        logits[0, 3:] = float("-inf")
        logits[1, :-2] = float("-inf")  # a whole block and more
        target = torch.tensor([0, vocab - 1, 3, 1, 1, 1])
        grad, of_h = torch.randn(2, 6, generator=random)
        for temperature, entropy in ((1.0, False), (0.7, True)):
            wide = logits.double().requires_grad_()
            logs = (wide / temperature).log_softmax(-1)
            logp = logs.gather(1, target[:, None])[:, 0]
            h = -torch.where(logs.exp() > 0, logs.exp() * logs.clamp(min=-1e9), 0).sum(-1)
            (wanted,) = torch.autograd.grad((logp * grad + entropy * h * of_h).sum(), wide)
            own, at = logits.to(device), target.to(device)
            how = {"temperature": temperature}
            made, made_h, norm = gpu.selective_log_softmax(own, at, entropy=entropy, **how)
            for kept in (norm, None):
                changed = own.clone()
                both = None if made_h is None else (made_h, of_h.to(device))
                gpu.selective_log_softmax_backward_(
                    changed, at, grad.to(device), entropy=both, norm=kept, **how
                )
                name = f"{vocab}, {temperature}, {kept is None}"
                found[f"gradient, {name}"] = _gap(changed.cpu(), wanted)
                found[f"log-probability, {name}"] = _gap(made.cpu(), logp.detach())
                if made_h is not None:
                    found[f"entropy, {name}"] = _gap(made_h.cpu(), h.detach())
    return found


def trial_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors that the trials before first use find."""
    place = torch.device(device)
    with torch.inference_mode():
        found = {f"trial {n}": gap for n, gap in enumerate(gpu._gaps(place, kind))}
    cases = [(2, 90, 3.0), (2, None, None), (4, 90, 3.0)]
    if device == "cpu":  # where an interpreter is slow
        cases = cases[:1] if kind == torch.float32 else []
    for key_heads, window, softcap in cases:
        how = {"key_heads": key_heads, "window": window, "softcap": softcap}
        found[f"trial of attention, {how}"] = gpu_attention._gap(place, kind, 24, **how)
    return found


def layer_gaps(device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of norms and activations, and of their gradients."""
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, kind).requires_grad_()

    x, weight, added, grad = some(2, 25, 96), some(96), some(2, 25, 96), some(2, 25, 96)
    normed = F.rms_norm(x, (96,), weight, 1e-6)
    of_x, of_weight = torch.autograd.grad(normed, (x, weight), grad)
    gate, up, other = some(3, 5, 70), some(3, 5, 70), some(3, 5, 70)
    gated = F.silu(gate) * up
    of_gate, of_up = torch.autograd.grad(gated, (gate, up), other)
    with torch.no_grad():
        flat, more = x.flatten(0, 1), added.flatten(0, 1)
        total, after = gpu.add_norm(flat, more, Norm(weight=weight, eps=1e-6))
        pairs = {
            "norm": (gpu.rms_norm(x, weight, 1e-6), normed),
            "sum": (total, flat + more),
            "norm of sum": (after, F.rms_norm(flat + more, (96,), weight, 1e-6)),
            "swiglu": (gpu.swiglu(gate, up), gated),
        }
        with patch.object(gpu, "PARTS", 16):  # several rows for each
            of_norm = gpu.rms_norm_backward(x, weight, 1e-6, grad)
        of_swiglu = gpu.swiglu_backward(gate, up, other)
        pairs |= dict(zip(("dx", "dw"), zip(of_norm, (of_x, of_weight), strict=True), strict=True))
        pairs |= dict(
            zip(("dgate", "dup"), zip(of_swiglu, (of_gate, of_up), strict=True), strict=True)
        )
    return {name: _gap(one, two) for name, (one, two) in pairs.items()}


def draws(device: str) -> dict[str, float]:
    """Draws against those of float64: the share that is the same, and the errors of their
    log-probabilities. Half of the vocabulary has no probability, and its end has none."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 9000, generator=random)
    logits[:, 100:4200] = float("-inf")
    logits[:, 8999] = float("-inf")
    uniform = torch.rand(40, generator=random, dtype=torch.float64)
    uniform[0], uniform[1] = 0, 1 - 2**-53
    logits, uniform = logits.to(device), uniform.to(device)
    tokens, logp = gpu.draw(logits, uniform, temperature=0.7)
    wanted, exact = Reference().draw(logits.double(), uniform, temperature=0.7)
    spoilt = torch.full((1, 9000), float("nan"), device=device)
    token, nothing = gpu.draw(spoilt, uniform[:1], temperature=1.0)
    return {
        "same": (tokens == wanted).double().mean().item(),
        "gap": (logp - exact)[tokens == wanted].abs().max().item(),
        "possible": float(logp.isfinite().all()),
        "of NaN": float(bool(nothing.isnan().all()) and 0 <= int(token) < 9000),
    }


def _gap(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        # Triton does not interpret products of bfloat16.
        "attention": {str(kind): attention_gaps("cpu", kind) for kind in EXACT},
        "layers": {str(kind): layer_gaps("cpu", kind) for kind in EXACT},
        "trials": {str(kind): trial_gaps("cpu", kind) for kind in EXACT},
        "trees": {str(kind): tree_gaps("cpu", kind) for kind in EXACT},
        "far": {str(kind): far_gaps("cpu", kind) for kind in EXACT},
        "log-probabilities": {str(kind): log_softmax_gaps("cpu", kind) for kind in EXACT},
        "draws": draws("cpu"),
        "models": {case: compared(CASES[case]()) for case in INTERPRETED},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The update and the decoding step alone, and the machine's peaks, in one process."""

from __future__ import annotations

import time
from typing import Any

import torch
from allocations import peak, traced
from channel import Channel, Memory, versions
from policies import DTYPES, PACKAGES, batch_of, policy_of
from torch import nn

from groupwise.algorithms import bind
from groupwise.config import Config
from groupwise.kernels import active, onednn
from groupwise.models import Backbone
from groupwise.rollouts import GroupEngine
from groupwise.types import Prompt, Request, Sampling
from groupwise.updates import OptimizerSettings, TorchLearner, pack

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def seconds_of(function: Any) -> float:
    """Wall time of one call, the card's work included."""
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_peak(*, precision: str, size: int, tries: int = 5) -> float:
    """FLOP/s of the best of several square products, ours and, where it has fast ones, PyTorch's
    own."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPES[precision]) for _ in range(2))
    found = [seconds_of(lambda: active().linear(a, b)) for _ in range(tries)]
    if CUDA or precision == "float32" or torch.bfloat16 in onednn.dtypes():
        out = a @ b
        found += [seconds_of(lambda: torch.mm(a, b, out=out)) for _ in range(tries)]
    return 2 * size**3 / min(found)


def bandwidth(*, bytes_: int, tries: int = 5) -> float:
    """Bytes/s of the best of several copies; what is read and what is written both count."""
    source = torch.zeros(bytes_ // 4, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * bytes_ / min(seconds_of(lambda: target.copy_(source)) for _ in range(tries))


class Measured:
    """A policy with its learner and its engine, for one case."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.memory = Memory()
        self.spec = spec
        self.policy = policy_of(spec["model"], precision=spec["precision"], endless=True)
        self.policy.model.train()
        self.backbone = Backbone.of(self.policy.model)
        algorithm = bind("grpo@trl", {})
        self.objective = algorithm.objective
        self.learner = TorchLearner(
            self.policy,
            optimizer=OptimizerSettings(),
            tokens_per_microbatch=spec["tokens_per_microbatch"]
            or Config().update.tokens_per_microbatch,
        )
        generator = torch.Generator().manual_seed(0)
        rows = len(spec["prompts"]) * spec["group"]
        vocab = self.backbone.head.weight.shape[0]
        self.completions = torch.randint(
            vocab, (rows, spec["completion"]), generator=generator
        ).tolist()
        self.batch = batch_of(
            spec["prompts"],
            self.completions,
            advantage=torch.randn(rows, generator=generator),
        )

    def hello(self) -> dict[str, Any]:
        return {"versions": versions(*PACKAGES)}

    def peaks(self, *, size: int, bytes_: int) -> dict[str, float]:
        """What the machine can do at this moment, in this precision."""
        return {
            "flops": matmul_peak(precision=self.spec["precision"], size=size),
            "bandwidth": bandwidth(bytes_=bytes_),
        }

    def work(self) -> dict[str, Any]:
        """What must be computed at the least.

        update_flops = 6 · parameters of the layers' matrices · unique tokens
                     + 6 · parameters of the head · predicted tokens
        attention_flops = 12 · layers · heads · head dimension · pairs, of an update
        decode_flops = 2 · (both kinds of parameters) · rows, for one token of every row

        Unique tokens are those a layer must see: each prompt once, and every completion without its
        last token. A pair is a token and one that it attends to; attention has two products forward
        and four backward. Norms and the optimizer are not counted.
        """
        head = self.backbone.head.weight
        layers = sum(
            module.weight.numel()
            for module in self.backbone.decoder.modules()
            if isinstance(module, nn.Linear)
        )
        rows = torch.arange(len(self.batch.tokens))
        packed = pack(self.batch, rows, device=torch.device("cpu"))
        unique, predicted = len(packed.tokens), len(packed.target)
        return {
            "unique_tokens": unique,
            "predicted_tokens": predicted,
            "attention_flops": 12 * self._attended() * self._pairs(),
            "update_flops": 6 * layers * unique + 6 * head.numel() * predicted,
            "decode_flops": 2 * (layers + head.numel()) * len(rows),
            "decode_bytes": (layers + head.numel()) * head.element_size(),
        }

    def _attended(self) -> int:
        """Multiplications of a query with its keys in all layers, for one pair of tokens."""
        config = self.policy.model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers * config.num_attention_heads * dim

    def _pairs(self) -> int:
        """Pairs of a token and one that it attends to, in an update of the whole batch."""
        prompts = [len(prompt) for prompt in self.spec["prompts"]]
        given = self.spec["completion"] - 1
        branch = sum(given * prompt + given * (given + 1) // 2 for prompt in prompts)
        own = sum(prompt * (prompt + 1) // 2 for prompt in prompts)
        return own + self.spec["group"] * branch

    def update(self) -> dict[str, Any]:
        """One optimizer step."""
        self.memory.reset()
        stages: dict[str, float] = {}

        def go() -> None:
            stages.update(self.learner.update(self.batch, self.objective).seconds)

        seconds = seconds_of(go)
        return {"seconds": seconds, "stages": stages, "peak_mb": self.memory.peak()}

    def decode(self) -> dict[str, Any]:
        """Seconds of one token of every row: a whole rollout without its prefill, per token."""
        tokens = self.spec["completion"]
        self.memory.reset()
        whole, prefill = self._rollout(tokens + 1), self._rollout(1)
        stages = {"prefill": prefill, "decode": whole - prefill}
        return {
            "seconds": (whole - prefill) / tokens,
            "stages": stages,
            "peak_mb": self.memory.peak(),
        }

    def _rollout(self, tokens: int) -> float:
        group = self.spec["group"]
        engine = GroupEngine(self.policy, max_rows=len(self.completions))
        requests = [
            Request(prompt=Prompt(id=str(i), text=""), tokens=prompt, group=group)
            for i, prompt in enumerate(self.spec["prompts"])
        ]
        return seconds_of(lambda: list(engine.generate(requests, Sampling(max_tokens=tokens))))

    def logits_peak(self) -> dict[str, Any]:
        """Most memory that buffers with a row per token and a column per word held at one time.

        Every allocation of the step is followed, those inside operators too. A buffer counts when
        its size is a multiple of the vocabulary and it is neither the head's weight, nor its
        gradient, master or moment.
        """
        weight = self.backbone.head.weight
        vocab = weight.shape[0]
        others = {weight.numel() * size for size in (2, 4)}
        step: dict[str, Any] = {}
        found = traced(lambda: step.update(self.update()))
        logits = [
            (pointer, size)
            for pointer, size in found
            if size < 0 or (size % (2 * vocab) == 0 and size not in others)
        ]
        return {
            **step,
            "logits_peak_mb": peak(logits) / 2**20,
            "largest_buffer_mb": max(size for _, size in logits) / 2**20,
            "whole_logits_mb": len(self.completions) * self.spec["completion"] * vocab * 4 / 2**20,
        }


def main() -> None:
    channel = Channel()
    measured = Measured(channel.spec)
    names = ("hello", "peaks", "work", "update", "decode", "logits_peak")
    channel.serve({name: getattr(measured, name) for name in names})


if __name__ == "__main__":
    main()

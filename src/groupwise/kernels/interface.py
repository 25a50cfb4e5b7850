"""What the kernels compute, as one protocol, and the data that attention works on.

A backend is chosen once per process, by `model.kernels`:

    "torch"   PyTorch alone: the reference that every kernel is tested against
    "auto"    the fastest kernel that this machine and these tensors allow, else the reference

Everything outside this package asks `active()` and imports no kernel by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import BFloat16, Float, Float32, Int, Int16, Int64
from torch import Tensor, nn

from groupwise.kernels.four_bits import FourBits

COPY_LIMIT = 2 * 2**30
"""Bytes of weights that a rollout copies into another layout at most; a fixed number, so that a
run computes the same on every machine with the same processor."""
CLEARED = 64
"""Tokens of completions for which a cache clears its memory at once."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The layout of a packed row: prompts, and branches that attend to their prompt and themselves.

    Attributes:
        spans: first token, length and owner of the prompts and then of the branches; the owner is
            the place of the prompt, or -1 for a prompt. Together they are all tokens.
        prompt_index, branch_index: packed position of every cell of the rectangles prompts ×
            longest prompt and branches × longest branch (0 in padding).
        prompt_length, owner: of each prompt; the prompt of each branch.
        inverse: for each packed position its cell in [prompt cells, branch cells].
        masks: what a backend has derived from the layout, by window width.
        blocks: the same, by tokens of a block.
    """

    spans: Int[Tensor, "3 spans"]
    prompt_index: Int[Tensor, "prompt prompt_time"]
    prompt_length: Int[Tensor, "prompt"]
    branch_index: Int[Tensor, "branch branch_time"]
    owner: Int[Tensor, "branch"]
    inverse: Int[Tensor, "packed"]
    masks: dict[int | None, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    blocks: dict[int, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class LayerCache:
    """Keys and values of one layer."""

    prompt_key: Float[Tensor, "slots key_heads prompt dim"]
    prompt_value: Float[Tensor, "slots key_heads prompt dim"]
    suffix_key: Float[Tensor, "slots key_heads group suffix dim"]
    suffix_value: Float[Tensor, "slots key_heads group suffix dim"]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.prompt_key, self.prompt_value, self.suffix_key, self.suffix_value)

    def clear(self, slots: slice, tokens: slice) -> None:
        """Set some tokens of all completions of some slots to zero."""
        self.suffix_key[slots, :, :, tokens] = 0
        self.suffix_value[slots, :, :, tokens] = 0


@dataclass(kw_only=True)
class GroupCache:
    """Keys and values of a rollout: each prompt's once, and a suffix for every completion.

    The cache is a grid of slots × G: a slot holds one prompt, its G completions grow in step. Slots
    in use are always the first ones, so a decoding step works on a view of the grid and nothing is
    gathered. With S slots, K key heads, P prompt tokens, T completion tokens and dimension D, a
    layer holds prompt keys [S, K, P, D] and suffix keys [S, K, G, T, D].

    Capacities are in tokens; `prompt_length[s]` and `start[s]` say what slot s holds: a prompt of
    that length, and completions that began at that tick of the clock. Completions of the first
    `entered` slots can be read up to `reached`.
    """

    slots: int
    group: int
    prompt_capacity: int
    suffix_capacity: int
    device: torch.device
    layers: dict[int, LayerCache] = field(default_factory=dict)
    entered: int = 0
    reached: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = torch.zeros(self.slots, dtype=torch.long, device=self.device)
        self.start = torch.zeros(self.slots, dtype=torch.long, device=self.device)

    def layer(self, index: int, like: Float[Tensor, "tokens key_heads dim"]) -> LayerCache:
        """A layer's storage, allocated when its first keys arrive."""
        if index not in self.layers:
            heads, dim = like.shape[1:]
            prompt = (self.slots, heads, self.prompt_capacity, dim)
            suffix = (self.slots, heads, self.group, self.suffix_capacity, dim)
            layer = LayerCache(
                prompt_key=like.new_zeros(prompt),
                prompt_value=like.new_zeros(prompt),
                suffix_key=like.new_empty(suffix),
                suffix_value=like.new_empty(suffix),
            )
            layer.clear(slice(self.entered), slice(self.reached))
            self.layers[index] = layer
        return self.layers[index]

    def reach(self, slots: int, suffix: int) -> None:
        """Make the first `suffix` tokens of completions of the first `slots` readable: attention
        reads masked tokens too, and memory as it is allocated may hold NaN. Few completions get as
        long as they may, and few rollouts need every slot, so the rest is left alone: it takes no
        memory before."""
        slots, end = max(slots, self.entered), self.reached
        if suffix > self.reached:
            end = min(suffix + CLEARED - suffix % CLEARED, self.suffix_capacity)
        if (slots, end) != (self.entered, self.reached):
            for layer in self.layers.values():
                layer.clear(slice(self.entered), slice(self.reached, end))
                layer.clear(slice(self.entered, slots), slice(end))
            self.entered, self.reached = slots, end

    def move(self, sources: list[int], targets: list[int], *, prompt: int, suffix: int) -> None:
        """Copy some slots over others, so that the used slots stay the first ones.

        Args:
            prompt, suffix: tokens of the longest prompt and of the longest completion among them.
        """
        self.reach(max(sources) + 1, suffix)  # a slot may move before it is first read
        self.prompt_length[targets] = self.prompt_length[sources]
        self.start[targets] = self.start[sources]
        # One at a time: indexing would gather into a temporary first and take several times longer.
        for layer in self.layers.values():
            for source, target in zip(sources, targets, strict=True):
                for tensor in layer.tensors()[:2]:
                    tensor[target, :, :prompt] = tensor[source, :, :prompt]
                for tensor in layer.tensors()[2:]:
                    tensor[target, :, :, :suffix] = tensor[source, :, :, :suffix]


@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """The rows of a decoding step, one new token each. A row attends to the prompt of its slot and
    to the tokens of its own completion. Several rows may belong to one completion, with consecutive
    times in ascending order.

    Attributes:
        cache: the grid.
        slot, sample, time: of each row, in the order of slots; `time` is where its new key is
            written, and the last place of its suffix that it attends to.
        used: slots in use.
        rows: index slot · G + sample of every row, ascending.
        clock: the tick that this step is.
        prompt, suffix: longest prompt and longest completion in use, the new tokens included.
        aligned: all slots hold prompts of one length and all rows are at one time, so no mask is
            needed.
        in_step: all rows of a slot are at the time that has passed since its `start`.
        order: of each row, its index among those of its completion; None where each has one.
        recorded: the step becomes a CUDA graph: `prompt`, `suffix`, `used` and `clock` are only
            those of the first time, and rows at time −1 are none.
        masks, places, parts: what a backend has derived from the rows, by window, by key heads, and
            by order.
    """

    cache: GroupCache
    slot: Int[Tensor, "rows"]
    sample: Int[Tensor, "rows"]
    time: Int[Tensor, "rows"]
    used: int
    rows: Int[Tensor, "rows"]
    clock: int
    prompt: int
    suffix: int
    aligned: bool
    in_step: bool = True
    order: Int[Tensor, "rows"] | None = None
    recorded: bool = False
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor] = field(default_factory=dict)
    parts: list[tuple[Tensor, DecodeRows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache.reach(self.used, self.suffix)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """x · weight / √(mean(x²) + ε) over the last dimension."""

    weight: Float[Tensor, "size"]
    eps: float


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """scaling · (x · aᵀ) · bᵀ, which an adapter adds to a linear layer; a and b are float32."""

    a: Float32[Tensor, "rank inputs"]
    b: Float32[Tensor, "outputs rank"]
    scaling: float


class Affine(NamedTuple):
    """A linear layer, and what an adapter adds to it."""

    weight: Float[Tensor, "outputs inputs"] | FourBits
    bias: Float[Tensor, "outputs"] | None
    added: LowRank | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One layer of a Llama-like decoder.

    Attributes:
        query, key, value, out, gate, up, down: its products.
        before, between: the norms before attention and before the feed-forward.
        heads: the norms of queries and of keys, where there are any.
        dim: dimension of a head.
        scaling, window, softcap: how it attends.
    """

    query: Affine
    key: Affine
    value: Affine
    out: Affine
    gate: Affine
    up: Affine
    down: Affine
    before: Norm
    between: Norm
    heads: tuple[Norm, Norm] | None
    dim: int
    scaling: float
    window: int | None
    softcap: float | None


@runtime_checkable
class Decoder(Protocol):
    """All layers of a decoder, with copies of its weights. Records no gradient."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of a decoding step has the same bits whatever else is in the step."""
        ...

    def hidden(
        self,
        x: Float[Tensor, "tokens hidden"],
        positions: Int[Tensor, "tokens"],
        attend: Callable[..., Tensor],
    ) -> Float[Tensor, "tokens hidden"]:
        """Normalised states after all layers, of embedded tokens."""
        ...

    def head(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """The head's product."""
        ...


@runtime_checkable
class SplitAdamW(Protocol):
    """AdamW in place, on float32 weights in two halves of 16 bits."""

    def __call__(
        self,
        parameter: BFloat16[Tensor, "*shape"],
        lower: Int16[Tensor, "*shape"],
        grad: Float[Tensor, "*shape"],
        exp_avg: Float32[Tensor, "*shape"],
        exp_avg_sq: Float32[Tensor, "*shape"],
        *,
        step: int,
        factor: float,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Step on the gradient times a factor; `step` counts from 1."""
        ...


@runtime_checkable
class Backend(Protocol):
    """The operations that have kernels. `reference.py` defines each of them."""

    def description(self, device: torch.device) -> str:
        """What computes on a device, for config.json: "torch", or the kernels in use."""
        ...

    # Products
    def linear(
        self, x: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
    ) -> Float[Tensor, "rows outputs"]: ...

    def matmul(
        self, left: Float[Tensor, "rows depth"], right: Float[Tensor, "depth columns"]
    ) -> Float[Tensor, "rows columns"]: ...

    def add_matmul(
        self,
        total: Float[Tensor, "rows columns"] | None,
        left: Float[Tensor, "rows depth"],
        right: Float[Tensor, "depth columns"],
    ) -> Float[Tensor, "rows columns"]: ...

    def low_rank(
        self,
        x: Float[Tensor, "rows inputs"],
        a: Float[Tensor, "rank inputs"],
        b: Float[Tensor, "outputs rank"],
        *,
        onto: Float[Tensor, "rows outputs"] | None,
        scaling: float,
    ) -> tuple[Float[Tensor, "rows outputs"], Float[Tensor, "rows rank"]]: ...

    def low_rank_gradient(
        self, inner: Float[Tensor, "rows rank"], x: Float[Tensor, "rows columns"], *, scaling: float
    ) -> Float[Tensor, "rank columns"]: ...

    # Rows of logits
    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        uniform: Float[Tensor, "rows"],
        *,
        temperature: float,
    ) -> tuple[Int64[Tensor, "rows"], Float[Tensor, "rows"]]: ...

    def selective_log_softmax(
        self,
        logits: Float[Tensor, "rows vocab"],
        target: Int64[Tensor, "rows"],
        *,
        temperature: float,
        entropy: bool,
    ) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"] | None, Float[Tensor, "rows 2"]]:
        """log softmax(logits / temperature) at the targets, in float32 at least; on request the
        entropy; and for the gradient the largest logit m and Σ e^((z − m) / temperature)."""
        ...

    def selective_log_softmax_backward_(
        self,
        logits: Float[Tensor, "rows vocab"],
        target: Int64[Tensor, "rows"],
        grad: Float[Tensor, "rows"],
        *,
        temperature: float,
        entropy: tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]] | None,
        norm: Float[Tensor, "rows 2"] | None,
    ) -> None:
        """Overwrite logits with their gradient. A logit of −inf has that of the probability 0.

        Args:
            grad: of the log-probabilities.
            entropy: of each row, and its gradient.
            norm: what the forward pass found for these logits; None: it is computed again.
        """
        ...

    # Attention
    def causal_attention(
        self,
        query: Float[Tensor, "tokens heads dim"],
        key: Float[Tensor, "tokens key_heads dim"],
        value: Float[Tensor, "tokens key_heads dim"],
        *,
        length: int,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "tokens heads dim"]: ...

    def tree_attention(
        self,
        tree: Tree,
        query: Float[Tensor, "packed heads dim"],
        key: Float[Tensor, "packed key_heads dim"],
        value: Float[Tensor, "packed key_heads dim"],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "packed heads dim"]: ...

    def decode_attention(
        self,
        rows: DecodeRows,
        layer: LayerCache,
        query: Float[Tensor, "rows heads dim"],
        key: Float[Tensor, "rows key_heads dim"],
        value: Float[Tensor, "rows key_heads dim"],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Float[Tensor, "rows heads dim"]: ...

    # Optimizer
    def gradient_norm(self, grad: Float[Tensor, "*shape"]) -> Float32[Tensor, ""]:
        """√Σ g² of a 16-bit gradient."""
        ...

    def split_adamw(self, parameter: BFloat16[Tensor, "*shape"]) -> SplitAdamW | None:
        """The function that steps a parameter which is the upper half of float32 weights, or None
        where PyTorch's optimizer has to step the float32 weights."""
        ...

    # Modules
    def training_layers(self, model: nn.Module) -> AbstractContextManager[None]:
        """Re-entrant context manager in which supported modules (linear layers, embeddings, norms,
        feed-forwards) compute by kernels, forward and backward."""
        ...

    def inference_layers(self, model: nn.Module, *, rows: int) -> AbstractContextManager[None]:
        """Re-entrant context manager in which linear layers compute with copies of their weights,
        as these are now, where no gradient is recorded and inputs have at most `rows` rows."""
        ...

    def shapes_only(self) -> AbstractContextManager[None]:
        """Context manager for fake tensors, in which kernels allocate what they need, as those of a
        run do, and compute nothing."""
        ...

    def copied_bytes(self, model: nn.Module, *, four_bit: Collection[nn.Module]) -> int:
        """The size of the copies of weights that `decoder` makes of a model like Llama, or
        `inference_layers` where those would be too large. Layers in `four_bit` will have 4 bits."""
        ...

    def decoder(
        self,
        layers: Sequence[DecoderLayer],
        *,
        norm: Norm,
        rotation: tuple[Float32[Tensor, "positions dim"], Float32[Tensor, "positions dim"]],
        head: Affine | None,
    ) -> Decoder | None:
        """A decoder of these layers, or None where the model's own modules have to compute."""
        ...

    def replayed(
        self, hidden: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
    ) -> Callable[..., Tensor]:
        """`hidden` of a model for one rollout, its decoding steps without a launch per operation
        where the device allows that.

        Args:
            hidden: takes tokens, positions and attention, as that of a `Backbone` does.
            dtype: of the model's states.
        """
        ...


BACKENDS: dict[str, Callable[[], Backend]] = {}
"""Backends by their names in `model.kernels`; where one is missing, the reference computes."""

_chosen: list[Backend] = []


def select(name: str) -> Backend:
    """Make a backend the active one, by its name in `model.kernels`."""
    _chosen[:] = [BACKENDS.get(name, BACKENDS["torch"])()]
    return _chosen[0]


def active() -> Backend:
    """The backend of this process; "auto" unless another one was selected."""
    return _chosen[0] if _chosen else select("auto")


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Context manager in which a backend is the active one."""
    before = active()
    _chosen[:] = [backend]
    try:
        yield
    finally:
        _chosen[:] = [before]

"""Kernels in Triton for a GPU. `gpu.py` calls them and says what they compute.

Sums are in float32, and results are rounded where the layers of `transformers` round them. The
mark `no_type_check` keeps the shape checks of the tests from wrapping what Triton compiles.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def add_norm(x, added, weight, total, out, size, eps, SIZE: tl.constexpr):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, SIZE)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0)
    more = tl.load(added + row + column, mask=inside, other=0)
    value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    tl.store(total + row + column, value, mask=inside)
    _store_normed(value, weight, out + row, size, eps, column)


@triton.jit
@no_type_check
def rms_norm(x, weight, out, size, eps, SIZE: tl.constexpr):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, SIZE)
    value = tl.load(x + row + column, mask=column < size, other=0)
    _store_normed(value, weight, out + row, size, eps, column)


@triton.jit
@no_type_check
def _store_normed(value, weight, out, size, eps, column):
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    inside = column < size
    scaled = normed * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + column, scaled.to(value.dtype), mask=inside)


@triton.jit
@no_type_check
def rms_norm_backward(
    x, weight, grad, dx, d_weight, rows, size, eps, SIZE: tl.constexpr
):  # fmt: skip
    """Program p of n takes the rows p, p + n, … and adds up their gradients of the weight."""
    program, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, SIZE)
    inside = column < size
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    for row in range(program, rows, step):
        at = tl.cast(row, tl.int64) * size + column
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        given = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        normed = value * scale
        total += given * normed
        of_normed = given * factor
        shared = tl.sum(of_normed * normed, 0) / size
        of_x = (of_normed - normed * shared) * scale
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), mask=inside)
    tl.store(d_weight + program * size + column, total, mask=inside)


@triton.jit
@no_type_check
def rotate(
    query, key, cos, sin, positions, heads, key_heads, HALF: tl.constexpr, SIZE: tl.constexpr
):
    """One head of one row per program, in place; keys follow queries."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < heads:
        at = query + (row * heads + head) * 2 * HALF
    else:
        at = key + (row * key_heads + head - heads) * 2 * HALF
    column = tl.arange(0, SIZE)
    inside = column < HALF
    place = tl.load(positions + row) * 2 * HALF + column
    left = tl.load(at + column, mask=inside, other=0)
    right = tl.load(at + HALF + column, mask=inside, other=0)
    kind = left.dtype
    a, b = left.to(tl.float32), right.to(tl.float32)
    cos_left = tl.load(cos + place, mask=inside, other=0).to(tl.float32)
    cos_right = tl.load(cos + place + HALF, mask=inside, other=0).to(tl.float32)
    sin_left = tl.load(sin + place, mask=inside, other=0).to(tl.float32)
    sin_right = tl.load(sin + place + HALF, mask=inside, other=0).to(tl.float32)
    first = (a * cos_left).to(kind).to(tl.float32) - (b * sin_left).to(kind).to(tl.float32)
    second = (b * cos_right).to(kind).to(tl.float32) + (a * sin_right).to(kind).to(tl.float32)
    tl.store(at + column, first.to(kind), mask=inside)
    tl.store(at + HALF + column, second.to(kind), mask=inside)


@triton.jit
@no_type_check
def swiglu(gate, up, out, count, SIZE: tl.constexpr):
    """SIZE numbers per program."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0)
    wide = value.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(value.dtype).to(tl.float32)
    product = active * tl.load(up + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + place, product.to(value.dtype), mask=inside)


@triton.jit
@no_type_check
def swiglu_backward(gate, up, grad, d_gate, d_up, count, SIZE: tl.constexpr):
    """SIZE numbers per program."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0).to(tl.float32)
    given = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
    share = tl.sigmoid(value)
    of_gate = given * other * share * (1 + value * (1 - share))
    tl.store(d_gate + place, of_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + place, (given * value * share).to(d_up.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def capped(scores, softcap, CAPPED: tl.constexpr):
    """softcap · tanh(scores / softcap)"""
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit
@no_type_check
def _attended(
    query, total, norm, highest, keys, values, first, count, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys from `first` to `count`."""
    of_dim = tl.arange(0, DIM)
    inside_dim = of_dim < dim
    for begin in range(first // KEYS * KEYS, count, KEYS):
        place = begin + tl.arange(0, KEYS)
        there = (place >= first) & (place < count)
        at, mask = place[:, None] * dim + of_dim[None, :], there[:, None] & inside_dim[None, :]
        key = tl.load(keys + at, mask=mask, other=0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        scores = tl.where(there[None, :], capped(scores, softcap, CAPPED), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        value = tl.load(values + at, mask=mask, other=0)
        more = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        total = total * shrunk[:, None] + more
        norm = norm * shrunk + tl.sum(weights, 1)
        highest = higher
    return total, norm, highest


@triton.jit(do_not_specialize=["group", "prompt_capacity", "suffix_capacity", "window"])
@no_type_check
def decode_attention(
    query, key, value, out, prompt_keys, prompt_values, suffix_keys, suffix_values,
    slot, sample, time, prompt_length,
    query_row, query_head, key_row, key_head, value_row, value_head,
    repeats, group, prompt_capacity, suffix_capacity, window, scaling, softcap,
    dim: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and one key head per program, with all query heads that share it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_heads = tl.num_programs(1)
    last, of_slot, of_sample = tl.load(time + row), tl.load(slot + row), tl.load(sample + row)
    of_dim, of_head = tl.arange(0, DIM), tl.arange(0, HEADS)
    inside_dim, inside_head = of_dim < dim, of_head < repeats
    inside = inside_head[:, None] & inside_dim[None, :]
    new_key = tl.load(key + row * key_row + head * key_head + of_dim, mask=inside_dim, other=0)
    new_value = tl.load(
        value + row * value_row + head * value_head + of_dim, mask=inside_dim, other=0
    )
    store = of_slot * key_heads + head
    prompt, suffix = (
        store * prompt_capacity * dim,
        (store * group + of_sample) * suffix_capacity * dim,
    )
    written = of_dim < tl.where(last < 0, 0, dim)
    tl.store(suffix_keys + suffix + last * dim + of_dim, new_key, mask=written)
    tl.store(suffix_values + suffix + last * dim + of_dim, new_value, mask=written)
    heads = head * repeats + of_head
    queries = tl.load(
        query + row * query_row + heads[:, None] * query_head + of_dim[None, :],
        mask=inside, other=0,
    )  # fmt: skip
    # The new token itself, which other threads of the program may not have stored yet.
    own = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scaling
    highest = capped(own, softcap, CAPPED)
    norm = tl.full([HEADS], 1.0, tl.float32)
    total = tl.zeros([HEADS, DIM], tl.float32) + new_value.to(tl.float32)[None, :]
    length = tl.where(last < 0, 0, tl.load(prompt_length + of_slot))
    earliest = length + last + 1 - window
    total, norm, highest = _attended(
        queries, total, norm, highest, prompt_keys + prompt, prompt_values + prompt,
        tl.maximum(earliest, 0), length, scaling, softcap, dim, DIM, KEYS, CAPPED, PRECISION,
    )  # fmt: skip
    total, norm, highest = _attended(
        queries, total, norm, highest, suffix_keys + suffix, suffix_values + suffix,
        tl.maximum(earliest - length, 0), last, scaling, softcap, dim, DIM, KEYS, CAPPED, PRECISION,
    )  # fmt: skip
    found = out + (row * key_heads * repeats + heads[:, None]) * dim + of_dim[None, :]
    tl.store(found, (total / norm[:, None]).to(queries.dtype), mask=inside)


@triton.jit
@no_type_check
def _scaled(logits, place, vocab, temperature):
    """Logits over the temperature, −∞ outside the vocabulary."""
    x = tl.load(logits + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    return x / temperature


@triton.jit
@no_type_check
def sum_blocks(logits, largest, sums, vocab, temperature, SIZE: tl.constexpr):
    """One block of one row per program: its largest logit, and Σ exp(logit − largest)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _scaled(logits + row * vocab, block * SIZE + tl.arange(0, SIZE), vocab, temperature)
    highest = tl.max(x, 0)
    at = row * tl.num_programs(1) + block
    tl.store(largest + at, highest)
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0, highest)), 0))


@triton.jit
@no_type_check
def draw(
    logits, uniform, largest, sums, tokens, logp, vocab, temperature, blocks,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row per program: the block in which the cumulative sum exceeds the target, then the token
    inside it. Sums of blocks are those that `sum_blocks` has written, so they agree."""
    row = tl.program_id(0).to(tl.int64)
    of_row, block = logits + row * vocab, tl.arange(0, BLOCKS)
    of_block, there = row * blocks + block, block < blocks
    high = tl.load(largest + of_block, mask=there, other=float("-inf"))
    highest = tl.max(high, 0)
    mass = tl.load(sums + of_block, mask=there, other=0) * tl.exp(high - highest)
    mass = mass.to(tl.float64)
    total = tl.sum(mass, 0)
    reached = tl.cumsum(mass, 0)
    # Smaller than the total, whatever the product is rounded to.
    below = 1.0 - 2.220446049250313e-16
    target = tl.minimum(tl.load(uniform + row).to(tl.float64) * total, total * below)
    # Rounding of a scan may leave none beyond the target; then it is the last that can be drawn.
    beyond = tl.min(tl.where((reached > target) & (mass > 0), block, BLOCKS), 0)
    chosen = tl.where(beyond < BLOCKS, beyond, tl.max(tl.where(mass > 0, block, 0), 0))
    before = tl.sum(tl.where(block < chosen, mass, 0), 0)
    column = tl.arange(0, SIZE)
    x = _scaled(of_row, chosen * SIZE + column, vocab, temperature)
    p = tl.exp(x - highest)
    after = before + tl.cumsum(p, 0).to(tl.float64)
    first = tl.min(tl.where((after > target) & (p > 0), column, SIZE), 0)
    token = tl.where(first < SIZE, first, tl.max(tl.where(p > 0, column, 0), 0))
    token = tl.minimum(chosen * SIZE + token, vocab - 1)
    tl.store(tokens + row, token.to(tl.int64))
    value = tl.load(of_row + token).to(tl.float32) / temperature - highest
    tl.store(logp + row, value - tl.log(total).to(tl.float32))


@triton.jit
@no_type_check
def log_softmax(
    logits, target, logp, entropies, norms, vocab, temperature,
    ENTROPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row per program, in one pass: sums are those of the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * vocab
    highest = tl.max(tl.full([SIZE], float("-inf"), tl.float32), 0)
    sums, products = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for begin in range(0, vocab, SIZE):
        x = _scaled(of_row, begin + tl.arange(0, SIZE), vocab, temperature)
        higher = tl.maximum(highest, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk, p = tl.exp(highest - base), tl.exp(x - base)
        if ENTROPY:
            moved = tl.where(highest == float("-inf"), 0.0, highest - base)
            products = shrunk * (products + moved * sums) + tl.where(p > 0, p * (x - base), 0.0)
        sums = sums * shrunk + p
        highest = higher
    total = tl.sum(sums, 0)
    own = tl.load(of_row + tl.load(target + row)).to(tl.float32) / temperature
    tl.store(logp + row, own - highest - tl.log(total))
    tl.store(norms + 2 * row, highest * temperature)
    tl.store(norms + 2 * row + 1, total)
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) - tl.sum(products, 0) / total)


@triton.jit
@no_type_check
def log_softmax_backward(
    logits, target, grad, entropy, d_entropy, norms, vocab, temperature,
    ENTROPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One block of one row per program, in place."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x = _scaled(logits + row * vocab, place, vocab, temperature)
    x = x - tl.load(norms + 2 * row) / temperature
    total = tl.load(norms + 2 * row + 1)
    p = tl.exp(x) / total
    given = tl.load(grad + row).to(tl.float32)
    d = (tl.where(place == tl.load(target + row), 1.0, 0.0) - p) * given
    if ENTROPY:
        surprise = tl.where(p > 0, p * (x - tl.log(total)), 0.0)
        d -= (surprise + p * tl.load(entropy + row)) * tl.load(d_entropy + row)
    tl.store(
        logits + row * vocab + place, (d / temperature).to(logits.dtype.element_ty),
        mask=place < vocab,
    )  # fmt: skip

"""Kernels in Triton for attention of packed groups on a GPU, forward and backward.
`gpu_attention.py` calls them and says what they compute.

A program takes a block of one span's tokens and walks over what it attends to, or over what attends
to it, in steps; only steps that the mask cuts are masked. Scores are kept as logarithms of base 2.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from groupwise.kernels.triton_kernels import capped

LOG2_E = tl.constexpr(1.4426950408889634)
VARYING = ["spans", "tokens", "window"]
"""Sizes for which nothing is compiled anew."""


@triton.jit
@no_type_check
def _rows(base, place, stride, count, dim: tl.constexpr, DIM: tl.constexpr, CUT: tl.constexpr):
    """Rows of a matrix, [places, DIM]; zeros beyond `count` and `dim`."""
    of_dim = tl.arange(0, DIM)
    at = base + place[:, None] * stride + of_dim[None, :]
    if CUT:
        rows = tl.load(at, mask=(place < count)[:, None] & (of_dim < dim)[None, :], other=0)
    elif dim != DIM:
        rows = tl.load(at, mask=(of_dim < dim)[None, :], other=0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
@no_type_check
def _store(base, place, stride, count, values, dim: tl.constexpr, DIM: tl.constexpr):
    of_dim = tl.arange(0, DIM)
    mask = (place < count)[:, None] & (of_dim < dim)[None, :]
    at = base + place[:, None] * stride + of_dim[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _exponents(products, scaling, softcap, CAPPED: tl.constexpr):
    """Scores times log2 e."""
    return capped(products * scaling, softcap, CAPPED) * LOG2_E


@triton.jit
@no_type_check
def _attend(
    query, total, norm, highest, keys, values, key_row, value_row, first, last, count, position,
    window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, CUT: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys from `first` to `last`."""
    for begin in range(first, last, STEP):
        place = begin + tl.arange(0, STEP)
        key = _rows(keys, place, key_row, count, dim, DIM, CUT)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = _exponents(products, scaling, softcap, CAPPED)
        if CUT:
            distance = position[:, None] - place[None, :]
            seen = (distance >= 0) & (distance < window) & (place < count)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A window can hide all of the first keys.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, shrunk = tl.exp2(scores - base[:, None]), tl.exp2(highest - base)
        value = _rows(values, place, value_row, count, dim, DIM, CUT)
        total = tl.dot(
            weights.to(value.dtype), value, total * shrunk[:, None], input_precision=PRECISION
        )
        norm = norm * shrunk + tl.sum(weights, 1)
        highest = higher
    return total, norm, highest


@triton.jit
@no_type_check
def _extent(layout, spans, span):
    """First token and length of a span."""
    return tl.load(layout + span).to(tl.int64), tl.load(layout + spans + span)


@triton.jit
@no_type_check
def _place(of_block, layout, spans):
    """Of a block: its span, its first token inside the span, first token and length of the span,
    and of the span's prompt."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    span, first = tl.load(of_block + block), tl.load(of_block + blocks + block)
    start, size = _extent(layout, spans, span)
    owner = tl.load(layout + 2 * spans + span)
    prompt_start, prompt = _extent(layout, spans, tl.maximum(owner, 0))
    return span, first, start, size, prompt_start, tl.where(owner < 0, 0, prompt)


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def forward(
    query, key, value, out, norms, of_block, layout, spans, tokens,
    query_row, query_head, key_row, key_head, value_row, value_head,
    repeats, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries and one head per program."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if tl.load(of_block + tl.program_id(0)) < spans:
        _, first, start, size, prompt_start, prompt = _place(of_block, layout, spans)
        place = first + tl.arange(0, BLOCK)
        position = place + prompt
        queries = _rows(
            query + start * query_row + head * query_head, place, query_row, size, dim, DIM, True
        )
        keys, values = key + head // repeats * key_head, value + head // repeats * value_head
        prompt_keys, own_keys = keys + prompt_start * key_row, keys + start * key_row
        prompt_values, own_values = values + prompt_start * value_row, values + start * value_row
        total = tl.zeros([BLOCK, DIM], tl.float32)
        norm = tl.zeros([BLOCK], tl.float32)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        if WINDOWED:
            whole = tl.maximum(first + prompt + 1 - window, 0) // STEP * STEP
            own = tl.maximum(first + 1 - window, 0) // STEP * STEP
        else:
            whole, own = prompt // STEP * STEP, first
            total, norm, highest = _attend(
                queries, total, norm, highest, prompt_keys, prompt_values, key_row, value_row,
                0, whole, prompt, position, window, scaling, softcap,
                dim, DIM, STEP, False, CAPPED, PRECISION,
            )  # fmt: skip
            total, norm, highest = _attend(
                queries, total, norm, highest, own_keys, own_values, key_row, value_row,
                0, own, size, place, window, scaling, softcap,
                dim, DIM, STEP, False, CAPPED, PRECISION,
            )  # fmt: skip
        total, norm, highest = _attend(
            queries, total, norm, highest, prompt_keys, prompt_values, key_row, value_row,
            whole, prompt, prompt, position, window, scaling, softcap,
            dim, DIM, STEP, True, CAPPED, PRECISION,
        )  # fmt: skip
        total, norm, highest = _attend(
            queries, total, norm, highest, own_keys, own_values, key_row, value_row,
            own, tl.minimum(first + BLOCK, size), size, place, window, scaling, softcap,
            dim, DIM, STEP, True, CAPPED, PRECISION,
        )  # fmt: skip
        found = out + (start * heads + head) * dim
        _store(found, place, heads * dim, size, total / norm[:, None], dim, DIM)
        tl.store(norms + head * tokens + start + place, highest + tl.log2(norm), mask=place < size)


@triton.jit
@no_type_check
def _differences(
    products, given, norm, shared, distance, window, scaling, softcap,
    CUT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The weights of attention, and the gradients of q · k · scaling. Queries that are missing have
    an infinite norm."""
    scores = _exponents(products, scaling, softcap, CAPPED)
    weights = tl.exp2(scores - norm)
    if CUT:
        weights = tl.where((distance >= 0) & (distance < window), weights, 0.0)
    change = weights * (given - shared)
    if CAPPED:
        ratio = scores / (softcap * LOG2_E)
        change = change * (1 - ratio * ratio)
    return weights, change


@triton.jit
@no_type_check
def _change_queries(
    query, grad, total, norm, shared, keys, values, key_row, value_row, first, last, count,
    position, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, CUT: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries after the keys from `first` to `last`."""
    for begin in range(first, last, STEP):
        place = begin + tl.arange(0, STEP)
        key = _rows(keys, place, key_row, count, dim, DIM, CUT)
        value = _rows(values, place, value_row, count, dim, DIM, CUT)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        given = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        distance = position[:, None] - place[None, :]
        if CUT:  # what lies beyond the last key is no earlier token
            distance = tl.where((place < count)[None, :], distance, -1)
        _, change = _differences(
            products, given, norm[:, None], shared[:, None], distance,
            window, scaling, softcap, CUT, CAPPED,
        )  # fmt: skip
        total = tl.dot(change.to(key.dtype), key, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def query_gradient(
    query, key, value, out, grad, d_query, norms, shares, of_block, layout, spans, tokens,
    query_row, query_head, key_row, key_head, value_row, value_head,
    repeats, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries and one head per program; also Σ out · grad of every query, which
    `key_gradient` needs."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if tl.load(of_block + tl.program_id(0)) < spans:
        _, first, start, size, prompt_start, prompt = _place(of_block, layout, spans)
        place = first + tl.arange(0, BLOCK)
        position = place + prompt
        at, row = (start * heads + head) * dim, heads * dim
        queries = _rows(
            query + start * query_row + head * query_head, place, query_row, size, dim, DIM, True
        )
        given = _rows(grad + at, place, row, size, dim, DIM, True)
        found = _rows(out + at, place, row, size, dim, DIM, True)
        shared = tl.sum(found.to(tl.float32) * given.to(tl.float32), 1)
        of_head = head * tokens + start + place
        tl.store(shares + of_head, shared, mask=place < size)
        norm = tl.load(norms + of_head, mask=place < size, other=float("inf"))
        keys, values = key + head // repeats * key_head, value + head // repeats * value_head
        prompt_keys, own_keys = keys + prompt_start * key_row, keys + start * key_row
        prompt_values, own_values = values + prompt_start * value_row, values + start * value_row
        total = tl.zeros([BLOCK, DIM], tl.float32)
        if WINDOWED:
            whole = tl.maximum(first + prompt + 1 - window, 0) // STEP * STEP
            own = tl.maximum(first + 1 - window, 0) // STEP * STEP
        else:
            whole, own = prompt // STEP * STEP, first
            total = _change_queries(
                queries, given, total, norm, shared, prompt_keys, prompt_values, key_row, value_row,
                0, whole, prompt, position, window, scaling, softcap,
                dim, DIM, STEP, False, CAPPED, PRECISION,
            )  # fmt: skip
            total = _change_queries(
                queries, given, total, norm, shared, own_keys, own_values, key_row, value_row,
                0, own, size, place, window, scaling, softcap,
                dim, DIM, STEP, False, CAPPED, PRECISION,
            )  # fmt: skip
        total = _change_queries(
            queries, given, total, norm, shared, prompt_keys, prompt_values, key_row, value_row,
            whole, prompt, prompt, position, window, scaling, softcap,
            dim, DIM, STEP, True, CAPPED, PRECISION,
        )  # fmt: skip
        total = _change_queries(
            queries, given, total, norm, shared, own_keys, own_values, key_row, value_row,
            own, tl.minimum(first + BLOCK, size), size, place, window, scaling, softcap,
            dim, DIM, STEP, True, CAPPED, PRECISION,
        )  # fmt: skip
        _store(d_query + at, place, row, size, total * scaling, dim, DIM)


@triton.jit
@no_type_check
def _change_keys(
    key, value, d_key, d_value, queries, grads, norms, shares, query_row, row, first, last, count,
    ahead, place, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, CUT: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values after the queries from `first` to `last`, which are `ahead`
    tokens further than their place says."""
    for begin in range(first, last, STEP):
        of_query = begin + tl.arange(0, STEP)
        query = _rows(queries, of_query, query_row, count, dim, DIM, CUT)
        grad = _rows(grads, of_query, row, count, dim, DIM, CUT)
        if CUT:
            norm = tl.load(norms + of_query, mask=of_query < count, other=float("inf"))
            shared = tl.load(shares + of_query, mask=of_query < count, other=0)
        else:
            norm, shared = tl.load(norms + of_query), tl.load(shares + of_query)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        given = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        weights, change = _differences(
            products, given, norm[None, :], shared[None, :],
            of_query[None, :] + ahead - place[:, None], window, scaling, softcap, CUT, CAPPED,
        )  # fmt: skip
        d_value = tl.dot(weights.to(grad.dtype), grad, d_value, input_precision=PRECISION)
        d_key = tl.dot(change.to(query.dtype), query, d_key, input_precision=PRECISION)
    return d_key, d_value


@triton.jit
@no_type_check
def _change_keys_from(
    key, value, d_key, d_value, queries, grads, norms, shares, query_row, row, first, count,
    ahead, end, place, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_change_keys` for all queries of a span from `first` on, which are later than the keys; with
    a window, up to the last query that sees a key before `end`."""
    if WINDOWED:
        whole, last = first, tl.minimum(end + window - 1 - ahead, count)
    else:
        whole, last = tl.maximum(count // STEP * STEP, first), count
        d_key, d_value = _change_keys(
            key, value, d_key, d_value, queries, grads, norms, shares, query_row, row,
            first, whole, count, ahead, place, window, scaling, softcap,
            dim, DIM, STEP, False, CAPPED, PRECISION,
        )  # fmt: skip
    return _change_keys(
        key, value, d_key, d_value, queries, grads, norms, shares, query_row, row,
        whole, last, count, ahead, place, window, scaling, softcap,
        dim, DIM, STEP, True, CAPPED, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def key_gradient(
    query, key, value, grad, d_keys, d_values, norms, shares, of_block, layout, branches,
    spans, tokens,
    query_row, query_head, key_row, key_head, value_row, value_head,
    repeats, window, scaling, softcap,
    dim: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys and one head of queries per program: what this head adds to their
    gradients."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if tl.load(of_block + tl.program_id(0)) < spans:
        span, first, start, size, _, _ = _place(of_block, layout, spans)
        place, row = first + tl.arange(0, BLOCK), heads * dim
        of_key = head // repeats
        keys = _rows(
            key + start * key_row + of_key * key_head, place, key_row, size, dim, DIM, True
        )
        values = _rows(
            value + start * value_row + of_key * value_head, place, value_row, size, dim, DIM, True
        )
        d_key = tl.zeros([BLOCK, DIM], tl.float32)
        d_value = tl.zeros([BLOCK, DIM], tl.float32)
        queries, grads = query + head * query_head, grad + head * dim
        of_norms, of_shares = norms + head * tokens, shares + head * tokens
        end = first + BLOCK
        d_key, d_value = _change_keys(
            keys, values, d_key, d_value, queries + start * query_row, grads + start * row,
            of_norms + start, of_shares + start, query_row, row, first, tl.minimum(end, size), size,
            0, place, window, scaling, softcap, dim, DIM, STEP, True, CAPPED, PRECISION,
        )  # fmt: skip
        d_key, d_value = _change_keys_from(
            keys, values, d_key, d_value, queries + start * query_row, grads + start * row,
            of_norms + start, of_shares + start, query_row, row, end, size,
            0, end, place, window, scaling, softcap,
            dim, DIM, STEP, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        ranges = branches + spans + span
        for listed in range(tl.load(ranges), tl.load(ranges + spans)):
            at, count = _extent(layout, spans, tl.load(branches + listed))
            d_key, d_value = _change_keys_from(
                keys, values, d_key, d_value, queries + at * query_row, grads + at * row,
                of_norms + at, of_shares + at, query_row, row, 0, count,
                size, end, place, window, scaling, softcap,
                dim, DIM, STEP, WINDOWED, CAPPED, PRECISION,
            )  # fmt: skip
        at = (start * heads + head) * dim
        _store(d_keys + at, place, row, size, d_key * scaling, dim, DIM)
        _store(d_values + at, place, row, size, d_value, dim, DIM)

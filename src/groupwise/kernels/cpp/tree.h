// What tree attention is computed for, and which thread computes what in the backward pass.

#pragma once

#include "multiply.h"

// Spans of tokens: each a prompt, or a completion that attends to its prompt and itself.
template <typename Number>
struct Tree {
    Heads<Number> query, key, value;
    Number *out;             // [tokens, heads, dim]; of the forward pass
    float *norm;             // [tokens, heads]: log Σ e^score
    const Number *out_grad;  // [tokens, heads, dim]
    Number *query_grad;      // [tokens, heads, dim]
    // In float32, [parts, tokens, key_heads, dim], to be added to; in bfloat16, [tokens, key_heads, dim].
    Number *key_grad, *value_grad;
    Number *memory;  // of the kernel in bfloat16: `_workspace` of tree_attention.py
    const int64_t *begin, *length, *owner;  // [spans]; owner: the span of the prompt, or -1
    int64_t spans, tokens, heads, key_heads, dim;
    int64_t window;  // the last tokens that are attended, or 0 for all
    int64_t parts, threads;
    double scaling;
};

namespace {

// Calls with the queries (span, first one, head) whose gradients one thread adds up: those that attend
// with one key head and are of one part of a prompt's completions; the prompt itself goes with the first
// part. So no two threads add to the same keys.
template <typename Number, typename Do>
INLINE void each_owned(const Tree<Number> &t, int64_t prompt, int64_t part, int64_t key_head, int64_t size,
                       Do what)
{
    if (t.owner[prompt] >= 0)
        return;
    const int64_t repeats = t.heads / t.key_heads;
    int64_t next = 0;
    for (int64_t s = 0; s < t.spans; s++) {
        if (s != prompt && t.owner[s] != prompt)
            continue;
        if ((s == prompt ? 0 : next++ % t.parts) != part)
            continue;
        for (int64_t h = key_head * repeats; h < (key_head + 1) * repeats; h++)
            for (int64_t first = 0; first < t.length[s]; first += size)
                what(s, first, h);
    }
}

}  // namespace

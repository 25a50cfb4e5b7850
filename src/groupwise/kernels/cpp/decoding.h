// Attention of a decoding step: one new token of every row.

#pragma once

#include "multiply.h"

// Keys and values of one layer.
template <typename Number>
struct Cache {
    const Number *prompt_key, *prompt_value;  // [slots, key_heads, prompt_capacity, dim]
    Number *suffix_key, *suffix_value;        // [slots, key_heads, group, suffix_capacity, dim]
    int64_t key_heads, dim, group, prompt_capacity, suffix_capacity;
};

// The place of every row in the cache, in the order of slots.
struct Places {
    const int64_t *slot, *sample, *time;  // [rows]
    const int64_t *prompt_length;         // [slots]
    int64_t rows;
};

template <typename Number>
struct Attention {
    Heads<Number> query, key, value;
    Number *out;  // [rows, heads, dim]
    Cache<Number> cache;
    Places places;
    int64_t heads;
    int64_t window;  // the last tokens that are attended, or 0 for all
    int64_t threads;
    double scaling;
};

// Returns 0, or 1 when out of memory.
template <typename Number>
int attend(const Attention<Number> &call);

// The operations of a decoder layer in a rollout, in float32 or bfloat16: there all sums are taken in
// float32, and everything that a layer of transformers would store is rounded.

#pragma once

#include <memory>
#include <new>

#include "four_bits.h"
#include "vectors.h"

// Memory without content, or null when there is none left.
template <typename Number>
std::unique_ptr<Number[]> scratch(int64_t size)
{
    return std::unique_ptr<Number[]>(new (std::nothrow) Number[size]);
}

template <typename Number>
struct Linear {
    const Number *x;       // [rows, depth]
    const Number *weight;  // [panels, depth, 32], or [panels, depth / 2, 32, 2] of pairs; if gated,
                           // 16 columns of the gate, then 16 of W; null where they have 4 bits
    FourBits small;        // the same columns in 4 bits
    const float *bias;     // [panels, 32]
    // An adapter adds (x · Aᵀ) · Bᵀ in float32.
    const float *a;        // [rank / 16 rounded up, depth, 16], or null where there is none
    const float *b;        // [panels, high, 32], columns as those of `weight`
    const int64_t *start;  // [panels, 2]: 16 columns have `high` numbers of the rank, from here on
    const Number *onto;    // [rows, columns], added to the product, or null
    Number *out;           // [rows, columns]; may be `onto`
    int64_t rows, depth, columns, rank, high, gated, threads;
};

template <typename Number>
struct Norm {
    const Number *weight;  // or null where there is none
    double eps;
};

// Returns 0, or 1 when out of memory.
template <typename Number>
int linear(const Linear<Number> &call);

// out may be x
template <typename Number>
void rms_norm(const Number *x, const Norm<Number> &norm, int64_t rows, int64_t size, Number *out,
              int64_t threads);

// Rotary position embedding in place (Su et al., "RoFormer", 2104.09864).
template <typename Number>
void rotary(Number *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const Number *cos,
            const Number *sin, const int64_t *position, int64_t threads);

// A softmax of logits, row by row: what draws and log-probabilities share, to the last bit.

#pragma once

#include <cstring>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 128;  // weights whose sum is taken in float32; longer sums in float64

// e^x, flushed to 0 below e^-87.
INLINE Vector exp_flushed(Vector x)
{
    const Vector result = exponential(x);
    return x < -87.0f ? Vector{} : result;
}

// A row of logits: P(token) = e^((x - top) · scale) / total, with the largest logit as `top`. A
// logit of -inf has no probability; one that is NaN makes every sum NaN.
template <typename Number>
struct Logits {
    const Number *x;
    int64_t size;
    float scale, top;

    Logits(const Number *x, int64_t size, double scale, float top)
        : x(x), size(size), scale(scale), top(top)
    {
    }

    Logits(const Number *x, int64_t size, double scale) : x(x), size(size), scale(scale)
    {
        Vector most = Vector{} - std::numeric_limits<float>::infinity();
        for (int64_t i = 0; i < size; i += LANES)
            most = larger(some(i), most);
        top = largest(most);
    }

    static int64_t blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

    // Logits from i on; -inf beyond the last.
    INLINE Vector some(int64_t i) const
    {
        if (i + LANES <= size)
            return load(x + i);
        Number last[LANES];
        store(Vector{} - std::numeric_limits<float>::infinity(), last);
        std::memcpy(last, x + i, sizeof(Number) * (size - i));
        return load(last);
    }

    // The exponents of their weights.
    INLINE Vector exponents(int64_t i) const { return (some(i) - top) * scale; }

    INLINE Vector weights(int64_t i) const { return exp_flushed(exponents(i)); }

    float sum_of_block(int64_t block) const
    {
        Vector weight{};
        for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, size); i += LANES)
            weight += weights(i);
        return sum(weight);
    }
};

}  // namespace

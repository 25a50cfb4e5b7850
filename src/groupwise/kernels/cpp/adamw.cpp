// AdamW on float32 weights in two halves of 16 bits, and the squares of a gradient.

#include <cmath>

#include "vectors.h"

// A step of `size` weights, in place. A weight is the bfloat16 that it rounds to and its own lower
// half; `rate` is the learning rate divided by the bias correction of the first moment, `root` the
// square root of that of the second.
template <typename Number>
struct AdamW {
    const Number *grad;
    Narrow *upper, *lower;
    float *first, *second;  // moments
    int64_t size, threads;
    double factor, kept, beta2, weight1, weight2, rate, root, eps;
};

SIZE_OF(AdamW, AdamW<float>)

namespace {

constexpr int64_t BLOCK = 1 << 12;  // weights that a thread takes at once
constexpr int64_t EIGHT = 8;        // floats of the vectors of PyTorch's own kernel
constexpr int64_t FEW = 1 << 9;     // squares whose sum is taken in float32

// A product that is rounded before it is added to something: other roundings are not PyTorch's.
INLINE Vector apart(Vector product)
{
#if __GNUC__ >= 12
    return __builtin_assoc_barrier(product);
#else
    return product;
#endif
}

INLINE Vector square_root(Vector x)
{
    float lanes[LANES];
    at(lanes) = x;
    for (int i = 0; i < LANES; i++)
        lanes[i] = std::sqrt(lanes[i]);
    return at(lanes);
}

// The halves are float32 rounded to nearest, ties away from zero, and its lower 16 bits: from 2^15
// on, they have rounded the upper half up.
INLINE Vector whole(const Narrow *upper, const Narrow *lower)
{
    const Bits low = __builtin_convertvector(*(const Narrows *)lower, Bits);
    return (Vector)((Bits)load(upper) + low - (low >> 15 << 16));
}

INLINE void split(Vector x, Narrow *upper, Narrow *lower)
{
    *(Narrows *)lower = __builtin_convertvector((Bits)x & 0xffff, Narrows);
    *(Narrows *)upper = __builtin_convertvector(((Bits)x + 0x8000) >> 16, Narrows);
}

// With the gradient g · factor: m += (1 - β1) · (g - m), v = β2 · v + (1 - β2) · g²,
// w = w · kept - rate · m / (√v / root + ε). What is fused and what is rounded first is as in
// PyTorch's kernel, whose compiler chose another product for the `rest` that fills no vector.
template <bool rest, typename Number>
INLINE void step(const AdamW<Number> &a, int64_t i)
{
    const float weight1 = a.weight1, weight2 = a.weight2;
    const bool near = std::abs(weight1) < 0.5f;  // from which end PyTorch interpolates
    const Vector g = apart(load(a.grad + i) * (float)a.factor);
    Vector m = at(a.first + i), v = at(a.second + i);
    const Vector end = near ? m : g;
    m = (near ? weight1 : weight1 - 1.0f) * (g - m) + end;
    const Vector old = v * (float)a.beta2, square = weight2 * g * g;
    v = rest ? old + apart(square) : apart(old) + square;
    const Vector w = apart(whole(a.upper + i, a.lower + i) * (float)a.kept);
    const Vector denominator = square_root(v) / (float)a.root + (float)a.eps;
    at(a.first + i) = m;
    at(a.second + i) = v;
    split(w - (float)a.rate * m / denominator, a.upper + i, a.lower + i);
}

// Fewer weights than a vector has, by way of copies.
template <bool rest, typename Number>
void step_some(const AdamW<Number> &a, int64_t begin, int64_t end)
{
    Number grad[LANES] = {};
    Narrow upper[LANES] = {}, lower[LANES] = {};
    float first[LANES] = {}, second[LANES] = {};
    std::copy(a.grad + begin, a.grad + end, grad);
    std::copy(a.upper + begin, a.upper + end, upper);
    std::copy(a.lower + begin, a.lower + end, lower);
    std::copy(a.first + begin, a.first + end, first);
    std::copy(a.second + begin, a.second + end, second);
    AdamW<Number> copied = a;
    copied.grad = grad, copied.upper = upper, copied.lower = lower;
    copied.first = first, copied.second = second;
    step<rest>(copied, 0);
    const int64_t count = end - begin;
    std::copy(upper, upper + count, a.upper + begin);
    std::copy(lower, lower + count, a.lower + begin);
    std::copy(first, first + count, a.first + begin);
    std::copy(second, second + count, a.second + begin);
}

template <typename Number>
void adamw(const AdamW<Number> &a)
{
    const int64_t vectors = a.size / LANES * LANES;
    const int64_t eights = std::max(vectors, a.size / EIGHT * EIGHT);
#pragma omp parallel for num_threads(a.threads) if (a.size > SMALL) schedule(static)
    for (int64_t block = 0; block < vectors; block += BLOCK) {
        const AdamW<Number> own = a;  // which no store can alter, so it stays in registers
        for (int64_t i = block; i < std::min(block + BLOCK, vectors); i += LANES)
            step<false>(own, i);
    }
    if (vectors < eights)
        step_some<false>(a, vectors, eights);
    if (eights < a.size)
        step_some<true>(a, eights, a.size);
}

}  // namespace

extern "C" {

void adamw_float32(const AdamW<float> *call) { adamw(*call); }
void adamw_bfloat16(const AdamW<Narrow> *call) { adamw(*call); }

// The sums of the squares of blocks of `block` numbers. Float32 adds up FEW of them at most: its
// rounding grows with their count, the more so the narrower the vectors.
void square_sums(const Narrow *x, int64_t size, int64_t block, double *sums, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL) schedule(static)
    for (int64_t start = 0; start < size; start += block) {
        const int64_t end = std::min(start + block, size);
        double total = 0;
        for (int64_t from = start; from < end; from += FEW) {
            const int64_t to = std::min(from + FEW, end);
            Vector squares{};
            int64_t i = from;
            for (; i + LANES <= to; i += LANES)
                squares += load(x + i) * load(x + i);
            float last = 0;
            for (; i < to; i++)
                last += wide(x[i]) * wide(x[i]);
            total += (double)sum(squares) + last;
        }
        sums[start / block] = total;
    }
}

}

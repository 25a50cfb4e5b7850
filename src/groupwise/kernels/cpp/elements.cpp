// Norms, activations, rotary embedding, and inverse-CDF sampling.

#include <cmath>
#include <cstdlib>
#include <omp.h>

#include "layer.h"
#include "softmax.h"

namespace {

// RMS norm (Zhang & Sennrich, 1910.07467); rounded before the weight is applied, as in Llama.
template <typename Number>
void norm(const Number *x, const Number *weight, int64_t rows, int64_t size, float eps, Number *out,
          int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const Number *of = x + r * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++)
            squares += wide(of[i]) * wide(of[i]);
        const float scale = 1.0f / std::sqrt(squares / size + eps);
        for (int64_t i = 0; i < size; i++)
            put(rounded<Number>(wide(of[i]) * scale) * wide(weight[i]), out[r * size + i]);
    }
}

// With r = 1 / √(mean(x²) + ε) and g = grad ∘ weight: dx = r · g - x · r³ · mean(g ∘ x),
// d_weight = Σ grad ∘ x · r. Each thread has its own row of d_weight; the caller adds them.
template <typename Number>
void norm_backward(const Number *x, const Number *weight, const Number *grad, int64_t rows,
                   int64_t size, float eps, Number *dx, float *d_weight, int64_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const Number *of = x + r * size, *g = grad + r * size;
        float *mine = d_weight + omp_get_thread_num() * size;
        float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
        for (int64_t i = 0; i < size; i++) {
            squares += wide(of[i]) * wide(of[i]);
            dot += wide(g[i]) * wide(weight[i]) * wide(of[i]);
        }
        const float scale = 1.0f / std::sqrt(squares / size + eps);
        const float back = scale * scale * dot / size;
        for (int64_t i = 0; i < size; i++) {
            mine[i] += wide(g[i]) * wide(of[i]) * scale;
            put(scale * (wide(g[i]) * wide(weight[i]) - wide(of[i]) * back), dx[r * size + i]);
        }
    }
}

// out = silu(gate) ∘ up, for a multiple of 16 elements; silu is rounded before the product.
template <typename Number>
void swiglu(const Number *gate, const Number *up, int64_t size, Number *out, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector x = load(gate + i);
        Number silu[LANES];
        store(x * sigmoid(x), silu);
        store(load(silu) * load(up + i), out + i);
    }
}

// With s = sigmoid(gate): d_up = grad ∘ gate ∘ s, d_gate = grad ∘ up ∘ s ∘ (1 + gate ∘ (1 - s)).
template <typename Number>
void swiglu_backward(const Number *gate, const Number *up, const Number *grad, int64_t size,
                     Number *d_gate, Number *d_up, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector x = load(gate + i), g = load(grad + i), s = sigmoid(x);
        store(g * x * s, d_up + i);
        store(g * load(up + i) * s * (1.0f + x * (1.0f - s)), d_gate + i);
    }
}

// Inverse-CDF sampling from a row of logits. Sums of blocks are kept, so that only the block of the
// drawn token is summed again.
struct Row : Logits<float> {
    float *sums;  // of each block
    double total = 0;

    Row(const float *x, int64_t size, double scale, float *sums)
        : Logits(x, size, scale), sums(sums)
    {
        for (int64_t block = 0; block < blocks(size); block++)
            total += sums[block] = sum_of_block(block);
    }

    // The first token whose cumulative weight exceeds uniform · total. Where rounding leaves none
    // in its block, the last one there with a positive weight; with NaN logits, the last of all.
    int64_t token(double uniform) const
    {
        // Less than the total, because uniform is less than 1.
        const double target = uniform * total;
        double before = 0;
        int64_t block = 0, count = blocks(size), found = size - 1;
        while (block < count && !(before + sums[block] > target))
            before += sums[block++];
        if (block == count)
            return found;
        for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, size); i += LANES) {
            const Vector weight = weights(i);
            for (int64_t j = 0; j < std::min<int64_t>(LANES, size - i); j++) {
                before += weight[j];
                found = weight[j] > 0 ? i + j : found;
                if (before > target)
                    return found;
            }
        }
        return found;
    }
};

}  // namespace

// Each product and the sum are rounded, as where they are operations of their own.
template <typename Number>
void rotary(Number *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const Number *cos,
            const Number *sin, const int64_t *position, int64_t threads)
{
    const auto times = [](Number a, Number b) { return rounded<Number>(wide(a) * wide(b)); };
#pragma omp parallel for num_threads(threads) if (rows * row > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const Number *c = cos + position[r] * dim, *s = sin + position[r] * dim;
        for (int64_t h = 0; h < heads; h++) {
            Number *low = x + r * row + h * dim, *high = low + dim / 2;
            for (int64_t i = 0; i < dim / 2; i++) {
                const Number a = low[i], b = high[i];
                put(times(a, c[i]) + times(b, s[i]), low[i]);
                put(times(b, c[dim / 2 + i]) + times(a, s[dim / 2 + i]), high[i]);
            }
        }
    }
}

template void rotary(float *, int64_t, int64_t, int64_t, int64_t, const float *, const float *,
                     const int64_t *, int64_t);
template void rotary(Narrow *, int64_t, int64_t, int64_t, int64_t, const Narrow *, const Narrow *,
                     const int64_t *, int64_t);

template <typename Number>
void rms_norm(const Number *x, const Norm<Number> &of, int64_t rows, int64_t size, Number *out,
              int64_t threads)
{
    norm(x, of.weight, rows, size, (float)of.eps, out, threads);
}

template void rms_norm(const float *, const Norm<float> &, int64_t, int64_t, float *, int64_t);
template void rms_norm(const Narrow *, const Norm<Narrow> &, int64_t, int64_t, Narrow *, int64_t);

extern "C" {

#define NORM_AND_SWIGLU(name, Number)                                                              \
    void rms_norm_##name(const Number *x, const Number *weight, int64_t rows, int64_t size,        \
                         double eps, Number *out, int64_t threads)                                 \
    {                                                                                              \
        norm(x, weight, rows, size, (float)eps, out, threads);                                     \
    }                                                                                              \
    void rms_norm_backward_##name(const Number *x, const Number *weight, const Number *grad,       \
                                  int64_t rows, int64_t size, double eps, Number *dx,              \
                                  float *d_weight, int64_t threads)                                \
    {                                                                                              \
        norm_backward(x, weight, grad, rows, size, (float)eps, dx, d_weight, threads);             \
    }                                                                                              \
    void swiglu_##name(const Number *gate, const Number *up, int64_t size, Number *out,            \
                       int64_t threads)                                                            \
    {                                                                                              \
        swiglu(gate, up, size, out, threads);                                                      \
    }                                                                                              \
    void swiglu_backward_##name(const Number *gate, const Number *up, const Number *grad,          \
                                int64_t size, Number *d_gate, Number *d_up, int64_t threads)       \
    {                                                                                              \
        swiglu_backward(gate, up, grad, size, d_gate, d_up, threads);                              \
    }

NORM_AND_SWIGLU(float32, float)
NORM_AND_SWIGLU(bfloat16, Narrow)

// Tokens drawn from softmax(logits · scale), and their log-probabilities. Returns 0, or 1 when out
// of memory.
int draw_tokens(const float *logits, int64_t rows, int64_t size, double scale,
                const double *uniform, int64_t *token, float *logp, int64_t threads)
{
    const int64_t blocks = Row::blocks(size);
    float *sums = (float *)std::malloc(sizeof(float) * blocks * threads);
    if (!sums)
        return 1;
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const Row row(logits + r * size, size, scale, sums + blocks * omp_get_thread_num());
        token[r] = row.token(uniform[r]);
        logp[r] = (row.x[token[r]] - row.top) * row.scale - std::log(row.total);
    }
    std::free(sums);
    return 0;
}

}

// Norms, activations, rotations and softmax.

#include <cmath>
#include <cstring>
#include <limits>
#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 128;  // numbers whose sum is taken in float32

INLINE void normalise(const float *x, const float *weight, int64_t size, float eps, float *out)
{
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++)
        squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = x[i] * scale * weight[i];
}

// What is less than e^-87 of the largest is nothing.
INLINE Vector power(Vector x)
{
    const Vector result = exponential(x);
    return x < -87.0f ? Vector{} : result;
}

// Softmax of a row in place; returns the logarithm of the sum. Sums of more than a block are taken
// in float64.
float soften(float *x, int64_t size)
{
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t whole = size / LANES * LANES;
    Vector last = Vector{} + lowest, most = last;
    std::memcpy(&last, x + whole, sizeof(float) * (size - whole));
    for (int64_t i = 0; i < whole; i += LANES)
        most = at(x + i) > most ? at(x + i) : most;
    most = last > most ? last : most;
    float top = lowest;
    for (int i = 0; i < LANES; i++)
        top = most[i] > top ? most[i] : top;
    last = power(last - top);
    double total = sum(last);
    for (int64_t start = 0; start < whole; start += BLOCK) {
        Vector some{};
        for (int64_t i = start; i < std::min(start + BLOCK, whole); i += LANES)
            some += at(x + i) = power(at(x + i) - top);
        total += sum(some);
    }
    std::memcpy(x + whole, &last, sizeof(float) * (size - whole));
    const float scale = 1.0 / total;
    for (int64_t i = 0; i < size; i++)
        x[i] *= scale;
    return top + std::log(total);
}

}  // namespace

extern "C" {

void rms_norm(const float *x, const float *weight, int64_t rows, int64_t size, double eps,
              float *out, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++)
        normalise(x + r * size, weight, size, (float)eps, out + r * size);
}

// With r = 1 / √(mean(x²) + ε) and g = grad ∘ weight: dx = r · g - x · r³ · mean(g ∘ x),
// d_weight = Σ grad ∘ x · r. Every thread has its own row of d_weight, to be added up.
void rms_norm_backward(const float *x, const float *weight, const float *grad, int64_t rows,
                       int64_t size, double eps, float *dx, float *d_weight, int64_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *of = x + r * size, *g = grad + r * size;
        float *mine = d_weight + omp_get_thread_num() * size;
        float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
        for (int64_t i = 0; i < size; i++)
            squares += of[i] * of[i], dot += g[i] * weight[i] * of[i];
        const float scale = 1.0f / std::sqrt(squares / size + (float)eps);
        const float back = scale * scale * dot / size;
        for (int64_t i = 0; i < size; i++) {
            mine[i] += g[i] * of[i] * scale;
            dx[r * size + i] = scale * (g[i] * weight[i] - of[i] * back);
        }
    }
}

// out = silu(gate) ∘ up
void swiglu(const float *gate, const float *up, int64_t size, float *out, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size / LANES * LANES; i += LANES) {
        const Vector x = at(gate + i);
        at(out + i) = x / (exponential(-x) + 1.0f) * at(up + i);
    }
    for (int64_t i = size / LANES * LANES; i < size; i++)
        out[i] = gate[i] / (std::exp(-gate[i]) + 1.0f) * up[i];
}

// With s = 1 / (1 + e^-gate): d_up = grad ∘ gate ∘ s,
// d_gate = grad ∘ up ∘ s ∘ (1 + gate ∘ (1 - s)).
void swiglu_backward(const float *gate, const float *up, const float *grad, int64_t size,
                     float *d_gate, float *d_up, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (size > SMALL)
    for (int64_t i = 0; i < size / LANES * LANES; i += LANES) {
        const Vector x = at(gate + i), g = at(grad + i), s = 1.0f / (exponential(-x) + 1.0f);
        at(d_up + i) = g * x * s;
        at(d_gate + i) = g * at(up + i) * s * (1.0f + x * (1.0f - s));
    }
    for (int64_t i = size / LANES * LANES; i < size; i++) {
        const float x = gate[i], s = 1.0f / (std::exp(-x) + 1.0f);
        d_up[i] = grad[i] * x * s;
        d_gate[i] = grad[i] * up[i] * s * (1.0f + x * (1.0f - s));
    }
}

// x ← e^(x - norm), norm = log Σ e^x, of every row.
void softmax(float *x, int64_t rows, int64_t size, float *norm, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++)
        norm[r] = soften(x + r * size, size);
}

void turn(float *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const float *cos,
          const float *sin, const int64_t *position, int64_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows * row > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cos + position[r] * dim, *s = sin + position[r] * dim;
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + r * row + h * dim, *high = low + dim / 2;
            for (int64_t i = 0; i < dim / 2; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] + b * s[i];
                high[i] = b * c[dim / 2 + i] + a * s[dim / 2 + i];
            }
        }
    }
}
}

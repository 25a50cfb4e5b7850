// Log-probabilities of chosen tokens from rows of logits, their entropy, and the gradient of both,
// which takes the place of the logits. Rows are read once from memory and then from the cache;
// nothing of their size is written but that gradient.

#include <cmath>

#include "softmax.h"

namespace {

constexpr float LEAST = -88;  // exponents below it have the weight 0: 0 · inf would be NaN

INLINE Vector finite(Vector exponent) { return exponent < LEAST ? Vector{} + LEAST : exponent; }

bool outside(const int64_t *target, int64_t rows, int64_t size)
{
    return std::any_of(target, target + rows, [=](int64_t t) { return t < 0 || t >= size; });
}

// With s = (x - top) · scale and total = Σ e^s:
//
//     logp = s[target] - log total,   entropy = log total - Σ e^s · s / total
//
// whose terms all have one sign. `norm` gets top and total of each row.
template <typename Number>
void log_softmax(const Logits<Number> &row, int64_t target, float *logp, float *entropy, float *norm)
{
    double total = 0, moment = 0;
    if (!entropy)
        for (int64_t block = 0; block < row.blocks(row.size); block++)
            total += row.sum_of_block(block);
    else
        for (int64_t start = 0; start < row.size; start += BLOCK) {
            Vector weights{}, moments{};
            for (int64_t i = start; i < std::min(start + BLOCK, row.size); i += LANES) {
                const Vector exponent = row.exponents(i), weight = exp_flushed(exponent);
                weights += weight;
                moments += weight * finite(exponent);
            }
            total += sum(weights), moment += sum(moments);
        }
    *logp = (wide(row.x[target]) - row.top) * row.scale - std::log(total);
    if (entropy)
        *entropy = std::log(total) - moment / total;
    norm[0] = row.top, norm[1] = total;
}

// The loss's gradients of log-probability and entropy, and the entropy.
struct Upstream {
    float logp, entropy, of_entropy;
};

// With p = e^s / total, a row becomes
//
//     ((1[target] - p) · grad + p · (-log p - entropy) · grad_entropy) · scale,
//
// computed in float32 and rounded once.
template <bool ENTROPY, typename Number>
void log_softmax_gradient(Number *x, const Logits<Number> &row, int64_t target, float total,
                          const Upstream &grad)
{
    const float share = 1.0f / total, spread = std::log(total) - grad.entropy;
    const auto of = [&](Vector logits) {
        const Vector exponent = (logits - row.top) * row.scale;
        const Vector p = exp_flushed(exponent) * share, d = p * -grad.logp;
        if constexpr (ENTROPY)
            return d + p * (spread - finite(exponent)) * grad.of_entropy;
        return d;
    };
    const float own = of(Vector{} + wide(x[target]))[0] + grad.logp;
    int64_t i = 0;
    for (; i + LANES <= row.size; i += LANES)
        store(of(load(x + i)) * row.scale, x + i);
    if (i < row.size) {
        Number last[LANES];
        store(of(row.some(i)) * row.scale, last);
        std::memcpy(x + i, last, sizeof(Number) * (row.size - i));
    }
    put(own * row.scale, x[target]);
}

}  // namespace

extern "C" {

// `entropy` may be null, and then it is not computed. They return 0, or 1 where a target is not a
// token; nothing is computed then.
#define LOG_SOFTMAX(name, Number)                                                                  \
    int selective_log_softmax_##name(const Number *logits, const int64_t *target, int64_t rows,    \
                                     int64_t size, double scale, float *logp, float *entropy,      \
                                     float *norm, int64_t threads)                                 \
    {                                                                                              \
        if (outside(target, rows, size))                                                           \
            return 1;                                                                              \
        _Pragma("omp parallel for num_threads(threads) if (rows * size > SMALL)")                  \
        for (int64_t r = 0; r < rows; r++)                                                         \
            log_softmax(Logits<Number>(logits + r * size, size, scale), target[r], logp + r,       \
                        entropy ? entropy + r : nullptr, norm + 2 * r);                            \
        return 0;                                                                                  \
    }                                                                                              \
    int selective_log_softmax_backward_##name(                                                     \
        Number *logits, const int64_t *target, const float *norm, const float *grad,               \
        const float *entropy, const float *entropy_grad, int64_t rows, int64_t size, double scale, \
        int64_t threads)                                                                           \
    {                                                                                              \
        if (outside(target, rows, size))                                                           \
            return 1;                                                                              \
        _Pragma("omp parallel for num_threads(threads) if (rows * size > SMALL)")                  \
        for (int64_t r = 0; r < rows; r++) {                                                       \
            Number *x = logits + r * size;                                                         \
            const Logits<Number> row(x, size, scale, norm[2 * r]);                                 \
            const float total = norm[2 * r + 1];                                                   \
            if (entropy)                                                                           \
                log_softmax_gradient<true>(x, row, target[r], total,                               \
                                           {grad[r], entropy[r], entropy_grad[r]});                \
            else                                                                                   \
                log_softmax_gradient<false>(x, row, target[r], total, {grad[r], 0, 0});            \
        }                                                                                          \
        return 0;                                                                                  \
    }

LOG_SOFTMAX(float32, float)
LOG_SOFTMAX(bfloat16, Narrow)
}

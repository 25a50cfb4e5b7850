// A Llama-like decoder layer in a rollout: fused projections, with activation and residual computed
// by the product that they follow; a decoding step through all layers is one call.

#include "decoding.h"
#include "layer.h"

template <typename Number>
struct Layer {
    Linear<Number> qkv, out, gated, down;
    Norm<Number> before, between, of_query, of_key;
    const Number *cos, *sin;  // [positions, dim]
    int64_t heads, key_heads, dim;
    int64_t window;  // the last tokens that are attended, or 0 for all
    double scaling;
    Cache<Number> cache;  // that a decoding step attends to
};

SIZE_OF(Norm, Norm<float>)
SIZE_OF(Layer, Layer<float>)

namespace {

// All functions that return a number return 0, or 1 when out of memory.

template <typename Number>
int product(Linear<Number> l, const Number *x, int64_t rows, const Number *onto, Number *out,
             int64_t threads)
{
    l.x = x, l.rows = rows, l.onto = onto, l.out = out, l.threads = threads;
    return linear(l);
}

// The heads of a row are contiguous, like the rows of a matrix.
template <typename Number>
void norm_heads(const Norm<Number> &norm, Number *x, int64_t rows, int64_t row, int64_t heads,
                int64_t dim, int64_t threads)
{
    if (!norm.weight)
        return;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > SMALL)
    for (int64_t r = 0; r < rows; r++)
        rms_norm(x + r * row, norm, heads, dim, x + r * row, 1);
}

// Queries, keys and values of x [rows, hidden]; queries and keys rotated to their positions.
template <typename Number>
int before_attention(const Layer<Number> &l, const Number *x, int64_t rows, const int64_t *position,
                     Number *qkv, int64_t threads)
{
    const int64_t hidden = l.qkv.depth, row = l.qkv.columns;
    const auto normed = scratch<Number>(rows * hidden);
    if (!normed)
        return 1;
    rms_norm(x, l.before, rows, hidden, normed.get(), threads);
    if (product<Number>(l.qkv, normed.get(), rows, nullptr, qkv, threads))
        return 1;
    norm_heads(l.of_query, qkv, rows, row, l.heads, l.dim, threads);
    norm_heads(l.of_key, qkv + l.heads * l.dim, rows, row, l.key_heads, l.dim, threads);
    rotary(qkv, rows, row, l.heads + l.key_heads, l.dim, l.cos, l.sin, position, threads);
    return 0;
}

// out = y + feed_forward(norm(y)), y = x + attended · Woᵀ; out may be x.
template <typename Number>
int after_attention(const Layer<Number> &l, const Number *attended, const Number *x, int64_t rows,
                    Number *out, int64_t threads)
{
    const int64_t hidden = l.out.columns;
    const auto normed = scratch<Number>(rows * hidden);
    const auto inner = scratch<Number>(rows * l.gated.columns);
    if (!normed || !inner)
        return 1;
    if (product(l.out, attended, rows, x, out, threads))
        return 1;
    rms_norm(out, l.between, rows, hidden, normed.get(), threads);
    return product<Number>(l.gated, normed.get(), rows, nullptr, inner.get(), threads) ||
           product<Number>(l.down, inner.get(), rows, out, out, threads);
}

// A decoding step in place: x [rows, hidden] through `count` layers.
template <typename Number>
int decode(const Layer<Number> *layers, int64_t count, const Places &places,
           const int64_t *position, Number *x, int64_t threads)
{
    const int64_t rows = places.rows;
    for (const Layer<Number> *l = layers; l < layers + count; l++) {
        const int64_t row = l->qkv.columns, of_queries = l->heads * l->dim;
        const int64_t of_keys = l->key_heads * l->dim;
        const auto qkv = scratch<Number>(rows * row), attended = scratch<Number>(rows * of_queries);
        if (!qkv || !attended || before_attention(*l, x, rows, position, qkv.get(), threads))
            return 1;
        const Number *key = qkv.get() + of_queries, *value = key + of_keys;
        const Attention<Number> attention{
            {qkv.get(), row, l->dim}, {key, row, l->dim}, {value, row, l->dim}, attended.get(),
            l->cache, places, l->heads, l->window, threads, l->scaling,
        };
        if (attend(attention) || after_attention(*l, attended.get(), x, rows, x, threads))
            return 1;
    }
    return 0;
}

}  // namespace

extern "C" {

#define LAYER(name, Number)                                                                        \
    int before_attention_##name(const Layer<Number> *layer, const Number *x, int64_t rows,         \
                                const int64_t *position, Number *qkv, int64_t threads)             \
    {                                                                                              \
        return before_attention(*layer, x, rows, position, qkv, threads);                          \
    }                                                                                              \
    int after_attention_##name(const Layer<Number> *layer, const Number *attended,                 \
                               const Number *x, int64_t rows, Number *out, int64_t threads)        \
    {                                                                                              \
        return after_attention(*layer, attended, x, rows, out, threads);                           \
    }                                                                                              \
    int decode_##name(const Layer<Number> *layers, int64_t count, const Places *places,            \
                      const int64_t *position, Number *x, int64_t threads)                         \
    {                                                                                              \
        return decode(layers, count, *places, position, x, threads);                               \
    }

LAYER(float32, float)
LAYER(bfloat16, Narrow)
}

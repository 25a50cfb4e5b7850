// A Llama-like decoder layer in a rollout: fused projections, with activation and residual computed
// by the product that they follow; a decoding step through all layers is one call.

#include "decoding.h"
#include "layer.h"

#include <memory>
#include <new>

struct Layer {
    Linear qkv, out, gated, down;
    Norm before, between, of_query, of_key;
    const float *cos, *sin;  // [positions, dim]
    int64_t heads, key_heads, dim;
    int64_t window;  // the last tokens that are attended, or 0 for all
    double scaling;
    Cache<float> cache;  // that a decoding step attends to
};

SIZE_OF(Norm, Norm)
SIZE_OF(Layer, Layer)

namespace {

std::unique_ptr<float[]> scratch(int64_t size)
{
    return std::unique_ptr<float[]>(new (std::nothrow) float[size]);
}

void product(Linear l, const float *x, int64_t rows, const float *onto, float *out, int64_t threads)
{
    l.x = x, l.rows = rows, l.onto = onto, l.out = out, l.threads = threads;
    linear(&l);
}

// The heads of a row are contiguous, like the rows of a matrix.
void norm_heads(const Norm &norm, float *x, int64_t rows, int64_t row, int64_t heads, int64_t dim,
                int64_t threads)
{
    if (!norm.weight)
        return;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > SMALL)
    for (int64_t r = 0; r < rows; r++)
        rms_norm_float32(x + r * row, norm.weight, heads, dim, norm.eps, x + r * row, 1);
}

}  // namespace

extern "C" {

// All functions return 0, or 1 when out of memory.

// Queries, keys and values of x [rows, hidden]; queries and keys rotated to their positions.
int before_attention(const Layer *layer, const float *x, int64_t rows, const int64_t *position,
                     float *qkv, int64_t threads)
{
    const Layer &l = *layer;
    const int64_t hidden = l.qkv.depth, row = l.qkv.columns;
    const auto normed = scratch(rows * hidden);
    if (!normed)
        return 1;
    rms_norm_float32(x, l.before.weight, rows, hidden, l.before.eps, normed.get(), threads);
    product(l.qkv, normed.get(), rows, nullptr, qkv, threads);
    norm_heads(l.of_query, qkv, rows, row, l.heads, l.dim, threads);
    norm_heads(l.of_key, qkv + l.heads * l.dim, rows, row, l.key_heads, l.dim, threads);
    rotary(qkv, rows, row, l.heads + l.key_heads, l.dim, l.cos, l.sin, position, threads);
    return 0;
}

// out = y + feed_forward(norm(y)), y = x + attended · Woᵀ; out may be x.
int after_attention(const Layer *layer, const float *attended, const float *x, int64_t rows, float *out,
                    int64_t threads)
{
    const Layer &l = *layer;
    const int64_t hidden = l.out.columns;
    const auto normed = scratch(rows * hidden), inner = scratch(rows * l.gated.columns);
    if (!normed || !inner)
        return 1;
    product(l.out, attended, rows, x, out, threads);
    rms_norm_float32(out, l.between.weight, rows, hidden, l.between.eps, normed.get(), threads);
    product(l.gated, normed.get(), rows, nullptr, inner.get(), threads);
    product(l.down, inner.get(), rows, out, out, threads);
    return 0;
}

// A decoding step in place: x [rows, hidden] through `count` layers.
int decode(const Layer *layers, int64_t count, const Places *places, const int64_t *position,
           float *x, int64_t threads)
{
    const int64_t rows = places->rows;
    for (const Layer *l = layers; l < layers + count; l++) {
        const int64_t row = l->qkv.columns, of_queries = l->heads * l->dim;
        const int64_t of_keys = l->key_heads * l->dim;
        const auto qkv = scratch(rows * row), attended = scratch(rows * of_queries);
        if (!qkv || !attended || before_attention(l, x, rows, position, qkv.get(), threads))
            return 1;
        const float *key = qkv.get() + of_queries, *value = key + of_keys;
        const Attention<float> attention{
            {qkv.get(), row, l->dim}, {key, row, l->dim}, {value, row, l->dim}, attended.get(),
            l->cache, *places, l->heads, l->window, threads, l->scaling,
        };
        if (attend_float32(&attention) || after_attention(l, attended.get(), x, rows, x, threads))
            return 1;
    }
    return 0;
}
}

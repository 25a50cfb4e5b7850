// The layers of a rollout.

#include "decoding.h"
#include "layer.h"

#include <memory>
#include <new>

struct Norm {
    const float *weight;  // or null where there is none
    double eps;
};

struct Layer {
    Linear qkv, out, gated, down;
    Norm before, between, of_query, of_key;
    const float *cos, *sin;  // [positions, dim]
    int64_t heads, key_heads, dim;
    int64_t window;  // of its attention
    double scaling;
    Cache<float> cache;  // where a decoding step attends
};

namespace {

std::unique_ptr<float[]> room(int64_t numbers)
{
    return std::unique_ptr<float[]>(new (std::nothrow) float[numbers]);
}

void product(Linear l, const float *x, int64_t rows, const float *onto, float *out, int64_t threads)
{
    l.x = x, l.rows = rows, l.onto = onto, l.out = out, l.threads = threads;
    linear(&l);
}

// Heads of a row lie side by side, as the rows of a matrix do.
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

// All functions: 0, or 1 where there was no memory.

// Queries, keys and values of x [rows, hidden], the first two turned to their positions.
int before_attention(const Layer *layer, const float *x, int64_t rows, const int64_t *position,
                     float *qkv, int64_t threads)
{
    const Layer &l = *layer;
    const int64_t hidden = l.qkv.depth, row = l.qkv.columns;
    const auto normed = room(rows * hidden);
    if (!normed)
        return 1;
    rms_norm_float32(x, l.before.weight, rows, hidden, l.before.eps, normed.get(), threads);
    product(l.qkv, normed.get(), rows, nullptr, qkv, threads);
    norm_heads(l.of_query, qkv, rows, row, l.heads, l.dim, threads);
    norm_heads(l.of_key, qkv + l.heads * l.dim, rows, row, l.key_heads, l.dim, threads);
    turn(qkv, rows, row, l.heads + l.key_heads, l.dim, l.cos, l.sin, position, threads);
    return 0;
}

// out = y + feed_forward(y), y = x + what was seen · Woᵀ; out may be x.
int after_attention(const Layer *layer, const float *seen, const float *x, int64_t rows, float *out,
                    int64_t threads)
{
    const Layer &l = *layer;
    const int64_t hidden = l.out.columns;
    const auto normed = room(rows * hidden), inner = room(rows * l.gated.columns);
    if (!normed || !inner)
        return 1;
    product(l.out, seen, rows, x, out, threads);
    rms_norm_float32(out, l.between.weight, rows, hidden, l.between.eps, normed.get(), threads);
    product(l.gated, normed.get(), rows, nullptr, inner.get(), threads);
    product(l.down, inner.get(), rows, out, out, threads);
    return 0;
}

// A decoding step in place: x [rows, hidden] through so many layers.
int decode(const Layer *layers, int64_t count, const Places *places, const int64_t *position,
           float *x, int64_t threads)
{
    const int64_t rows = places->rows;
    for (const Layer *l = layers; l < layers + count; l++) {
        const int64_t row = l->qkv.columns, of_queries = l->heads * l->dim;
        const int64_t of_keys = l->key_heads * l->dim;
        const auto qkv = room(rows * row), seen = room(rows * of_queries);
        if (!qkv || !seen || before_attention(l, x, rows, position, qkv.get(), threads))
            return 1;
        const float *key = qkv.get() + of_queries, *value = key + of_keys;
        const Attention<float> attention{
            {qkv.get(), row, l->dim}, {key, row, l->dim}, {value, row, l->dim}, seen.get(),
            l->cache, *places, l->heads, l->window, threads, l->scaling,
        };
        if (attend_float32(&attention) || after_attention(l, seen.get(), x, rows, x, threads))
            return 1;
    }
    return 0;
}
}

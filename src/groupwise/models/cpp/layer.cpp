// A layer of a rollout, but for its attention.

#include "layer.h"
#include "vectors.h"

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
    int64_t heads, key_heads, dim, threads;
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

// Queries, keys and values of x [rows, hidden], the first two turned to their positions. 0, or 1
// where there was no memory.
int before_attention(const Layer *layer, const float *x, int64_t rows, const int64_t *position,
                     float *qkv)
{
    const Layer &l = *layer;
    const int64_t hidden = l.qkv.depth, row = l.qkv.columns;
    const auto normed = room(rows * hidden);
    if (!normed)
        return 1;
    rms_norm_float32(x, l.before.weight, rows, hidden, l.before.eps, normed.get(), l.threads);
    product(l.qkv, normed.get(), rows, nullptr, qkv, l.threads);
    norm_heads(l.of_query, qkv, rows, row, l.heads, l.dim, l.threads);
    norm_heads(l.of_key, qkv + l.heads * l.dim, rows, row, l.key_heads, l.dim, l.threads);
    turn(qkv, rows, row, l.heads + l.key_heads, l.dim, l.cos, l.sin, position, l.threads);
    return 0;
}

// out = y + feed_forward(y), y = x + what was seen · Woᵀ. 0, or 1 where there was no memory.
int after_attention(const Layer *layer, const float *seen, const float *x, int64_t rows, float *out)
{
    const Layer &l = *layer;
    const int64_t hidden = l.out.columns;
    const auto normed = room(rows * hidden), inner = room(rows * l.gated.columns);
    if (!normed || !inner)
        return 1;
    product(l.out, seen, rows, x, out, l.threads);
    rms_norm_float32(out, l.between.weight, rows, hidden, l.between.eps, normed.get(), l.threads);
    product(l.gated, normed.get(), rows, nullptr, inner.get(), l.threads);
    product(l.down, inner.get(), rows, out, out, l.threads);
    return 0;
}
}

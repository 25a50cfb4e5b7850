// Tree attention: packed groups, forward and backward, where every completion attends to the one copy
// of its prompt. Scores of a block of queries are kept, and weights are recomputed from the
// log-normaliser in the backward pass, as in FlashAttention-2 (Dao, 2307.08691).

#include <cmath>
#include <limits>
#include <omp.h>

#include "memory.h"
#include "tree.h"

SIZE_OF(Tree, Tree<float>)

namespace {

constexpr int64_t QUERIES = 32;  // of a block

// Queries of one span and one head. Their keys are two spans: of the prompt, and of the span itself.
// Queries are the columns of a matrix, as in `SlotHead`.
struct QueryBlock {
    struct KeySpan {
        int64_t token, size, position;  // the first key, how many, and where the first one stands
    };

    const Tree<float> &t;
    int64_t head, key_head, token, count, columns, position, keys;
    KeySpan spans[2];

    QueryBlock(const Tree<float> &t, int64_t span, int64_t first, int64_t head)
        : t(t), head(head), key_head(head / (t.heads / t.key_heads)), token(t.begin[span] + first),
          count(std::min(QUERIES, t.length[span] - first)),
          columns((count + LANES - 1) / LANES * LANES)
    {
        const int64_t owner = t.owner[span], prompt = owner < 0 ? 0 : t.length[owner];
        position = prompt + first;
        const int64_t hidden = t.window ? std::max<int64_t>(0, position + 1 - t.window) : 0;
        const int64_t of_prompt = std::min(hidden, prompt), own = hidden - of_prompt;
        spans[0] = {owner < 0 ? 0 : t.begin[owner] + of_prompt, prompt - of_prompt, of_prompt};
        spans[1] = {t.begin[span] + own, first + count - own, prompt + own};
        keys = spans[0].size + spans[1].size;
    }

    // Offset of a query in [tokens, heads, dim].
    int64_t place(int64_t q) const { return ((token + q) * t.heads + head) * t.dim; }

    void transposed_queries(const float *rows, int64_t row, float *transposed) const
    {
        if (count < columns)
            std::fill(transposed, transposed + t.dim * columns, 0.0f);
        transpose(rows, row, count, t.dim, transposed, columns);
    }

    // scores[keys, columns] = rows[keys, dim] · transposed[dim, columns]
    void score(const Heads<float> &rows, const float *transposed, float *scores) const
    {
        std::fill(scores, scores + keys * columns, 0.0f);
        for (const KeySpan &s : spans) {
            multiply(s.size, columns, t.dim, {rows.of(s.token, key_head), rows.row, 1}, transposed,
                     columns, scores, columns);
            scores += s.size * columns;
        }
    }

    // out[count, dim] = weights[keys, count]ᵀ · rows[keys, dim]
    void weighted_sum(const Heads<float> &rows, const float *weights, float *out) const
    {
        for (int64_t q = 0; q < count; q++)
            std::fill(out + q * t.heads * t.dim, out + q * t.heads * t.dim + t.dim, 0.0f);
        for (const KeySpan &s : spans) {
            multiply(count, t.dim, s.size, {weights, 1, columns}, rows.of(s.token, key_head),
                     rows.row, out, t.heads * t.dim);
            weights += s.size * columns;
        }
    }

    // grad[keys, dim] += weights[keys, count] · rows[count, dim]
    void scatter(const float *weights, const float *rows, int64_t row, float *grad) const
    {
        for (const KeySpan &s : spans) {
            multiply(s.size, t.dim, count, {weights, columns, 1}, rows, row,
                     grad + (s.token * t.key_heads + key_head) * t.dim, t.key_heads * t.dim);
            weights += s.size * columns;
        }
    }

    // Sets the entries of masked keys: later ones, and those before the window of a query.
    void mask(float *scores, float value) const
    {
        for (const KeySpan &s : spans)
            for (int64_t k = s.position; k < s.position + s.size; k++, scores += columns) {
                const int64_t end = t.window ? k + t.window - position : columns;
                if (k > position)
                    std::fill(scores, scores + (k - position), value);
                if (end < columns)
                    std::fill(scores + end, scores + columns, value);
            }
    }

    int64_t scratch_size() const { return 2 * columns * (keys + t.dim) + 2 * columns; }

    void forward(float *scratch) const
    {
        float *transposed = scratch, *scores = transposed + t.dim * columns;
        float *top = scores + keys * columns, *total = top + columns;
        transposed_queries(t.query.of(token, head), t.query.row, transposed);
        score(t.key, transposed, scores);
        mask(scores, -std::numeric_limits<float>::infinity());
        const float scaling = t.scaling;
        for (int64_t q = 0; q < columns; q += LANES) {
            Vector most = Vector{} - std::numeric_limits<float>::infinity(), sum{};
            for (int64_t k = 0; k < keys; k++) {
                const Vector x = at(scores + k * columns + q) * scaling;
                most = larger(x, most);
            }
            for (int64_t k = 0; k < keys; k++) {
                Vector &x = at(scores + k * columns + q);
                x = exponential(x * scaling - most);
                sum += x;
            }
            at(top + q) = most, at(total + q) = sum;
        }
        mask(scores, 0.0f);
        weighted_sum(t.value, scores, t.out + place(0));
        for (int64_t q = 0; q < count; q++) {
            t.norm[(token + q) * t.heads + head] = top[q] + std::log(total[q]);
            for (int64_t d = 0; d < t.dim; d++)
                t.out[place(q) + d] /= total[q];
        }
    }

    //   P = exp(QKᵀ · scaling - norm),  dV = Pᵀ dO,  dP = dO Vᵀ,
    //   dS = P ∘ (dP - rowsum(P ∘ dP)) · scaling,  dQ = dS K,  dK = dSᵀ Q
    // rowsum(dO ∘ O) is the same, but takes the output of the forward pass. P is divided by its sum,
    // which the rounding of large scores moves away from 1.
    void backward(float *scratch, int64_t part) const
    {
        float *transposed = scratch, *weights = transposed + t.dim * columns;
        float *grads = weights + keys * columns, *transposed_grad = grads + keys * columns;
        float *norm = transposed_grad + t.dim * columns, *mean = norm + columns;
        const float *query = t.query.of(token, head), *out_grad = t.out_grad + place(0);
        const int64_t row = t.heads * t.dim, whole = t.tokens * t.key_heads * t.dim;
        transposed_queries(query, t.query.row, transposed);
        score(t.key, transposed, weights);
        transposed_queries(out_grad, row, transposed_grad);
        score(t.value, transposed_grad, grads);
        std::fill(norm, norm + columns, 0.0f);
        for (int64_t q = 0; q < count; q++)
            norm[q] = t.norm[(token + q) * t.heads + head];
        const float scaling = t.scaling;
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x = exponential(x * scaling - at(norm + q));
            }
        mask(weights, 0.0f);
        for (int64_t q = 0; q < columns; q += LANES) {
            Vector sum{}, total{};
            for (int64_t k = 0; k < keys; k++) {
                const Vector weight = at(weights + k * columns + q);
                sum += weight * at(grads + k * columns + q), total += weight;
            }
            at(mean + q) = sum / total;
        }
        scatter(weights, out_grad, row, t.value_grad + part * whole);
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x *= (at(grads + k * columns + q) - at(mean + q)) * scaling;
            }
        weighted_sum(t.key, weights, t.query_grad + place(0));
        scatter(weights, query, t.query.row, t.key_grad + part * whole);
    }
};

// Scratch memory of all threads, or null when out of memory.
Memory<float> tree_scratch(const Tree<float> &t, int64_t &each)
{
    each = 0;
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t first = 0; first < t.length[s]; first += QUERIES)
            each = std::max(each, QueryBlock(t, s, first, 0).scratch_size());
    each = (each + LANES - 1) / LANES * LANES;
    return memory_of<float>(each * t.threads);
}

}  // namespace

extern "C" {

// Returns 0, or 1 when out of memory.
int tree_forward_float32(const Tree<float> *call)
{
    const Tree<float> &t = *call;
    int64_t each;
    const auto scratch = tree_scratch(t, each);
    if (!scratch)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(2)
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t h = 0; h < t.heads; h++)
            for (int64_t first = 0; first < t.length[s]; first += QUERIES)
                QueryBlock(t, s, first, h).forward(scratch.get() + each * omp_get_thread_num());
    return 0;
}

// Returns 0, or 1 when out of memory.
int tree_backward_float32(const Tree<float> *call)
{
    const Tree<float> &t = *call;
    int64_t each;
    const auto scratch = tree_scratch(t, each);
    if (!scratch)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(3)
    for (int64_t prompt = 0; prompt < t.spans; prompt++)
        for (int64_t part = 0; part < t.parts; part++)
            for (int64_t head = 0; head < t.key_heads; head++)
                each_owned(t, prompt, part, head, QUERIES, [&](int64_t s, int64_t first, int64_t h) {
                    float *own = scratch.get() + each * omp_get_thread_num();
                    QueryBlock(t, s, first, h).backward(own, part);
                });
    return 0;
}
}

// Attention of packed groups, forward and backward.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <omp.h>

#include "multiply.h"

// Packed groups: spans of tokens, each a prompt, or a completion that sees the prompt and itself.
struct Tree {
    Heads<float> query, key, value;
    float *out;             // [tokens, heads, dim]
    float *norm;            // [tokens, heads]: the logarithm of what divides the weights
    const float *out_grad;  // [tokens, heads, dim]
    float *query_grad;      // [tokens, heads, dim]
    float *key_grad, *value_grad;           // [parts, tokens, key_heads, dim], to be added to
    const int64_t *begin, *length, *owner;  // [spans]; owner: the span of the prompt, or -1
    int64_t spans, tokens, heads, key_heads, dim;
    int64_t window;  // the last tokens that are seen, or 0 for all
    int64_t parts, threads;
    double scaling;
};

namespace {

constexpr int64_t ASKED = 32;         // queries that are attended at once

// Some queries of one span, with one head. What they see lies in two places: the prompt and the
// span itself. Queries are the columns of a matrix, as they are in `Share`.
struct Asked {
    struct Seen {
        int64_t token, size, position;  // the first key, how many, and where the first one stands
    };

    const Tree &t;
    int64_t head, key_head, token, count, columns, position, keys;
    Seen seen[2];

    Asked(const Tree &t, int64_t span, int64_t first, int64_t head)
        : t(t), head(head), key_head(head / (t.heads / t.key_heads)), token(t.begin[span] + first),
          count(std::min(ASKED, t.length[span] - first)),
          columns((count + LANES - 1) / LANES * LANES)
    {
        const int64_t owner = t.owner[span], prompt = owner < 0 ? 0 : t.length[owner];
        position = prompt + first;
        const int64_t hidden = t.window ? std::max<int64_t>(0, position + 1 - t.window) : 0;
        const int64_t of_prompt = std::min(hidden, prompt), own = hidden - of_prompt;
        seen[0] = {owner < 0 ? 0 : t.begin[owner] + of_prompt, prompt - of_prompt, of_prompt};
        seen[1] = {t.begin[span] + own, first + count - own, prompt + own};
        keys = seen[0].size + seen[1].size;
    }

    // The queries' rows of [tokens, heads, dim] where they are, and of anything like it.
    int64_t place(int64_t q) const { return ((token + q) * t.heads + head) * t.dim; }

    void turn(const float *rows, int64_t row, float *turned) const
    {
        if (count < columns)
            std::fill(turned, turned + t.dim * columns, 0.0f);
        transpose(rows, row, count, t.dim, turned, columns);
    }

    // scores[keys, columns] = rows[keys, dim] · turned[dim, columns]
    void compare(const Heads<float> &rows, const float *turned, float *scores) const
    {
        std::fill(scores, scores + keys * columns, 0.0f);
        for (const Seen &s : seen) {
            multiply(s.size, columns, t.dim, {rows.of(s.token, key_head), rows.row, 1}, turned,
                     columns, scores, columns);
            scores += s.size * columns;
        }
    }

    // out[count, dim] = weights[keys, count]ᵀ · rows[keys, dim]
    void choose(const Heads<float> &rows, const float *weights, float *out) const
    {
        for (int64_t q = 0; q < count; q++)
            std::fill(out + q * t.heads * t.dim, out + q * t.heads * t.dim + t.dim, 0.0f);
        for (const Seen &s : seen) {
            multiply(count, t.dim, s.size, {weights, 1, columns}, rows.of(s.token, key_head),
                     rows.row, out, t.heads * t.dim);
            weights += s.size * columns;
        }
    }

    // grad[keys, dim] += weights[keys, count] · rows[count, dim], of every key where it belongs
    void spread(const float *weights, const float *rows, int64_t row, float *grad) const
    {
        for (const Seen &s : seen) {
            multiply(s.size, t.dim, count, {weights, columns, 1}, rows, row,
                     grad + (s.token * t.key_heads + key_head) * t.dim, t.key_heads * t.dim);
            weights += s.size * columns;
        }
    }

    // Sets what a query does not see: later keys, and those before its window.
    void hide(float *scores, float value) const
    {
        for (const Seen &s : seen)
            for (int64_t k = s.position; k < s.position + s.size; k++, scores += columns) {
                const int64_t end = t.window ? k + t.window - position : columns;
                if (k > position)
                    std::fill(scores, scores + (k - position), value);
                if (end < columns)
                    std::fill(scores + end, scores + columns, value);
            }
    }

    int64_t room() const { return 2 * columns * (keys + t.dim) + 2 * columns; }

    void forward(float *room) const
    {
        float *turned = room, *scores = turned + t.dim * columns;
        float *top = scores + keys * columns, *total = top + columns;
        turn(t.query.of(token, head), t.query.row, turned);
        compare(t.key, turned, scores);
        hide(scores, -std::numeric_limits<float>::infinity());
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
        hide(scores, 0.0f);
        choose(t.value, scores, t.out + place(0));
        for (int64_t q = 0; q < count; q++) {
            t.norm[(token + q) * t.heads + head] = top[q] + std::log(total[q]);
            for (int64_t d = 0; d < t.dim; d++)
                t.out[place(q) + d] /= total[q];
        }
    }

    //   P = exp(QKᵀ · scaling - norm),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)) · scaling,
    //   dQ = dS K,  dK = dSᵀ Q
    void backward(float *room, int64_t part) const
    {
        float *turned = room, *weights = turned + t.dim * columns;
        float *grads = weights + keys * columns, *turned_grad = grads + keys * columns;
        float *norm = turned_grad + t.dim * columns, *mean = norm + columns;
        const float *query = t.query.of(token, head), *out_grad = t.out_grad + place(0);
        const int64_t row = t.heads * t.dim, whole = t.tokens * t.key_heads * t.dim;
        turn(query, t.query.row, turned);
        compare(t.key, turned, weights);
        turn(out_grad, row, turned_grad);
        compare(t.value, turned_grad, grads);
        std::fill(norm, mean + columns, 0.0f);
        for (int64_t q = 0; q < count; q++) {
            norm[q] = t.norm[(token + q) * t.heads + head];
            for (int64_t d = 0; d < t.dim; d++)
                mean[q] += t.out[place(q) + d] * out_grad[q * row + d];
        }
        const float scaling = t.scaling;
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x = exponential(x * scaling - at(norm + q));
            }
        hide(weights, 0.0f);
        spread(weights, out_grad, row, t.value_grad + part * whole);
        for (int64_t k = 0; k < keys; k++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(weights + k * columns + q);
                x *= (at(grads + k * columns + q) - at(mean + q)) * scaling;
            }
        choose(t.key, weights, t.query_grad + place(0));
        spread(weights, query, t.query.row, t.key_grad + part * whole);
    }
};

// Everything that every thread needs to attend, or null where there is no memory.
float *tree_room(const Tree &t, int64_t &each)
{
    each = 0;
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t first = 0; first < t.length[s]; first += ASKED)
            each = std::max(each, Asked(t, s, first, 0).room());
    each = (each + LANES - 1) / LANES * LANES;
    return (float *)std::aligned_alloc(4 * LANES, sizeof(float) * std::max<int64_t>(each, LANES) *
                                                      t.threads);
}

}  // namespace

extern "C" {

// 0, or 1 where there was no memory.
int tree_forward(const Tree *given)
{
    const Tree &t = *given;
    int64_t each;
    float *room = tree_room(t, each);
    if (!room)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(2)
    for (int64_t s = 0; s < t.spans; s++)
        for (int64_t h = 0; h < t.heads; h++)
            for (int64_t first = 0; first < t.length[s]; first += ASKED)
                Asked(t, s, first, h).forward(room + each * omp_get_thread_num());
    std::free(room);
    return 0;
}

// 0, or 1 where there was no memory. No two threads add to the same keys: each takes one head of
// keys and, of a prompt, one part of its completions; the prompt itself goes with the first part.
int tree_backward(const Tree *given)
{
    const Tree &t = *given;
    const int64_t repeats = t.heads / t.key_heads;
    int64_t each;
    float *room = tree_room(t, each);
    if (!room)
        return 1;
#pragma omp parallel for num_threads(t.threads) schedule(dynamic) collapse(3)
    for (int64_t prompt = 0; prompt < t.spans; prompt++)
        for (int64_t part = 0; part < t.parts; part++)
            for (int64_t head = 0; head < t.key_heads; head++) {
                if (t.owner[prompt] >= 0)
                    continue;
                int64_t turn = 0;
                for (int64_t s = 0; s < t.spans; s++) {
                    if (s != prompt && t.owner[s] != prompt)
                        continue;
                    if ((s == prompt ? 0 : turn++ % t.parts) != part)
                        continue;
                    for (int64_t h = head * repeats; h < (head + 1) * repeats; h++)
                        for (int64_t first = 0; first < t.length[s]; first += ASKED)
                            Asked(t, s, first, h)
                                .backward(room + each * omp_get_thread_num(), part);
                }
            }
    std::free(room);
    return 0;
}
}

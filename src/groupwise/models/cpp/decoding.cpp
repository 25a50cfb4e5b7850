// Attention of a decoding step: one new token of every row, in float32 or bfloat16.

#include <cstdlib>
#include <cstring>
#include <limits>
#include <omp.h>
#include <utility>
#include <vector>

#include "multiply.h"

namespace {

constexpr int64_t AHEAD = 16;  // keys that are fetched before they are needed

// Numbers as float32: where they are, or copied to a room.
INLINE const float *widened(const float *from, int64_t, float *) { return from; }
INLINE const float *widened(const Narrow *from, int64_t size, float *room)
{
    for (int64_t i = 0; i < size; i++)
        room[i] = wide(from[i]);
    return room;
}

}  // namespace

template <typename Number>
struct Attention {
    Heads<Number> query, key, value;
    Number *out;                              // [rows, heads, dim]
    const Number *prompt_key, *prompt_value;  // [slots, key_heads, prompt_capacity, dim]
    Number *suffix_key, *suffix_value;        // [slots, key_heads, group, suffix_capacity, dim]
    const int64_t *slot, *sample, *time;      // [rows], in the order of slots
    const int64_t *prompt_length;             // [slots]
    int64_t rows, heads, key_heads, dim, group, prompt_capacity, suffix_capacity;
    int64_t window;  // the last tokens that are seen, or 0 for all
    int64_t threads;
    double scaling;
};

namespace {

// The rows of one slot, with one key head: what they see, and room to compute it.
//
// Queries are the rows times the heads that share the key head. For the prompt they are the columns
// of a matrix, so that a tile of scores is a few keys by 32 queries.
template <typename Number>
struct Share {
    const Attention<Number> &a;
    int64_t first, rows, repeats, queries, columns;  // columns: queries up to a multiple of 16
    int64_t hidden_prompt, hidden_suffix;            // tokens before the window
    int64_t prompt, suffix, width;  // tokens in it; width: suffix up to a multiple of 16
    int64_t key_head, cell;
    float *asked;                 // [queries, dim], scaled
    float *turned;                // [dim, columns]
    float *to_prompt;             // [prompt, columns]
    float *to_suffix;             // [queries, width]
    float *top, *total, *result;  // [columns], [columns], [queries, dim]
    float *copy;                  // keys or values in float32

    Share(const Attention<Number> &a, int64_t begin, int64_t end)
        : a(a), first(begin), rows(end - begin), repeats(a.heads / a.key_heads)
    {
        const int64_t length = a.prompt_length[a.slot[begin]], own = a.time[begin] + 1;
        const int64_t hidden = a.window ? std::max<int64_t>(0, length + own - a.window) : 0;
        queries = rows * repeats;
        columns = (queries + LANES - 1) / LANES * LANES;
        hidden_prompt = std::min(hidden, length), hidden_suffix = hidden - hidden_prompt;
        prompt = length - hidden_prompt, suffix = own - hidden_suffix;
        width = (suffix + LANES - 1) / LANES * LANES;
    }

    // Divides a room, if there is one yet, among what is computed for a key head; returns its size.
    int64_t take(float *room, int64_t head)
    {
        key_head = head, cell = a.slot[first] * a.key_heads + head;
        int64_t size = 0;
        const auto part = [&](int64_t numbers) {
            const int64_t start = std::exchange(size, size + numbers);
            return room ? room + start : nullptr;
        };
        asked = part(queries * a.dim), turned = part(columns * a.dim);
        to_prompt = part(columns * prompt), to_suffix = part(queries * width);
        top = part(columns), total = part(columns), result = part(queries * a.dim);
        copy = part(sizeof(Number) < sizeof(float) ? std::max(prompt, suffix) * a.dim : 0);
        return size;
    }

    int64_t of_prompt() const { return (cell * a.prompt_capacity + hidden_prompt) * a.dim; }

    int64_t of_suffix(int64_t row) const
    {
        return (cell * a.group + a.sample[row]) * a.suffix_capacity * a.dim;
    }

    void score_prompt()
    {
        std::fill(turned, to_suffix, 0.0f);
        for (int64_t q = 0; q < queries; q++) {
            const Number *query = a.query.of(first + q / repeats, key_head * repeats + q % repeats);
            for (int64_t d = 0; d < a.dim; d++) {
                asked[q * a.dim + d] = wide(query[d]) * (float)a.scaling;
                turned[d * columns + q] = asked[q * a.dim + d];
            }
        }
        const float *key = widened(a.prompt_key + of_prompt(), prompt * a.dim, copy);
        multiply(prompt, columns, a.dim, {key, a.dim, 1}, turned, columns, to_prompt, columns);
        std::fill(top, total, -std::numeric_limits<float>::infinity());
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES) {
                const Vector x = at(to_prompt + t * columns + q), most = at(top + q);
                at(top + q) = x > most ? x : most;
            }
    }

    // Notes the new keys and values first.
    void score_suffix()
    {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t begin = of_suffix(first + r), last = begin + a.time[first + r] * a.dim;
            const int64_t start = begin + hidden_suffix * a.dim;
            std::memcpy(a.suffix_key + last, a.key.of(first + r, key_head), sizeof(Number) * a.dim);
            std::memcpy(a.suffix_value + last, a.value.of(first + r, key_head),
                        sizeof(Number) * a.dim);
            const float *keys = widened(a.suffix_key + start, suffix * a.dim, copy);
            for (int64_t t = 0; t < suffix; t++) {
                const float *key = keys + t * a.dim;
                for (int64_t d = 0; d < a.dim; d += LANES) {
                    __builtin_prefetch(key + AHEAD * a.dim + d);
                    __builtin_prefetch(a.suffix_value + start + t * a.dim + d);
                }
                for (int64_t q = r * repeats; q < (r + 1) * repeats; q++) {
                    Vector product{};
                    for (int64_t d = 0; d < a.dim; d += LANES)
                        product += at(asked + q * a.dim + d) * at(key + d);
                    const float x = sum(product);
                    to_suffix[q * width + t] = x;
                    top[q] = x > top[q] ? x : top[q];
                }
            }
            for (int64_t q = r * repeats; q < (r + 1) * repeats; q++)
                std::fill(to_suffix + q * width + suffix, to_suffix + (q + 1) * width,
                          -std::numeric_limits<float>::infinity());
        }
    }

    // Scores become weights, which are divided by their sum at the end.
    void weigh()
    {
        std::fill(total, total + columns, 0.0f);
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(to_prompt + t * columns + q);
                x = exponential(x - at(top + q));
                at(total + q) += x;
            }
        for (int64_t q = 0; q < queries; q++) {
            Vector more{};
            for (int64_t t = 0; t < width; t += LANES) {
                Vector &x = at(to_suffix + q * width + t);
                x = exponential(x - top[q]);
                more += x;
            }
            total[q] += sum(more);
        }
    }

    void choose()
    {
        const int64_t dim = a.dim;
        std::fill(result, result + queries * dim, 0.0f);
        const float *seen = widened(a.prompt_value + of_prompt(), prompt * dim, copy);
        multiply(queries, dim, prompt, {to_prompt, 1, columns}, seen, dim, result, dim);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t q = r * repeats, start = of_suffix(first + r) + hidden_suffix * dim;
            const float *own = widened(a.suffix_value + start, suffix * dim, copy);
            multiply(repeats, dim, suffix, {to_suffix + q * width, width, 1}, own, dim,
                     result + q * dim, dim);
            Number *out = a.out + ((first + r) * a.heads + key_head * repeats) * dim;
            for (int64_t h = 0; h < repeats; h++)
                for (int64_t d = 0; d < dim; d++)
                    put(result[(q + h) * dim + d] / total[q + h], out[h * dim + d]);
        }
    }
};

template <typename Number>
int attend(const Attention<Number> &a)
{
    std::vector<Share<Number>> shares;
    int64_t most = 0;
    for (int64_t begin = 0, end = 0; begin < a.rows; begin = end) {
        while (end < a.rows && a.slot[end] == a.slot[begin])
            end++;
        shares.emplace_back(a, begin, end);
        most = std::max(most, shares.back().take(nullptr, 0));
    }
    most = (most + LANES - 1) / LANES * LANES;
    float *room = (float *)std::aligned_alloc(4 * LANES, sizeof(float) * most * a.threads);
    if (!room)
        return 1;
    const int64_t units = shares.size() * a.key_heads;
#pragma omp parallel num_threads(a.threads)
    {
        float *mine = room + most * omp_get_thread_num();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; i++) {
            Share<Number> share = shares[i / a.key_heads];
            share.take(mine, i % a.key_heads);
            share.score_prompt();
            share.score_suffix();
            share.weigh();
            share.choose();
        }
    }
    std::free(room);
    return 0;
}

}  // namespace

extern "C" {

// 0, or 1 where there was no memory.
int attend_float32(const Attention<float> *given) { return attend(*given); }
int attend_bfloat16(const Attention<Narrow> *given) { return attend(*given); }
}

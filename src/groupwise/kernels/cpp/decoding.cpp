// Attention of a decoding step, in float32 or bfloat16: the completions of a slot share the keys of
// their prompt, whose scores are one product of matrices (the batched prefix of shared-prefix
// attention, as in "Hydragen", 2402.05099); each attends to its own suffix by itself.

#include <cstring>
#include <limits>
#include <omp.h>
#include <utility>
#include <vector>

#include "decoding.h"
#include "memory.h"

namespace {

// Rows of one slot that see the same part of its prompt, one key head, and scratch memory for them.
// Each row sees its own suffix up to its own time.
//
// Queries are the rows times the heads that share the key head. For the prompt they are the columns
// of a matrix, so that a tile of scores is a few keys by 32 queries.
template <typename Number>
struct SlotHead {
    const Attention<Number> &a;
    const Cache<Number> &cache;
    const Places &places;
    int64_t first, rows, repeats, queries, columns;  // columns: queries up to a multiple of 16
    int64_t length, hidden_prompt;  // tokens of the prompt, and those before the window
    int64_t prompt, suffix, width;  // tokens in it; the longest suffix, up to a multiple of 16
    int64_t key_head, cell;
    float *query;                 // [queries, dim], scaled
    float *transposed;            // [dim, columns]
    float *to_prompt;             // [prompt, columns]
    float *to_suffix;             // [queries, width]
    float *top, *total, *result;  // [columns], [columns], [queries, dim]
    float *copy;                  // keys or values in float32

    SlotHead(const Attention<Number> &a, int64_t begin, int64_t end)
        : a(a), cache(a.cache), places(a.places), first(begin), rows(end - begin),
          repeats(a.heads / cache.key_heads)
    {
        length = places.prompt_length[places.slot[begin]];
        hidden_prompt = std::min(hidden(a, begin), length), prompt = length - hidden_prompt;
        suffix = 0;
        for (int64_t row = begin; row < end; row++)
            suffix = std::max(suffix, suffix_of(row));
        queries = rows * repeats;
        columns = (queries + LANES - 1) / LANES * LANES;
        width = whole(suffix);
    }

    // Tokens of prompt and suffix before the window of a row.
    static int64_t hidden(const Attention<Number> &a, int64_t row)
    {
        const int64_t length = a.places.prompt_length[a.places.slot[row]];
        return a.window ? std::max<int64_t>(0, length + a.places.time[row] + 1 - a.window) : 0;
    }

    static int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

    int64_t hidden_suffix(int64_t row) const { return hidden(a, row) - hidden_prompt; }
    int64_t suffix_of(int64_t row) const { return places.time[row] + 1 - hidden_suffix(row); }

    // Assigns the parts of the scratch memory for a key head; returns its size. Null: size only.
    int64_t assign(float *scratch, int64_t head)
    {
        key_head = head, cell = places.slot[first] * cache.key_heads + head;
        int64_t size = 0;
        const auto part = [&](int64_t numbers) {
            const int64_t start = std::exchange(size, size + numbers);
            return scratch ? scratch + start : nullptr;
        };
        query = part(queries * cache.dim), transposed = part(columns * cache.dim);
        to_prompt = part(columns * prompt), to_suffix = part(queries * width);
        top = part(columns), total = part(columns), result = part(queries * cache.dim);
        copy = part(sizeof(Number) < sizeof(float) ? std::max(prompt, suffix) * cache.dim : 0);
        return size;
    }

    int64_t of_prompt() const { return (cell * cache.prompt_capacity + hidden_prompt) * cache.dim; }

    float *scores(int64_t q) const { return to_suffix + q * width; }

    int64_t of_suffix(int64_t row) const
    {
        return (cell * cache.group + places.sample[row]) * cache.suffix_capacity * cache.dim;
    }

    void score_prompt()
    {
        const int64_t dim = cache.dim;
        for (int64_t q = 0; q < queries; q++) {
            const Number *from = a.query.of(first + q / repeats, key_head * repeats + q % repeats);
            for (int64_t d = 0; d < dim; d += LANES)
                at(query + q * dim + d) = load(from + d) * (float)a.scaling;
        }
        if (queries < columns)
            std::fill(transposed, to_prompt, 0.0f);
        transpose(query, dim, queries, dim, transposed, columns);
        const float *key = widened(cache.prompt_key + of_prompt(), prompt * dim, copy);
        std::fill(to_prompt, to_suffix, 0.0f);
        multiply(prompt, columns, dim, {key, dim, 1}, transposed, columns, to_prompt, columns);
        std::fill(top, total, -std::numeric_limits<float>::infinity());
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES)
                at(top + q) = larger(at(to_prompt + t * columns + q), at(top + q));
    }

    // Writes the new keys and values, those of all rows first: several may be of one completion.
    void write()
    {
        const size_t size = sizeof(Number) * cache.dim;
        for (int64_t row = first; row < first + rows; row++) {
            const int64_t last = of_suffix(row) + places.time[row] * cache.dim;
            std::memcpy(cache.suffix_key + last, a.key.of(row, key_head), size);
            std::memcpy(cache.suffix_value + last, a.value.of(row, key_head), size);
        }
    }

    void score_suffix()
    {
        const int64_t dim = cache.dim;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t start = of_suffix(first + r) + hidden_suffix(first + r) * dim;
            const int64_t suffix = suffix_of(first + r), width = whole(suffix);
            const float *keys = widened(cache.suffix_key + start, suffix * dim, copy);
            for (int64_t t = 0; t < suffix; t += LANES) {
                const int64_t some = std::min<int64_t>(LANES, suffix - t);
                for (int64_t d = 0; d < some * dim; d += LANES) {
                    __builtin_prefetch(keys + (t + LANES) * dim + d);
                    __builtin_prefetch(cache.suffix_value + start + t * dim + d);
                }
                for (int64_t q = r * repeats; q < (r + 1) * repeats; q++)
                    score(query + q * dim, keys + t * dim, some, scores(q) + t);
            }
            for (int64_t q = r * repeats; q < (r + 1) * repeats; q++) {
                float *of_query = scores(q);
                std::fill(of_query + suffix, of_query + width,
                          -std::numeric_limits<float>::infinity());
                Vector most = Vector{} + top[q];
                for (int64_t t = 0; t < width; t += LANES)
                    most = larger(at(of_query + t), most);
                top[q] = largest(most);
            }
        }
    }

    // Dot products of a query with 16 keys or fewer.
    INLINE void score(const float *query, const float *keys, int64_t count, float *scores) const
    {
        const int64_t dim = cache.dim;
        Vector products[LANES] = {};
        if (count == LANES) {
            for (int64_t d = 0; d < dim; d += LANES)
                for (int i = 0; i < LANES; i++)
                    products[i] += at(query + d) * at(keys + i * dim + d);
            at(scores) = sums(products);
            return;
        }
        for (int64_t i = 0; i < count; i++) {
            Vector product{};
            for (int64_t d = 0; d < dim; d += LANES)
                product += at(query + d) * at(keys + i * dim + d);
            scores[i] = sum(product);
        }
    }

    // Softmax without its division, which follows the weighted sum.
    void softmax()
    {
        std::fill(total, total + columns, 0.0f);
        for (int64_t t = 0; t < prompt; t++)
            for (int64_t q = 0; q < columns; q += LANES) {
                Vector &x = at(to_prompt + t * columns + q);
                x = exponential(x - at(top + q));
                at(total + q) += x;
            }
        for (int64_t q = 0; q < queries; q++) {
            const int64_t suffix = suffix_of(first + q / repeats);
            Vector more{};
            for (int64_t t = 0; t < suffix; t += LANES) {
                Vector &x = at(scores(q) + t);
                x = exponential(x - top[q]);
                more += x;
            }
            total[q] += sum(more);
        }
    }

    void weighted_sum()
    {
        const int64_t dim = cache.dim;
        std::fill(result, result + queries * dim, 0.0f);
        const float *value = widened(cache.prompt_value + of_prompt(), prompt * dim, copy);
        multiply(queries, dim, prompt, {to_prompt, 1, columns}, value, dim, result, dim);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t q = r * repeats, row = first + r, suffix = suffix_of(row);
            const int64_t start = of_suffix(row) + hidden_suffix(row) * dim;
            const float *own = widened(cache.suffix_value + start, suffix * dim, copy);
            multiply(repeats, dim, suffix, {scores(q), width, 1}, own, dim, result + q * dim, dim);
            Number *out = a.out + (row * a.heads + key_head * repeats) * dim;
            for (int64_t h = 0; h < repeats; h++)
                for (int64_t d = 0; d < dim; d += LANES)
                    store(at(result + (q + h) * dim + d) / total[q + h], out + h * dim + d);
        }
    }
};

}  // namespace

template <typename Number>
int attend(const Attention<Number> &a)
{
    const Places &places = a.places;
    std::vector<SlotHead<Number>> shares;
    int64_t most = 0;
    bool split = false;  // a window begins in the prompt at different places for rows of one slot
    for (int64_t begin = 0, end = 0; begin < places.rows; begin = end) {
        const int64_t slot = places.slot[begin], length = places.prompt_length[slot];
        const auto hidden = [&](int64_t row) {
            return std::min(SlotHead<Number>::hidden(a, row), length);
        };
        while (end < places.rows && places.slot[end] == slot && hidden(end) == hidden(begin))
            end++;
        split |= end < places.rows && places.slot[end] == slot;
        shares.emplace_back(a, begin, end);
        most = std::max(most, shares.back().assign(nullptr, 0));
    }
    most = SlotHead<Number>::whole(most);
    const auto scratch = memory_of<float>(most * a.threads);
    if (!scratch)
        return 1;
    const int64_t units = shares.size() * a.cache.key_heads;
#pragma omp parallel num_threads(a.threads)
    {
        float *mine = scratch.get() + most * omp_get_thread_num();
        const auto share_of = [&](int64_t unit) {
            SlotHead<Number> share = shares[unit / a.cache.key_heads];
            share.assign(mine, unit % a.cache.key_heads);
            return share;
        };
        if (split) {
#pragma omp for
            for (int64_t i = 0; i < units; i++)
                share_of(i).write();
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; i++) {
            SlotHead<Number> share = share_of(i);
            if (!split)
                share.write();
            share.score_prompt();
            share.score_suffix();
            share.softmax();
            share.weighted_sum();
        }
    }
    return 0;
}

template int attend(const Attention<float> &a);
template int attend(const Attention<Narrow> &a);

SIZE_OF(Heads, Heads<float>)
SIZE_OF(Cache, Cache<float>)
SIZE_OF(Places, Places)
SIZE_OF(Attention, Attention<float>)

extern "C" {

int attend_float32(const Attention<float> *call) { return attend(*call); }
int attend_bfloat16(const Attention<Narrow> *call) { return attend(*call); }
}

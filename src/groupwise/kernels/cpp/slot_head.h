// What the rows of a slot compute in a decoding step, for one key head; decoding.cpp says how.

#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "decoding.h"

namespace {

constexpr int64_t KEYS = 128;  // that are attended to at once, at most

// Parts of a scratch memory, each from a cache line on. Without a memory, only their size.
class Parts {
    char *const memory;
    int64_t used = 0;

public:
    explicit Parts(float *memory) : memory((char *)memory) {}
    template <typename T>
    T *take(int64_t count)
    {
        const int64_t start = used;
        used += (count * sizeof(T) + 63) / 64 * 64;
        return memory ? (T *)(memory + start) : nullptr;
    }
    int64_t floats() const { return used / sizeof(float); }
};

// Rows of one slot that see the same part of its prompt, and one key head. Each row sees its own suffix
// up to its own time. Queries are the rows times the heads that share the key head.
template <typename Number>
struct SlotRows {
    const Attention<Number> &a;
    const Cache<Number> &cache;
    const Places &places;
    const int64_t first, rows, repeats, queries, dim;
    const int64_t key_head, cell;
    const int64_t length, hidden_prompt;  // tokens of the prompt, and those before the window

    SlotRows(const Attention<Number> &a, int64_t begin, int64_t end, int64_t key_head)
        : a(a), cache(a.cache), places(a.places), first(begin), rows(end - begin),
          repeats(a.heads / cache.key_heads), queries(rows * repeats), dim(cache.dim), key_head(key_head),
          cell(places.slot[begin] * cache.key_heads + key_head),
          length(places.prompt_length[places.slot[begin]]), hidden_prompt(std::min(hidden(a, begin), length))
    {
    }

    // Tokens of prompt and suffix before the window of a row.
    static int64_t hidden(const Attention<Number> &a, int64_t row)
    {
        const int64_t length = a.places.prompt_length[a.places.slot[row]];
        return a.window ? std::max<int64_t>(0, length + a.places.time[row] + 1 - a.window) : 0;
    }

    const Number *query_of(int64_t q) const
    {
        return a.query.of(first + q / repeats, key_head * repeats + q % repeats);
    }

    Number *out_of(int64_t row) const { return a.out + (row * a.heads + key_head * repeats) * dim; }

    // Where the keys and values of a token are, of the prompt and of the suffix of a row.
    int64_t of_prompt(int64_t t) const { return (cell * cache.prompt_capacity + t) * dim; }
    int64_t of_suffix(int64_t row, int64_t t) const
    {
        return ((cell * cache.group + places.sample[row]) * cache.suffix_capacity + t) * dim;
    }

    // The first token of its suffix that a row sees.
    int64_t begin_of(int64_t row) const { return hidden(a, row) - hidden_prompt; }

    // Writes the new keys and values, those of all rows first: several may be of one completion.
    void write() const
    {
        const size_t size = sizeof(Number) * dim;
        for (int64_t row = first; row < first + rows; row++) {
            const int64_t last = of_suffix(row, places.time[row]);
            std::memcpy(cache.suffix_key + last, a.key.of(row, key_head), size);
            std::memcpy(cache.suffix_value + last, a.value.of(row, key_head), size);
        }
    }

    // Calls block(place, keys, next) for KEYS tokens of the prompt at a time: where they are, how many, and
    // the keys that follow.
    template <typename Do>
    INLINE void each_of_prompt(Do block) const
    {
        for (int64_t t = hidden_prompt; t < length; t += KEYS) {
            const bool last = t + KEYS >= length;
            block(of_prompt(t), std::min(KEYS, length - t),
                  last ? first_keys(first) : cache.prompt_key + of_prompt(t + KEYS));
        }
    }

    // The same for the suffix of a row.
    template <typename Do>
    INLINE void each_of_suffix(int64_t row, Do block) const
    {
        for (int64_t t = begin_of(row), end = places.time[row] + 1; t < end; t += KEYS) {
            const bool last = t + KEYS >= end;
            block(of_suffix(row, t), std::min(KEYS, end - t),
                  last ? first_keys(row + 1) : cache.suffix_key + of_suffix(row, t + KEYS));
        }
    }

    // The first keys that a row sees of its suffix; of the last row for those after it.
    const Number *first_keys(int64_t row) const
    {
        row = std::min(row, first + rows - 1);
        return cache.suffix_key + of_suffix(row, begin_of(row));
    }

    // Reads some tokens ahead. The processor waits when it is asked for more than a few dozen lines at once.
    INLINE void fetch(const Number *from, int64_t tokens) const
    {
        const char *line = (const char *)from, *const end = (const char *)(from + tokens * dim);
        for (; line < end; line += 64)
            __builtin_prefetch(line);
    }
};

// The even numbers and the odd ones of two vectors.
INLINE void part(Vector &low, Vector &high)
{
    Integers even, odd;
    for (int i = 0; i < LANES; i++)
        even[i] = 2 * i, odd[i] = 2 * i + 1;
    const Vector kept = low;
    low = __builtin_shuffle(kept, high, even);
    high = __builtin_shuffle(kept, high, odd);
}

// Attention in vectors. Key is what queries and keys are multiplied as: pairs of bfloat16, or float32.
//
// While values are added in pairs, the sums are in another order: of 32, the even ones come first. Then
// a pair becomes two float32 numbers in two operations.
template <typename Number, typename Key>
class SlotHead : public SlotRows<Number> {
protected:
    using Base = SlotRows<Number>;
    using Base::cache, Base::dim, Base::first, Base::queries, Base::repeats, Base::rows;
    static constexpr bool PAIRS = std::is_same_v<Key, Narrow>;
    static constexpr int64_t ROWS = TALL;  // queries whose sums are in registers
#ifdef __AVX512BF16__
    using Term = std::conditional_t<PAIRS, Pair, Single>;
#else
    using Term = Single;
#endif

    const int64_t columns, depth;  // queries up to a multiple of `wide`; floats that hold a query
    const float scaling;
    float *query;                // [queries, depth]
    float *transposed;           // [depth, columns]
    float *scores;               // and weights: [KEYS, columns] of the prompt, [repeats, KEYS] of a suffix
    float *top, *total, *decay;  // [columns]
    float *result;               // [queries, dim]
    float *copy;                 // keys or values in float32: [KEYS, dim]

    static const float *factors(const Number *from, int64_t size, float *scratch)
    {
        if constexpr (sizeof(Key) == sizeof(Number))
            return (const float *)from;
        else
            return widened(from, size, scratch);
    }

    void start()
    {
        for (int64_t q = 0; q < queries; q++) {
            const float *from = factors(this->query_of(q), dim, query + q * depth);
            std::memmove(query + q * depth, from, sizeof(float) * depth);
        }
        std::fill_n(top, columns, -std::numeric_limits<float>::infinity());
        std::fill_n(total, columns, 0.0f);
    }

    void attend_to_prompt()
    {
        std::fill_n(transposed, depth * columns, 0.0f);
        transpose(query, depth, queries, depth, transposed, columns);
        std::fill_n(result, queries * dim, 0.0f);
        this->each_of_prompt([&](int64_t place, int64_t keys, const Number *next) {
            const float *key = factors(cache.prompt_key + place, keys * dim, copy);
            std::fill_n(scores, keys * columns, 0.0f);
            multiply<Term>(keys, columns, depth, {key, depth, 1}, transposed, columns, scores, columns);
            for (int64_t q = 0; q < queries; q += LANES)
                weigh_columns(q, keys, next);
            for (int64_t q = 0; q < queries; q++)
                scale(result + q * dim, decay[q]);
            const float *value = widened(cache.prompt_value + place, keys * dim, copy);
            multiply(queries, dim, keys, {scores, 1, columns}, value, dim, result, dim);
        });
    }

    // Weights of some queries for keys of the prompt, in place of their scores.
    INLINE void weigh_columns(int64_t q, int64_t keys, const Number *next)
    {
        const Vector most = highest(scores + q, columns, keys, at(top + q));
        Vector sum{};
        for (int64_t t = 0; t < keys; t++) {
            if (q == 0)
                this->fetch(next + t * dim, 1);
            Vector &x = at(scores + t * columns + q);
            x = exponential(x * scaling - most);
            sum += x;
        }
        at(decay + q) = exponential(at(top + q) - most);
        at(total + q) = at(total + q) * at(decay + q) + sum;
        at(top + q) = most;
    }

    // The largest of `top` and of the scaled scores of each column, several rows at a time.
    INLINE Vector highest(const float *scores, int64_t row, int64_t keys, Vector top) const
    {
        constexpr int64_t MANY = 4;
        Vector most[MANY] = {top, top, top, top};
        int64_t t = 0;
        for (; t + MANY <= keys; t += MANY)
            for (int64_t i = 0; i < MANY; i++)
                most[i] = larger(at(scores + (t + i) * row) * scaling, most[i]);
        for (; t < keys; t++)
            most[0] = larger(at(scores + t * row) * scaling, most[0]);
        return larger(larger(most[0], most[1]), larger(most[2], most[3]));
    }

    INLINE void scale(float *row, float factor) const
    {
        for (int64_t d = 0; d < dim; d += LANES)
            at(row + d) *= factor;
    }

    // Completes the queries of a row with its suffix.
    void attend_to_suffix(int64_t row)
    {
        const int64_t q = (row - first) * repeats;
        float *sums = result + q * dim;
        if constexpr (PAIRS)
            for (int64_t d = 0; d < repeats * dim; d += 2 * LANES)
                part(at(sums + d), at(sums + d + LANES));
        this->each_of_suffix(row, [&](int64_t place, int64_t keys, const Number *next) {
            score_suffix(q, place, keys);
            for (int64_t h = 0; h < repeats; h++)
                weigh_row(q + h, scores + h * KEYS, keys);
            add_values(cache.suffix_value + place, keys, sums, next);
        });
        for (int64_t h = 0; h < repeats; h++)
            store_row(sums + h * dim, total[q + h], this->out_of(row) + h * dim);
    }

    void store_row(const float *sums, float divisor, Number *out) const
    {
        if constexpr (PAIRS)
            for (int64_t d = 0; d < dim; d += 2 * LANES) {
                const Bits even = rounded_bits(at(sums + d) / divisor);
                const Bits odd = rounded_bits(at(sums + d + LANES) / divisor);
                at((float *)(out + d)) = (Vector)(even >> 16 | (odd & 0xffff0000));
            }
        else
            for (int64_t d = 0; d < dim; d += LANES)
                store(at(sums + d) / divisor, out + d);
    }

    void score_suffix(int64_t q, int64_t place, int64_t keys)
    {
        const float *key = factors(cache.suffix_key + place, keys * dim, copy);
        for (int64_t t = 0; t < keys; t += LANES) {
            const int64_t some = std::min<int64_t>(LANES, keys - t);
            this->fetch(cache.suffix_value + place + t * dim, some);
            for (int64_t h = 0; h < repeats; h++)
                score(query + (q + h) * depth, key + t * depth, some, scores + h * KEYS + t);
        }
    }

    // Dot products of a query with LANES keys or fewer.
    INLINE void score(const float *query, const float *keys, int64_t count, float *scores) const
    {
        Vector products[LANES] = {};
        if (count == LANES) {
            for (int64_t d = 0; d < depth; d += LANES)
                for (int i = 0; i < LANES; i++)
                    products[i] = Term::add(products[i], at(query + d), at(keys + i * depth + d));
            at(scores) = sums(products);
            return;
        }
        for (int64_t i = 0; i < count; i++) {
            Vector product{};
            for (int64_t d = 0; d < depth; d += LANES)
                product = Term::add(product, at(query + d), at(keys + i * depth + d));
            scores[i] = sum(product);
        }
    }

    // Weights of a query for keys of its suffix, in place of their scores.
    INLINE void weigh_row(int64_t q, float *scores, int64_t keys)
    {
        const int64_t end = (keys + LANES - 1) / LANES * LANES;
        for (int64_t t = 0; t < end; t += LANES)
            at(scores + t) *= scaling;
        std::fill(scores + keys, scores + end, -std::numeric_limits<float>::infinity());
        Vector most = Vector{} + top[q], more{};
        for (int64_t t = 0; t < end; t += LANES)
            most = larger(at(scores + t), most);
        const float peak = largest(most), decay = exponential(Vector{} + (top[q] - peak))[0];
        for (int64_t t = 0; t < end; t += LANES) {
            Vector &x = at(scores + t);
            x = exponential(x - peak);
            more += x;
        }
        top[q] = peak, total[q] = total[q] * decay + sum(more);
        scale(result + q * dim, decay);
    }

    // sums[repeats, dim] += weights · values of a suffix
    void add_values(const Number *value, int64_t keys, float *sums, const Number *next)
    {
        if constexpr (PAIRS) {
            for (int64_t h = 0; h < repeats; h += ROWS)
                add_some<ROWS>(std::min(ROWS, repeats - h), scores + h * KEYS, value, keys,
                               sums + h * dim, next);
            return;
        }
        for (int64_t t = 0; t < keys; t += UNIT) {
            this->fetch(next + t * dim, UNIT);
            multiply(repeats, dim, std::min<int64_t>(UNIT, keys - t), {scores + t, KEYS, 1},
                     value + t * dim, dim, sums, dim);
        }
    }

    // The same in pairs, of `count` queries, at most COUNT.
    template <int COUNT>
    INLINE void add_some(int64_t count, const float *weights, const Number *value, int64_t keys, float *sums,
                         const Number *next) const
    {
        if constexpr (COUNT > 1)
            if (count < COUNT)
                return add_some<COUNT - 1>(count, weights, value, keys, sums, next);
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            Vector even[COUNT], odd[COUNT];
            for (int i = 0; i < COUNT; i++)
                even[i] = at(sums + i * dim + d), odd[i] = at(sums + i * dim + d + LANES);
            for (int64_t t = 0; t < keys; t++) {
                __builtin_prefetch(next + t * dim + d);
                const Bits pairs = (Bits)at((const float *)(value + t * dim + d));
                const Vector low = (Vector)(pairs << 16), high = (Vector)(pairs & 0xffff0000);
                for (int i = 0; i < COUNT; i++) {
                    even[i] += weights[i * KEYS + t] * low;
                    odd[i] += weights[i * KEYS + t] * high;
                }
            }
            for (int i = 0; i < COUNT; i++)
                at(sums + i * dim + d) = even[i], at(sums + i * dim + d + LANES) = odd[i];
        }
    }

public:
    SlotHead(const Attention<Number> &a, int64_t begin, int64_t end, int64_t key_head, int64_t wide = UNIT)
        : Base(a, begin, end, key_head), columns((queries + wide - 1) / wide * wide),
          depth(dim * sizeof(Key) / sizeof(float)), scaling(a.scaling)
    {
    }

    // Assigns the parts of the scratch memory; returns its size.
    int64_t assign(float *scratch)
    {
        Parts memory(scratch);
        query = memory.take<float>(queries * depth), transposed = memory.take<float>(columns * depth);
        scores = memory.take<float>(KEYS * columns);
        for (float **each : {&top, &total, &decay})
            *each = memory.take<float>(columns);
        result = memory.take<float>(queries * dim), copy = memory.take<float>(KEYS * dim);
        return memory.floats();
    }

    void attend()
    {
        start();
        attend_to_prompt();
        for (int64_t row = first; row < first + rows; row++)
            attend_to_suffix(row);
    }
};

}  // namespace

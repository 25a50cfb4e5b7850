// Tree attention in bfloat16 with the tiles of AMX, 32 queries by 32 keys at a time; tree_attention.cpp
// says what it computes. Products of queries, keys, values and output gradients are exact, with sums in
// float32. Weights and their gradients are float32, and enter a product as the sum of two bfloat16
// numbers, which leaves 16 bits of them.

#include "tiles.h"
#include "tree.h"

#ifdef TILES

#include <cmath>
#include <limits>
#include <omp.h>
#include <vector>

namespace {

// Keys and values of all spans as tiles, and the sums of their gradients. Every span starts a block of
// 32 tokens.
struct TiledTree {
    const Tree<Narrow> &t;
    const int64_t sides;         // blocks of a head
    std::vector<int64_t> start;  // the first block of each span, and the number of blocks
    // Right factors Kᵀ, Vᵀ, K and V: [key_heads, blocks, sides, 2 tiles]; null where they are not needed.
    Narrow *key_columns = nullptr, *value_columns = nullptr, *key_rows = nullptr, *value_rows = nullptr;
    // [parts, key_heads, blocks, sides, 32 of a head, 32 tokens]
    float *key_grad = nullptr, *value_grad = nullptr;

    TiledTree(const Tree<Narrow> &t, bool gradients)
        : t(t), sides(blocks(t.dim)), start(t.spans + 1)
    {
        for (int64_t s = 0; s < t.spans; s++)
            start[s + 1] = start[s] + blocks(t.length[s]);
        key_columns = t.memory;
        (gradients ? value_columns : value_rows) = t.memory + size();
        if (gradients) {
            key_rows = t.memory + 2 * size();
            key_grad = (float *)(t.memory + 3 * size());
            value_grad = key_grad + t.parts * size();
        }
    }

    int64_t place(int64_t head, int64_t block) const
    {
        return (head * start.back() + block) * sides * BLOCK;
    }
    int64_t size() const { return place(t.key_heads, 0); }

    void prepare(int64_t span, int64_t head) const
    {
        for (int64_t b = 0; b < start[span + 1] - start[span]; b++) {
            const int64_t token = t.begin[span] + b * SIDE, to = place(head, start[span] + b);
            const int64_t rows = t.length[span] - b * SIDE;
            const auto copy = [&](Form form, const Heads<Narrow> &from, Narrow *tiles) {
                if (tiles)
                    copy_block(form, from.of(token, head), from.row, rows, t.dim, tiles + to);
            };
            copy(Form::turned_rows, t.key, key_columns);
            copy(Form::turned_rows, t.value, value_columns);
            copy(Form::pairs, t.key, key_rows);
            copy(Form::pairs, t.value, value_rows);
            for (int64_t part = 0; key_grad && part < t.parts; part++) {
                std::fill_n(key_grad + part * size() + to, sides * BLOCK, 0.0f);
                std::fill_n(value_grad + part * size() + to, sides * BLOCK, 0.0f);
            }
        }
    }

    // All spans, shared by the threads of a parallel block.
    void prepare() const
    {
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t s = 0; s < t.spans; s++)
            for (int64_t h = 0; h < t.key_heads; h++)
                prepare(s, h);
    }

    // The sums of all parts, transposed and rounded.
    void finish(int64_t span, int64_t head, const float *sums, Narrow *grad) const
    {
        Narrow *to = grad + (t.begin[span] * t.key_heads + head) * t.dim;
        for (int64_t b = 0; b < start[span + 1] - start[span]; b++)
            for (int64_t d = 0; d < t.dim; d += 16)
                for (int64_t half = 0; half < SIDE; half += 16) {
                    Vector rows[16] = {};
                    const float *from = sums + place(head, start[span] + b) + d * SIDE + half;
                    for (int64_t part = 0; part < t.parts; part++, from += size())
                        for (int64_t i = 0; i < 16; i++)
                            rows[i] += at(from + i * SIDE);
                    swap_all(rows);
                    const int64_t token = b * SIDE + half;
                    for (int64_t i = 0; i < std::min<int64_t>(16, t.length[span] - token); i++)
                        store(rows[i], to + (token + i) * t.key_heads * t.dim + d);
                }
    }
};

// Scratch memory of a thread for blocks of up to `keys` keys.
struct Scratch {
    Memory<Narrow> queries, turned_queries, grads, turned_grads;  // [sides, 2 tiles]
    Memory<float> scores, score_grads;                            // [32, keys]
    Memory<Narrow> high, low;                                     // [32, keys]
    Memory<Narrow> high_pairs, low_pairs;                         // [keys / 32, 2 tiles]
    alignas(64) float block[SIDE * SIDE];

    bool allocate(int64_t keys, int64_t sides)
    {
        for (auto *each : {&queries, &turned_queries, &grads, &turned_grads})
            *each = memory_of<Narrow>(sides * BLOCK);
        for (auto *each : {&scores, &score_grads})
            *each = memory_of<float>(SIDE * keys);
        for (auto *each : {&high, &low, &high_pairs, &low_pairs})
            *each = memory_of<Narrow>(SIDE * keys);
        return queries && turned_queries && grads && turned_grads && scores && score_grads && high &&
               low && high_pairs && low_pairs;
    }
};

// Columns of scores, in two ranges.
class Columns {
    __m512i begin[2], size[2];

public:
    Columns(int64_t begin, int64_t end, int64_t own, int64_t own_end)
    {
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        this->begin[0] = _mm512_sub_epi32(lanes, _mm512_set1_epi32(begin));
        this->begin[1] = _mm512_sub_epi32(lanes, _mm512_set1_epi32(own));
        size[0] = _mm512_set1_epi32(end - begin), size[1] = _mm512_set1_epi32(own_end - own);
    }
    // Which of 16 columns, from `k`, are in them.
    INLINE __mmask16 from(int64_t k) const
    {
        const __m512i first = _mm512_set1_epi32(k);
        return _mm512_cmplt_epu32_mask(_mm512_add_epi32(first, begin[0]), size[0]) |
               _mm512_cmplt_epu32_mask(_mm512_add_epi32(first, begin[1]), size[1]);
    }
};

// Queries of one span and one head, and the blocks of keys that they attend to: of the prompt, and of
// the span itself.
struct TiledQueries {
    const TiledTree &tree;
    const Tree<Narrow> &t;
    int64_t head, key_head, token, count, prompt, first_query;
    struct KeyBlocks {
        int64_t begin, count, position;  // the first one, how many, and the position where it starts
    } spans[2];
    int64_t keys;

    TiledQueries(const TiledTree &tree, int64_t span, int64_t first, int64_t head)
        : tree(tree), t(tree.t), head(head), key_head(head / (t.heads / t.key_heads)),
          token(t.begin[span] + first), count(std::min(SIDE, t.length[span] - first)),
          prompt(t.owner[span] < 0 ? 0 : t.length[t.owner[span]]), first_query(first)
    {
        const int64_t hidden = hidden_from(0), before = std::min(hidden, prompt) / SIDE;
        const int64_t own = std::max<int64_t>(hidden - prompt, 0) / SIDE;
        const int64_t of_prompt = prompt ? tree.start[t.owner[span]] : 0;
        spans[0] = {of_prompt + before, blocks(prompt) - before, before * SIDE};
        spans[1] = {tree.start[span] + own, blocks(first + count) - own, own * SIDE};
        keys = (spans[0].count + spans[1].count) * SIDE;
    }

    // How many positions are before the window of a query.
    int64_t hidden_from(int64_t q) const
    {
        return t.window ? std::max<int64_t>(0, prompt + first_query + q + 1 - t.window) : 0;
    }

    int64_t place(int64_t q) const { return ((token + q) * t.heads + head) * t.dim; }

    // Calls with each block of keys and its number.
    template <typename Do>
    INLINE void each_block(Do what) const
    {
        int64_t i = 0;
        for (const KeyBlocks &s : spans)
            for (int64_t b = s.begin; b < s.begin + s.count; b++)
                what(tree.place(key_head, b), i++);
    }

    // out[32, keys] = queries · columns
    void products(const Narrow *queries, const Narrow *columns, float *out) const
    {
        each_block([&](int64_t block, int64_t i) {
            clear_block();
            add_block(tiles_of(queries), tiles_of(columns + block), tree.sides);
            store_block(out + i * SIDE, keys);
        });
    }

    // to[count, dim] = (high + low)[32, keys] · rows[keys, dim] / divisor
    void weighted_sum(Scratch &s, const Narrow *rows, const float *divisor, Narrow *to) const
    {
        for (int64_t side = 0; side < tree.sides; side++) {
            clear_block();
            for (const Narrow *weights : {s.high.get(), s.low.get()})
                each_block([&](int64_t block, int64_t i) {
                    const Operand left{weights + i * SIDE, 2 * keys, 16 * keys, 0};
                    add_block(left, tiles_of(rows + block + side * BLOCK), 1);
                });
            store_block(s.block, SIDE);
            for (int64_t q = 0; q < count; q++)
                for (int64_t d = 0; d < std::min(SIDE, t.dim - side * SIDE); d += 16)
                    store(at(s.block + q * SIDE + d) / divisor[q],
                          to + q * t.heads * t.dim + side * SIDE + d);
        }
    }

    // sums[keys, dim] += (high + low)[32, keys]ᵀ · rows[32, dim], transposed, of `turned` = rowsᵀ
    void scatter(const Scratch &s, const Narrow *turned, float *sums) const
    {
        each_block([&](int64_t block, int64_t i) {
            for (int64_t side = 0; side < tree.sides; side++) {
                float *place = sums + block + side * BLOCK;
                load_block(place, SIDE);
                add_block(tiles_of(turned + side * BLOCK), tiles_of(s.high_pairs.get() + i * BLOCK), 1);
                add_block(tiles_of(turned + side * BLOCK), tiles_of(s.low_pairs.get() + i * BLOCK), 1);
                store_block(place, SIDE);
            }
        });
    }

    // Columns of keys that a query attends to.
    Columns attended(int64_t q) const
    {
        const int64_t hidden = hidden_from(q), own = spans[0].count * SIDE - spans[1].position;
        if (q >= count)
            return {0, 0, 0, 0};
        return {std::min(hidden, prompt) - spans[0].position, prompt - spans[0].position,
                own + std::max<int64_t>(hidden - prompt, 0), own + first_query + q + 1};
    }

    void forward(Scratch &s) const
    {
        copy_block(Form::rows, t.query.of(token, head), t.query.row, count, t.dim, s.queries.get());
        products(s.queries.get(), tree.key_columns, s.scores.get());
        float totals[SIDE];
        for (int64_t q = 0; q < SIDE; q++)
            totals[q] = softmax(s, q);
        weighted_sum(s, tree.value_rows, totals, t.out + place(0));
    }

    // The weights of a query, to be divided by their sum, which is returned.
    float softmax(Scratch &s, int64_t q) const
    {
        const float *scores = s.scores.get() + q * keys, scaling = t.scaling;
        const Vector least = Vector{} - std::numeric_limits<float>::infinity();
        const Columns some = attended(q);
        Vector most = least, total{};
        for (int64_t k = 0; k < keys; k += 16) {
            const Vector x = at(scores + k) * scaling;
            most = larger((Vector)_mm512_mask_mov_ps((__m512)least, some.from(k), (__m512)x), most);
        }
        const float top = largest(most);
        for (int64_t k = 0; k < keys; k += 16) {
            const Vector x = exponential(at(scores + k) * scaling - top);
            const __m512 weight = _mm512_maskz_mov_ps(some.from(k), (__m512)x);
            total += (Vector)weight;
            split(weight, s.high.get() + q * keys + k, s.low.get() + q * keys + k);
        }
        const float all = sum(total);
        if (q < count)
            t.norm[(token + q) * t.heads + head] = top + std::log(all);
        return all;
    }

    void backward(Scratch &s, int64_t part) const
    {
        const Narrow *query = t.query.of(token, head), *out_grad = t.out_grad + place(0);
        const int64_t row = t.heads * t.dim;
        copy_block(Form::rows, query, t.query.row, count, t.dim, s.queries.get());
        copy_block(Form::turned_pairs, query, t.query.row, count, t.dim, s.turned_queries.get());
        copy_block(Form::rows, out_grad, row, count, t.dim, s.grads.get());
        copy_block(Form::turned_pairs, out_grad, row, count, t.dim, s.turned_grads.get());
        products(s.queries.get(), tree.key_columns, s.scores.get());
        products(s.grads.get(), tree.value_columns, s.score_grads.get());
        float means[SIDE], ones[SIDE];
        for (int64_t q = 0; q < SIDE; q += 2)
            weights(s, q, means);
        scatter(s, s.turned_grads.get(), tree.value_grad + part * tree.size());
        for (int64_t q = 0; q < SIDE; q += 2)
            gradients(s, q, means);
        scatter(s, s.turned_queries.get(), tree.key_grad + part * tree.size());
        std::fill(ones, ones + SIDE, 1.0f);
        weighted_sum(s, tree.key_rows, ones, t.query_grad + place(0));
    }

    // Where the pairs of two rows are, from column k.
    static int64_t pairs(int64_t q, int64_t k) { return k / 16 * TILE + q * 16; }

    // P of two queries in place of their scores, and rowsum(P ∘ dP) / rowsum(P).
    void weights(Scratch &s, int64_t q, float *means) const
    {
        const float scaling = t.scaling;
        float norms[2] = {};
        for (int64_t i = 0; i < std::min<int64_t>(2, count - q); i++)
            norms[i] = t.norm[(token + q + i) * t.heads + head];
        const Columns some[2] = {attended(q), attended(q + 1)};
        Vector totals[2] = {}, sums[2] = {};
        for (int64_t k = 0; k < keys; k += 16) {
            __m512 both[2];
            for (int64_t i = 0; i < 2; i++) {
                const int64_t place = (q + i) * keys + k;
                const Vector x = exponential(at(s.scores.get() + place) * scaling - norms[i]);
                both[i] = _mm512_maskz_mov_ps(some[i].from(k), (__m512)x);
                at(s.scores.get() + place) = (Vector)both[i];
                totals[i] += (Vector)both[i];
                sums[i] += (Vector)both[i] * at(s.score_grads.get() + place);
            }
            split_pair((Vector)both[0], (Vector)both[1], s.high_pairs.get() + pairs(q, k),
                       s.low_pairs.get() + pairs(q, k));
        }
        for (int64_t i = 0; i < 2; i++)
            means[q + i] = q + i < count ? sum(sums[i]) / sum(totals[i]) : 0.0f;
    }

    // dS of two queries.
    void gradients(Scratch &s, int64_t q, const float *means) const
    {
        for (int64_t k = 0; k < keys; k += 16) {
            __m512 both[2];
            for (int64_t i = 0; i < 2; i++) {
                const int64_t place = (q + i) * keys + k;
                const Vector x = at(s.score_grads.get() + place) - means[q + i];
                both[i] = (__m512)(at(s.scores.get() + place) * x * (float)t.scaling);
                split(both[i], s.high.get() + place, s.low.get() + place);
            }
            split_pair((Vector)both[0], (Vector)both[1], s.high_pairs.get() + pairs(q, k),
                       s.low_pairs.get() + pairs(q, k));
        }
    }
};

// Scratch memory of every thread; empty when out of memory.
std::vector<Scratch> scratch_of(const TiledTree &tree)
{
    int64_t keys = SIDE;
    for (int64_t s = 0; s < tree.t.spans; s++)
        for (int64_t first = 0; first < tree.t.length[s]; first += SIDE)
            keys = std::max(keys, TiledQueries(tree, s, first, 0).keys);
    std::vector<Scratch> found(tree.t.threads);
    for (Scratch &each : found)
        if (!each.allocate(keys, tree.sides))
            return {};
    return found;
}

}  // namespace

extern "C" {

// As `tree_forward_float32`.
int tree_forward_bfloat16(const Tree<Narrow> *call)
{
    const Tree<Narrow> &t = *call;
    const TiledTree tree(t, false);
    std::vector<Scratch> scratch = scratch_of(tree);
    if (scratch.empty())
        return 1;
#pragma omp parallel num_threads(t.threads)
    {
        Tiles registers;
        registers.set(SIDE);
        tree.prepare();
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t s = 0; s < t.spans; s++)
            for (int64_t h = 0; h < t.heads; h++)
                for (int64_t first = 0; first < t.length[s]; first += SIDE)
                    TiledQueries(tree, s, first, h).forward(scratch[omp_get_thread_num()]);
    }
    return 0;
}

// As `tree_backward_float32`.
int tree_backward_bfloat16(const Tree<Narrow> *call)
{
    const Tree<Narrow> &t = *call;
    const TiledTree tree(t, true);
    std::vector<Scratch> scratch = scratch_of(tree);
    if (scratch.empty())
        return 1;
#pragma omp parallel num_threads(t.threads)
    {
        Tiles registers;
        registers.set(SIDE);
        tree.prepare();
#pragma omp for schedule(dynamic) collapse(3)
        for (int64_t prompt = 0; prompt < t.spans; prompt++)
            for (int64_t part = 0; part < t.parts; part++)
                for (int64_t head = 0; head < t.key_heads; head++)
                    each_owned(t, prompt, part, head, SIDE, [&](int64_t s, int64_t first, int64_t h) {
                        TiledQueries(tree, s, first, h).backward(scratch[omp_get_thread_num()], part);
                    });
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t s = 0; s < t.spans; s++)
            for (int64_t h = 0; h < t.key_heads; h++) {
                tree.finish(s, h, tree.key_grad, t.key_grad);
                tree.finish(s, h, tree.value_grad, t.value_grad);
            }
    }
    return 0;
}
}

#endif

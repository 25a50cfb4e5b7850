// Attention of a decoding step in bfloat16 whose prompt is multiplied in the tiles of AMX, 32 keys by 32
// queries at a time. Weights are float32, and enter a product as the sum of two bfloat16 numbers, which
// leaves 16 bits of them.

#pragma once

#include "slot_head.h"
#include "tiles.h"

#ifdef TILES

namespace {

class TiledSlotHead : public SlotHead<Narrow, Narrow> {
    const int64_t panels, sides;  // blocks of queries, and of a head
    Narrow *turned_query;         // the right factor Qᵀ: [panels, sides, 2 tiles]
    Narrow *some_keys;            // a left factor of less than 32 keys: [sides, 2 tiles]
    Narrow *turned_value;         // the left factor Vᵀ: [KEYS / 32, sides, 2 tiles]
    Narrow *high, *low;           // weights, as a right factor: [KEYS / 32, 2 tiles]
    float *turned_result;         // [panels, dim, 32]

    void attend_to_prompt_in_tiles()
    {
        for (int64_t panel = 0; panel < panels; panel++)
            copy_block(Form::turned_rows, (const Narrow *)query + panel * SIDE * dim, dim,
                       queries - panel * SIDE, dim, turned_query + panel * SIDE * dim);
        std::fill_n(turned_result, panels * SIDE * dim, 0.0f);
        std::fill_n(decay, panels * SIDE, 0.0f);  // also of columns that are no queries
        each_of_prompt([&](int64_t place, int64_t keys, const Narrow *next) {
            for (int64_t panel = 0; panel < panels; panel++) {
                score_panel(panel, place, keys);
                for (int64_t half = 0; half < SIDE && panel * SIDE + half < queries; half += 16)
                    weigh_half(panel, half, keys, next);
                if (panel == 0)
                    for (int64_t t = 0; t < keys; t += SIDE)
                        copy_block(Form::turned_pairs, cache.prompt_value + place + t * dim, dim,
                                   keys - t, dim, turned_value + t * dim);
                add_panel(panel, blocks(keys));
            }
        });
        for (int64_t panel = 0; panel < panels; panel++)
            transpose(turned_result + panel * SIDE * dim, SIDE, dim, std::min(SIDE, queries - panel * SIDE),
                      result + panel * SIDE * dim, dim);
    }

    // scores[keys, 32] of a panel, while the values are fetched
    void score_panel(int64_t panel, int64_t place, int64_t keys)
    {
        for (int64_t t = 0; t < keys; t += SIDE) {
            const int64_t start = place + t * dim;
            if (panel == 0)
                fetch(cache.prompt_value + start, SIDE);
            clear_block();
            add_block(rows_of(cache.prompt_key + start, keys - t),
                      tiles_of(turned_query + panel * SIDE * dim), sides);
            store_block(scores + t * SIDE, SIDE);
        }
    }

    // Up to 32 keys as a left factor.
    Operand rows_of(const Narrow *key, int64_t keys) const
    {
        if (keys >= SIDE)
            return {key, 2 * dim, 16 * dim, SIDE};
        copy_block(Form::rows, key, dim, keys, dim, some_keys);
        return tiles_of(some_keys);
    }

    // Weights of 16 queries, from their scores.
    INLINE void weigh_half(int64_t panel, int64_t half, int64_t keys, const Narrow *next)
    {
        const int64_t q = panel * SIDE + half;
        const float *column = scores + half;
        const Vector most = highest(column, SIDE, keys, at(top + q));
        Vector sum{};
        for (int64_t t = 0; t < blocks(keys) * SIDE; t += 2) {
            if (q == 0)
                fetch(next + t * dim, 2);
            Vector weights[2] = {};
            for (int64_t i = 0; i < std::min<int64_t>(2, keys - t); i++)
                weights[i] = exponential(at(column + (t + i) * SIDE) * scaling - most);
            sum += weights[0] + weights[1];
            const int64_t pair = (t / SIDE * 2 + half / 16) * TILE + t % SIDE * 16;
            split_pair(weights[0], weights[1], high + pair, low + pair);
        }
        at(decay + q) = exponential(at(top + q) - most);
        at(total + q) = at(total + q) * at(decay + q) + sum;
        at(top + q) = most;
    }

    // turned_result = turned_result · decay + Vᵀ · weights, of a panel
    void add_panel(int64_t panel, int64_t steps)
    {
        for (int64_t side = 0; side < sides; side++) {
            float *to = turned_result + (panel * dim + side * SIDE) * SIDE;
            for (int64_t d = 0; d < SIDE; d++)
                for (int64_t q = 0; q < SIDE; q += 16)
                    at(to + d * SIDE + q) *= at(decay + panel * SIDE + q);
            load_block(to, SIDE);
            const Operand left{turned_value + side * BLOCK, 64, TILE, sides * BLOCK};
            add_block(left, tiles_of(high), steps);
            add_block(left, tiles_of(low), steps);
            store_block(to, SIDE);
        }
    }

public:
    TiledSlotHead(const Attention<Narrow> &a, int64_t begin, int64_t end, int64_t key_head)
        : SlotHead(a, begin, end, key_head, SIDE), panels(blocks(queries)), sides(dim / SIDE)
    {
    }

    int64_t assign(float *scratch)
    {
        const int64_t before = SlotHead::assign(scratch);
        Parts memory(scratch ? scratch + before : nullptr);
        turned_query = memory.take<Narrow>(panels * SIDE * dim);
        some_keys = memory.take<Narrow>(SIDE * dim), turned_value = memory.take<Narrow>(KEYS * dim);
        high = memory.take<Narrow>(KEYS * SIDE), low = memory.take<Narrow>(KEYS * SIDE);
        turned_result = memory.take<float>(panels * SIDE * dim);
        return before + memory.floats();
    }

    void attend()
    {
        Tiles registers;
        registers.set(SIDE);
        start();
        attend_to_prompt_in_tiles();
        for (int64_t row = first; row < first + rows; row++)
            attend_to_suffix(row);
    }
};

}  // namespace

#endif

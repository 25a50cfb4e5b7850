// Weights in 4 bits (Dettmers et al., "QLoRA", 2305.14314), in panels like those of larger numbers.

#pragma once

#include "vectors.h"

// weight(k, j) = levels[code(k, j)] · scale(k / 64, j), rounded like the weights of a layer.
struct FourBits {
    const uint32_t *codes;  // [panels, depth / 8, 32]: each number has eight codes of a column, the first in
                            // its lowest bits
    const float *scales;    // [panels, depth / 64, 32]
    const float *levels;    // [16]
};

namespace {

constexpr int64_t OF_SCALE = 64;  // numbers of the depth that share a scale
constexpr int64_t OF_WORD = 8;    // codes

typedef Bits Words __attribute__((aligned(4)));

// levels[code % 16] of each lane
INLINE Vector looked_up(const float *levels, Bits code)
{
    if constexpr (LANES == 16)
        return __builtin_shuffle(at(levels), (Integers)code);
    if constexpr (LANES == 8) {
        const Vector low = __builtin_shuffle(at(levels), (Integers)code);
        const Vector high = __builtin_shuffle(at(levels + 8), (Integers)code);
        return (Integers)(code << 28) < 0 ? high : low;
    }
    Vector out;
    for (int i = 0; i < LANES; i++)
        out[i] = levels[code[i] & 15];
    return out;
}

// Calls use(k, column, numbers) for 64 numbers of the depth of a panel, from `first` on, with the same numbers
// of LANES columns at a time.
template <typename Number, typename Use>
INLINE void decode(const FourBits &w, int64_t panel, int64_t depth, int64_t first, Use use)
{
    const int64_t place = panel * depth + first;
    const uint32_t *codes = w.codes + place / OF_WORD * PANEL;
    const float *scales = w.scales + place / OF_SCALE * PANEL;
    for (int64_t j = 0; j < PANEL; j += LANES) {
        const Vector scale = at(scales + j);
        for (int64_t k = 0; k < OF_SCALE; k += OF_WORD) {
            const Bits eight = *(const Words *)(codes + k / OF_WORD * PANEL + j);
            for (int i = 0; i < OF_WORD; i++)
                use(k + i, j, rounded<Number>(looked_up(w.levels, eight >> 4 * i) * scale));
        }
    }
}

// 64 numbers of the depth of a panel as [64, 32].
template <typename Number>
INLINE void decode(const FourBits &w, int64_t panel, int64_t depth, int64_t first, float *out)
{
    decode<Number>(w, panel, depth, first,
                   [=](int64_t k, int64_t j, Vector x) { at(out + k * PANEL + j) = x; });
}

// The same as pairs, [32, 32, 2].
template <typename Number>
INLINE void decode(const FourBits &w, int64_t panel, int64_t depth, int64_t first, Narrow *out)
{
    decode<Number>(w, panel, depth, first, [=](int64_t k, int64_t j, Vector x) {
        float *pair = (float *)out + k / 2 * PANEL + j;
        at(pair) = (Vector)(k % 2 ? (Bits)at(pair) | (Bits)x : (Bits)x >> 16);
    });
}

}  // namespace

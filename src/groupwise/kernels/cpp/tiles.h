// Products of 32 by 32 numbers in the tiles of AMX, and how factors are laid out for them.

#pragma once

#include "memory.h"
#include "multiply.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define TILES

namespace {

constexpr int64_t SIDE = 32;       // queries, keys and numbers of a head that are multiplied at once
constexpr int64_t TILE = 16 * 32;  // bfloat16 numbers of a tile
constexpr int64_t BLOCK = 2 * TILE;  // those of SIDE rows or columns, SIDE deep

int64_t blocks(int64_t size) { return (size + SIDE - 1) / SIDE; }

__mmask16 first(int64_t count) { return (1u << std::min<int64_t>(std::max<int64_t>(count, 0), 16)) - 1; }

// A factor of a product of 32 by 32 numbers: two tiles, and as many for each further 32 of the depth.
struct Operand {
    const Narrow *data;
    int64_t row;     // bytes between rows of a tile
    int64_t second;  // numbers between the tiles
    int64_t step;    // numbers between depths
};

// Blocks that `copy_block` has laid out.
Operand tiles_of(const Narrow *data) { return {data, 64, TILE, BLOCK}; }

// The registers 0 to 3, [32, 32] numbers, += left · right over `steps` depths of 32.
INLINE void add_block(const Operand &left, const Operand &right, int64_t steps)
{
    asm volatile("" ::: "memory");  // GCC 12 does not know what these instructions read
    for (int64_t k = 0; k < steps; k++) {
        const Narrow *a = left.data + k * left.step, *b = right.data + k * right.step;
        _tile_loadd(4, a, left.row);
        _tile_loadd(5, a + left.second, left.row);
        _tile_loadd(6, b, right.row);
        _tile_loadd(7, b + right.second, right.row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void clear_block()
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void load_block(const float *from, int64_t row)
{
    asm volatile("" ::: "memory");
    _tile_loadd(0, from, 4 * row);
    _tile_loadd(1, from + 16, 4 * row);
    _tile_loadd(2, from + 16 * row, 4 * row);
    _tile_loadd(3, from + 16 * row + 16, 4 * row);
}

INLINE void store_block(float *to, int64_t row)
{
    _tile_stored(0, to, 4 * row);
    _tile_stored(1, to + 16, 4 * row);
    _tile_stored(2, to + 16 * row, 4 * row);
    _tile_stored(3, to + 16 * row + 16, 4 * row);
    asm volatile("" ::: "memory");
}

// A tile of a left factor: 16 rows of 32 numbers, zeros outside [rows, columns].
void copy_rows(const Narrow *from, int64_t row, int64_t rows, int64_t columns, Narrow *tile)
{
    const __mmask32 some = columns < 32 ? (1u << columns) - 1 : ~0u;
    for (int64_t i = 0; i < 16; i++)
        _mm512_store_si512(tile + 32 * i, i < rows ? _mm512_maskz_loadu_epi16(some, from + i * row)
                                                   : _mm512_setzero_si512());
}

// Two rows of 16 numbers, pair by pair.
INLINE __m512i paired(__m512i rows)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, rows);
}

// A tile of a right factor: 32 rows of 16 numbers as pairs of rows, zeros outside [rows, columns].
void copy_pairs(const Narrow *from, int64_t row, int64_t rows, int64_t columns, Narrow *tile)
{
    const __mmask16 some = first(columns);
    for (int64_t i = 0; i < 32; i += 2) {
        const __m256i even = _mm256_maskz_loadu_epi16(i < rows ? some : 0, from + i * row);
        const __m256i odd = _mm256_maskz_loadu_epi16(i + 1 < rows ? some : 0, from + (i + 1) * row);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
        _mm512_store_si512(tile + 16 * i, paired(both));
    }
}

// Makes a tile of rows one of pairs of their transpose, and the other way round.
void turn(Narrow *tile)
{
    Vector rows[16];
    std::memcpy(rows, tile, sizeof rows);
    swap_all(rows);
    std::memcpy(tile, rows, sizeof rows);
}

// How 32 rows are laid out, for each 32 of their columns in two tiles:
//   rows          16 rows of 32 numbers each, a left factor
//   turned_rows   of these tiles, the right factor rowsᵀ
//   pairs         32 rows of 16 numbers each, pair by pair, a right factor
//   turned_pairs  of these tiles, the left factor rowsᵀ
enum class Form { rows, turned_rows, pairs, turned_pairs };

// [rows, columns], filled up with zeros, as [columns / 32 rounded up, 2 tiles].
void copy_block(Form form, const Narrow *from, int64_t row, int64_t rows, int64_t columns, Narrow *to)
{
    const bool whole = form == Form::rows || form == Form::turned_rows;
    for (int64_t side = 0; side < blocks(columns); side++)
        for (int64_t half = 0; half < 32; half += 16, to += TILE) {
            const int64_t left = columns - side * SIDE;
            const Narrow *place = from + side * SIDE;
            if (whole)
                copy_rows(place + half * row, row, rows - half, left, to);
            else
                copy_pairs(place + half, row, rows, left - half, to);
            if (form == Form::turned_rows || form == Form::turned_pairs)
                turn(to);
        }
}

INLINE __m512 upper_part(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// x as the sum of two bfloat16 numbers.
INLINE void split(__m512 x, Narrow *high, Narrow *low)
{
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i *)high, rounded);
    _mm256_storeu_si256((__m256i *)low, (__m256i)_mm512_cvtneps_pbh(x - upper_part(rounded)));
}

// The same of two rows, pair by pair; the upper number is not rounded, which is faster.
INLINE void split_pair(Vector even, Vector odd, Narrow *high, Narrow *low)
{
    const auto upper = [](Vector x) { return (Bits)x & 0xffff0000; };
    const auto pairs = [&](Vector even, Vector odd) { return (__m512i)(upper(odd) | (Bits)even >> 16); };
    const auto rest = [&](Vector x) { return (Vector)((Bits)(x - (Vector)upper(x)) + 0x8000); };
    _mm512_store_si512(high, pairs(even, odd));
    _mm512_store_si512(low, pairs(rest(even), rest(odd)));
}

}  // namespace

#endif

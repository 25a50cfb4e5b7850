// SIMD vectors by GCC's vector extensions, and constants that all kernels share.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

// What Python compares with its own structure when the library is loaded.
#define SIZE_OF(name, ...)                                                                         \
    extern "C" int64_t size_of_##name() { return sizeof(__VA_ARGS__); }

namespace {

// Floats per vector, and rows of a tile: a vector is a register of the processor, because GCC keeps
// wider ones in memory, and the sums of a tile, two vectors per row, leave some registers free.
#if defined(__AVX512F__)
constexpr int LANES = 16, TALL = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, TALL = 6;
#else
constexpr int LANES = 4, TALL = 6;
#endif
constexpr int UNIT = 16;              // `dim` and the sizes of feed-forwards are multiples of it
constexpr int PANEL = 2 * UNIT;       // columns of packed matrices
constexpr int64_t SMALL = 1 << 14;    // fewer elements are not worth a second thread

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Quad __attribute__((vector_size(16), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

INLINE Vector &at(float *place) { return *(Vector *)place; }
INLINE const Vector &at(const float *place) { return *(const Vector *)place; }

typedef uint16_t Narrow;  // bfloat16: the upper half of a float32

INLINE float wide(float x) { return x; }
INLINE float wide(Narrow x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE void put(float x, float &place) { place = x; }
INLINE void put(float x, Narrow &place)  // round to nearest, ties to even
{
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    place = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

typedef Narrow Narrows __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

INLINE Vector load(const float *place) { return at(place); }
INLINE Vector load(const Narrow *place)
{
    return (Vector)(__builtin_convertvector(*(const Narrows *)place, Bits) << 16);
}

// The bits of x rounded to bfloat16, below whose 16 others remain.
INLINE Bits rounded_bits(Vector x)
{
    const Bits bits = (Bits)x;
    return x == x ? bits + 0x7fff + (bits >> 16 & 1) : Bits{} + 0x7fc00000;
}

INLINE void store(Vector x, float *place) { at(place) = x; }
INLINE void store(Vector x, Narrow *place)
{
    *(Narrows *)place = __builtin_convertvector(rounded_bits(x) >> 16, Narrows);
}

// x rounded to a Number.
template <typename Number>
INLINE float rounded(float x)
{
    Number place;
    put(x, place);
    return wide(place);
}

template <typename Number>
INLINE Vector rounded(Vector x)
{
    if constexpr (sizeof(Number) == sizeof(Narrow))
        return (Vector)(rounded_bits(x) & 0xffff0000);
    return x;
}

// Numbers as float32: in place, or converted into scratch.
INLINE const float *widened(const float *from, int64_t, float *) { return from; }
INLINE const float *widened(const Narrow *from, int64_t size, float *scratch)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        at(scratch + i) = load(from + i);
    for (; i < size; i++)
        scratch[i] = wide(from[i]);
    return scratch;
}

INLINE float sum(Vector x)
{
    const Quad *part = (const Quad *)&x;
    Quad q = part[0];
    if constexpr (LANES == 8)
        q = part[0] + part[1];
    if constexpr (LANES == 16)
        q = (part[0] + part[2]) + (part[1] + part[3]);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

// The larger of each lane; b where either is NaN.
INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

INLINE float largest(Vector x)
{
    float most = x[0];
    for (int i = 1; i < LANES; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

// e^x with a relative error of 2e-7, x clamped to [-87, 88]. Cody-Waite range reduction,
// e^x = 2^n · e^r with |r| <= ln 2 / 2, and a polynomial of degree 7. Adding 1.5 · 2^23 rounds to
// the nearest integer and leaves it in the low bits; 127 more make it the exponent of 2^n. NaN
// stays NaN, whatever its payload.
INLINE Vector exponential(Vector x)
{
    const Vector least = Vector{} - 87.0f, most = Vector{} + 88.0f;
    const float shift = 12582912.0f + 127.0f;
    x = x < least ? least : x;
    x = x > most ? most : x;
    Vector n = x * 1.44269504f + shift;
    const Vector scale = (Vector)((Integers)n << 23);
    n -= shift;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    Vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return p * scale;
}

// 1 / (1 + e^-x), flushed to 0 below 1e-38.
INLINE Vector sigmoid(Vector x)
{
    const Vector result = 1.0f / (exponential(-x) + 1.0f);
    return x < -87.0f ? Vector{} : result;
}

// Swaps the lanes of `low` whose index has the bit SIZE with those of `high` that lack it.
template <int SIZE>
INLINE void swap_lanes(Vector &low, Vector &high)
{
    Integers first, second;
    for (int i = 0; i < LANES; i++) {
        first[i] = i & SIZE ? LANES + i - SIZE : i;
        second[i] = i & SIZE ? LANES + i : i + SIZE;
    }
    const Vector kept = low;
    low = __builtin_shuffle(kept, high, first);
    high = __builtin_shuffle(kept, high, second);
}

// Transposes LANES rows.
template <int SIZE = 1>
INLINE void swap_all(Vector *rows)
{
    if constexpr (SIZE < LANES) {
        for (int i = 0; i < LANES; i++)
            if (!(i & SIZE))
                swap_lanes<SIZE>(rows[i], rows[i + SIZE]);
        swap_all<2 * SIZE>(rows);
    }
}

// The sums of LANES rows.
template <int SIZE = 1>
INLINE Vector sums(Vector *rows)
{
    if constexpr (SIZE < LANES) {
        for (int i = 0; i < LANES; i += 2 * SIZE) {
            swap_lanes<SIZE>(rows[i], rows[i + SIZE]);
            rows[i] += rows[i + SIZE];
        }
        return sums<2 * SIZE>(rows);
    }
    return rows[0];
}

// to(k, j) = from(j, k); from_row and to_row are strides of rows
template <typename Number>
void transpose(const Number *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
               int64_t to_row)
{
    const int64_t whole = rows / LANES * LANES;
    for (int64_t k = 0; k < columns; k += LANES)
        for (int64_t j = 0; j < rows; j += LANES)
            if (k + LANES <= columns && j < whole) {
                Vector block[LANES];
                for (int i = 0; i < LANES; i++)
                    block[i] = load(from + (j + i) * from_row + k);
                swap_all(block);
                for (int i = 0; i < LANES; i++)
                    at(to + (k + i) * to_row + j) = block[i];
            } else
                for (int64_t i = j; i < std::min(j + LANES, rows); i++)
                    for (int64_t l = k; l < std::min(k + LANES, columns); l++)
                        to[l * to_row + i] = wide(from[i * from_row + l]);
}

}  // namespace

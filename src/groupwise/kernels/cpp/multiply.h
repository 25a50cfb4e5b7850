// Products of small matrices, as parts of larger kernels: the micro-kernel of a GEBP product, which
// keeps a tile of the result in registers (Goto & van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008).

#pragma once

#include <type_traits>

#include "vectors.h"

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// What a tile adds up: products of float32, or of pairs of bfloat16, which are moved as float32.
struct Single {
    static INLINE Vector add(Vector total, float left, Vector right) { return total + left * right; }
    static INLINE Vector add(Vector total, Vector left, Vector right) { return total + left * right; }
};

#ifdef __AVX512BF16__
struct Pair {
    static INLINE Vector add(Vector total, float left, Vector right)
    {
        return add(total, (Vector)_mm512_set1_ps(left), right);
    }
    static INLINE Vector add(Vector total, Vector left, Vector right)
    {
        return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)right);
    }
};
#endif

// left(i, k) = data[i · row + k · step]
struct Left {
    const float *data;
    int64_t row, step;
};

// What a tile fetches into the first-level cache while it computes: `step` bytes per k, a power of two of at
// least 4, for STEPS of them at once. The processor waits when it starts more than a few dozen fetches at once.
struct Ahead {
    static constexpr int64_t STEPS = 16, LINE = 64;
    const char *from;
    int64_t step;
    INLINE void fetch(int64_t k) const
    {
        for (int64_t i = 0; i < STEPS * step; i += LINE)
            __builtin_prefetch(from + k * step + i, 0, 3);
    }
};

constexpr Ahead UNROLLED{nullptr, 0};  // fetches nothing, for tiles that are only unrolled

struct Nothing {
    INLINE void fetch(int64_t) const {}
};

// out[ROWS, LANES · VECTORS] += left[ROWS, depth] · right[depth, LANES · VECTORS]
template <int ROWS, int VECTORS, typename Term, typename Next, typename Right>
INLINE void tile(Left left, int64_t depth, const Right *right, int64_t right_row, float *out,
                 int64_t out_row, Next next)
{
    Vector total[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++)
            total[i][v] = at(out + i * out_row + v * LANES);
    const auto add = [&](int64_t k) __attribute__((always_inline)) {
        Vector some[VECTORS];  // in this order, or GCC holds the left factor and runs out of registers
        for (int v = 0; v < VECTORS; v++)
            some[v] = load(right + k * right_row + v * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++)
                total[i][v] = Term::add(total[i][v], left.data[i * left.row + k * left.step], some[v]);
    };
    // Unrolled for Ahead alone: for every kernel, compiling would take half as long again.
    const int64_t fetched = depth / Ahead::STEPS * Ahead::STEPS * std::is_same_v<Next, Ahead>;
    for (int64_t k = 0; k < fetched; k += Ahead::STEPS) {
        next.fetch(k);
#pragma GCC unroll 8
        for (int64_t j = 0; j < Ahead::STEPS; j++)
            add(k + j);
    }
    for (int64_t k = fetched; k < depth; k++)
        add(k);
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++)
            at(out + i * out_row + v * LANES) = total[i][v];
}

template <int VECTORS, typename Term, typename Next, typename Right>
INLINE void strip(int64_t rows, Left left, int64_t depth, const Right *right, int64_t right_row,
                  float *out, int64_t out_row, Next next)
{
    for (; rows >= TALL; rows -= TALL, left.data += TALL * left.row, out += TALL * out_row)
        tile<TALL, VECTORS, Term>(left, depth, right, right_row, out, out_row, next);
    for (; rows >= 4; rows -= 4, left.data += 4 * left.row, out += 4 * out_row)
        tile<4, VECTORS, Term>(left, depth, right, right_row, out, out_row, next);
    for (; rows >= 2; rows -= 2, left.data += 2 * left.row, out += 2 * out_row)
        tile<2, VECTORS, Term>(left, depth, right, right_row, out, out_row, next);
    if (rows)
        tile<1, VECTORS, Term>(left, depth, right, right_row, out, out_row, next);
}

// out[rows, columns] += left[rows, depth] · right[depth, columns]; columns a multiple of LANES
template <typename Term = Single, typename Next = Nothing, typename Right>
INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, Left left, const Right *right,
                     int64_t right_row, float *out, int64_t out_row, Next next = {})
{
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        strip<2, Term>(rows, left, depth, right + j, right_row, out + j, out_row, next);
    if (j < columns)
        strip<1, Term>(rows, left, depth, right + j, right_row, out + j, out_row, next);
}

#ifdef __AMX_BF16__
// Whether the system lets this process use the registers of AMX, which it has to be asked for.
const bool amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// The registers of AMX as `sum_tiles` needs them, in this thread, until the end of the block; then as
// before: oneDNN may count on what it has set.
class Tiles {
    struct alignas(64) Setting {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    Setting before, now{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {}};

public:
    static constexpr int64_t ROWS = 32;
    Tiles() { _tile_storeconfig(&before); }
    ~Tiles()
    {
        asm volatile("" ::: "memory");  // GCC 12 does not know what these instructions read
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
    // For `rows` rows, at most ROWS.
    void set(int64_t rows)
    {
        const uint8_t high = std::min<int64_t>(rows, 16), low = std::max<int64_t>(rows - 16, 1);
        const uint8_t sizes[8] = {high, high, low, low, high, low, 16, 16};
        if (std::memcmp(now.rows, sizes, sizeof sizes)) {
            std::memcpy(now.rows, sizes, sizeof sizes);
            asm volatile("" ::: "memory");
            _tile_loadconfig(&now);
        }
    }
};

// out[rows, 32] = from + x · weight[depth, 32], row i of x at x + i · x_row, in tiles of 16 rows, 32 numbers
// deep. Rows from the 17th on have their part of `from` at from + second. `between` is called at every depth.
template <typename Between>
INLINE void sum_tiles(const Narrow *x, int64_t x_row, const Narrow *weight, int64_t rows, int64_t depth,
                      const float *from, int64_t second, float *out, Between between)
{
    const bool tall = rows > 16;
    constexpr int64_t OF_PANEL = 4 * PANEL;  // bytes of a row
    asm volatile("" ::: "memory");
    _tile_loadd(0, from, OF_PANEL);
    _tile_loadd(1, from + UNIT, OF_PANEL);
    if (tall) {
        _tile_loadd(2, from + second, OF_PANEL);
        _tile_loadd(3, from + second + UNIT, OF_PANEL);
    }
    for (int64_t k = 0; k + 32 <= depth; k += 32) {
        _tile_loadd(4, x + k, 2 * x_row);
        _tile_loadd(6, weight + k * PANEL, OF_PANEL);
        _tile_loadd(7, weight + k * PANEL + PANEL, OF_PANEL);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (tall) {
            _tile_loadd(5, x + UNIT * x_row + k, 2 * x_row);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        between();
    }
    _tile_stored(0, out, OF_PANEL);
    _tile_stored(1, out + UNIT, OF_PANEL);
    if (tall) {
        _tile_stored(2, out + UNIT * PANEL, OF_PANEL);
        _tile_stored(3, out + UNIT * PANEL + UNIT, OF_PANEL);
    }
    asm volatile("" ::: "memory");
}
#endif

constexpr int64_t SOME = 64;  // rows, at most

// [rows, heads, dim] by its strides; the last dimension is contiguous.
template <typename Number>
struct Heads {
    const Number *data;
    int64_t row, head;
    const Number *of(int64_t r, int64_t h) const { return data + r * row + h * head; }
};

}  // namespace

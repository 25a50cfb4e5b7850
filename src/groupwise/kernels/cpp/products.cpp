// Products of large matrices: with a packed weight in a rollout, in float32 or bfloat16; of any two
// in an update, in float32. Both
// factors are packed into panels of a tile's width, so that the micro-kernel of multiply.h reads
// them in order (GEBP: Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
// 2008).

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <omp.h>

#include "layer.h"
#include "multiply.h"

namespace {

constexpr int64_t BLOCK = 128;  // rows that stay in the second-level cache
constexpr int64_t PACK = 64;    // rows that are packed into it

// out[rows, 32] += x[rows, depth] · weight[depth, 32], and the same of pairs along the depth.
INLINE void add_product(const float *x, const float *weight, int64_t rows, int64_t depth, float *out)
{
    strip<2>(rows, {x, depth, 1}, depth, weight, PANEL, out, PANEL);
}

INLINE void add_product(const Narrow *x, const Narrow *weight, int64_t rows, int64_t depth, float *out)
{
#ifdef __AVX512BF16__
    const Left pairs{(const float *)x, depth / 2, 1};
    strip<2, Pair>(rows, pairs, depth / 2, (const float *)weight, PANEL, out, PANEL);
#endif
}

int64_t whole_rank(int64_t rank) { return (rank + PANEL - 1) / PANEL * PANEL; }

// inner = x · Aᵀ [rows, whole rank]: a tile of rows, and a panel of A.
template <typename Number>
void adapter_tile(const Linear<Number> &l, int64_t row, int64_t panel, float *inner)
{
    const int64_t rows = std::min<int64_t>(TALL, l.rows - row), width = whole_rank(l.rank);
    alignas(4 * LANES) float block[TALL][PANEL] = {};
    add_widened(l.x + row * l.depth, rows, l.depth, l.a + panel * l.depth * PANEL, PANEL, block[0]);
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(inner + (row + i) * width + panel * PANEL, block[i], sizeof block[i]);
}

// Rows of one panel, tile by tile on the stack, with adapter, activation and sum before they are
// stored.
template <typename Number>
void linear_panel(const Linear<Number> &l, int64_t panel, int64_t first, int64_t end,
                  const float *inner)
{
    const int64_t own = l.gated ? LANES : PANEL, column = panel * own;
    const int64_t columns = std::min(own, l.columns - column);
    const Number *weight = l.weight + panel * l.depth * PANEL;
    alignas(4 * LANES) float block[TALL][PANEL];
    for (int64_t row = first; row < end; row += TALL) {
        const int64_t rows = std::min<int64_t>(TALL, end - row);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < PANEL; j++)
                block[i][j] = l.bias[panel * PANEL + j];
        add_product(l.x + row * l.depth, weight, rows, l.depth, block[0]);
        if (inner) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < PANEL; j += LANES)
                    at(block[i] + j) = rounded<Number>(at(block[i] + j));
            const int64_t width = whole_rank(l.rank);
            strip<2>(rows, {inner + row * width, width, 1}, l.rank, l.b + panel * l.rank * PANEL,
                     PANEL, block[0], PANEL);
        }
        for (int64_t i = 0; i < rows; i++) {
            if (l.gated) {
                const Vector gate = rounded<Number>(at(block[i]));
                const Vector up = rounded<Number>(at(block[i] + LANES));
                at(block[i]) = rounded<Number>(gate * sigmoid(gate)) * up;
            }
            const int64_t place = (row + i) * l.columns + column;
            for (int64_t j = 0; j < columns; j++)
                put(rounded<Number>(block[i][j]) + (l.onto ? wide(l.onto[place + j]) : 0.0f),
                    l.out[place + j]);
        }
    }
}

}  // namespace

template <typename Number>
int linear(const Linear<Number> &l)
{
    const int64_t own = l.gated ? LANES : PANEL, panels = (l.columns + own - 1) / own;
    const int64_t blocks = (l.rows + BLOCK - 1) / BLOCK, tiles = (l.rows + TALL - 1) / TALL;
    const int64_t width = l.a ? whole_rank(l.rank) : 0, of_a = width / PANEL;
    const std::unique_ptr<float[]> inner(l.a ? new (std::nothrow) float[l.rows * width] : nullptr);
    if (l.a && !inner)
        return 1;
#pragma omp parallel num_threads(l.threads)
    {
        if (inner) {  // no barrier where there is no adapter
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tiles * of_a; i++)
                adapter_tile(l, i / of_a * TALL, i % of_a, inner.get());
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks * panels; i++) {
            const int64_t first = i / panels * BLOCK;
            linear_panel(l, i % panels, first, std::min(first + BLOCK, l.rows), inner.get());
        }
    }
    return 0;
}

template int linear(const Linear<float> &l);
template int linear(const Linear<Narrow> &l);

// out = left · right, or out += left · right, where left(i, k) = left[i · left_row + k · left_step] and
// right(k, j) = right[k · right_row + j · right_step].
struct Product {
    const float *left, *right;
    float *out;  // [rows, columns]
    int64_t rows, columns, depth, left_row, left_step, right_row, right_step, onto, threads;
};

SIZE_OF(Linear, Linear<float>)
SIZE_OF(Product, Product)

namespace {

// WIDTH rows or columns of a factor as [depth, WIDTH], padded with zeros:
// packed(k, j) = from[j · step + k · depth_step].
template <int WIDTH>
void pack(const float *from, int64_t size, int64_t step, int64_t depth_step, int64_t depth, float *packed)
{
    size = std::min<int64_t>(size, WIDTH);
    if (size < WIDTH)
        std::fill(packed, packed + depth * WIDTH, 0.0f);
    if (depth_step == 1)
        transpose(from, step, size, depth, packed, WIDTH);
    else
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < size; j++)
                packed[k * WIDTH + j] = from[k * depth_step + j * step];
}

// Columns of the right factor as [depth, 32].
void pack_right(const Product &p, int64_t column, float *panel)
{
    pack<PANEL>(p.right + column * p.right_step, p.columns - column, p.right_step, p.right_row,
                p.depth, panel);
}

// Rows of the left factor as [depth, 8].
void pack_left(const Product &p, int64_t row, float *packed)
{
    pack<TALL>(p.left + row * p.left_row, p.rows - row, p.left_row, p.left_step, p.depth, packed);
}

// A tile of the result, from rows of the left factor and a packed panel.
INLINE void finish(const Product &p, int64_t row, int64_t column, Left left, const float *panel)
{
    const int64_t rows = std::min<int64_t>(TALL, p.rows - row);
    const int64_t columns = std::min<int64_t>(PANEL, p.columns - column);
    float *out = p.out + row * p.columns + column;
    alignas(4 * LANES) float block[TALL][PANEL] = {};
    if (p.onto)
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(block[i], out + i * p.columns, sizeof(float) * columns);
    strip<2>(rows, left, p.depth, panel, PANEL, block[0], PANEL);
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(out + i * p.columns, block[i], sizeof(float) * columns);
}

// Each thread packs a panel and multiplies it with all rows, packed before or read in place.
void by_panels(const Product &p, float *whole, float *panel)
{
    const bool in_place = p.left_step == 1;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < (in_place ? 0 : p.rows); row += TALL)
        pack_left(p, row, whole + row * p.depth);
#pragma omp for schedule(dynamic)
    for (int64_t column = 0; column < p.columns; column += PANEL) {
        pack_right(p, column, panel);
        for (int64_t row = 0; row < p.rows; row += TALL)
            finish(p, row, column,
                   in_place ? Left{p.left + row * p.left_row, p.left_row, 1}
                            : Left{whole + row * p.depth, 1, TALL},
                   panel);
    }
}

// Each thread packs rows and multiplies them with all panels, packed before.
void by_rows(const Product &p, float *whole, float *rows)
{
#pragma omp for schedule(static)
    for (int64_t column = 0; column < p.columns; column += PANEL)
        pack_right(p, column, whole + column * p.depth);
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < p.rows; first += PACK) {
        const int64_t end = std::min(first + PACK, p.rows);
        for (int64_t row = first; row < end; row += TALL)
            pack_left(p, row, rows + (row - first) * p.depth);
        for (int64_t column = 0; column < p.columns; column += PANEL)
            for (int64_t row = first; row < end; row += TALL)
                finish(p, row, column, {rows + (row - first) * p.depth, 1, TALL},
                       whole + column * p.depth);
    }
}

}  // namespace

extern "C" {

int linear_float32(const Linear<float> *call) { return linear(*call); }
int linear_bfloat16(const Linear<Narrow> *call) { return linear(*call); }

// Whether the processor adds up products of bfloat16; products of them are not computed without.
int64_t multiplies_bfloat16()
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// Returns 0, or 1 when out of memory. The right factor is packed as a whole where the left one is
// longer, else the left one, unless its rows are contiguous and can be read in place.
int product(const Product *call)
{
    const Product &p = *call;
    const bool long_left = p.left_step != 1 && p.rows > p.columns;
    const int64_t whole = long_left        ? (p.columns + PANEL - 1) / PANEL * PANEL * p.depth
                          : p.left_step == 1 ? 0
                                             : (p.rows + PANEL - 1) / PANEL * PANEL * p.depth;
    const int64_t part = (long_left ? PACK : PANEL) * p.depth;
    float *scratch = (float *)std::aligned_alloc(4 * LANES,
                                              sizeof(float) * (whole + part * p.threads));
    if (!scratch)
        return 1;
#pragma omp parallel num_threads(p.threads)
    {
        float *mine = scratch + whole + part * omp_get_thread_num();
        if (long_left)
            by_rows(p, scratch, mine);
        else
            by_panels(p, scratch, mine);
    }
    std::free(scratch);
    return 0;
}
}

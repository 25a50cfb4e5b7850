// The products of a low-rank adapter in an update, in float32 beside a layer in float32 or bfloat16:
// its inputs are converted as they are needed, and no product of the size of the rows is stored.

#include <cstring>

#include "multiply.h"

// inner = x · aᵀ, out = onto + inner · bᵀ
template <typename Number>
struct LowRank {
    const Number *x;     // [rows, depth]
    const float *a;      // [rank / 32 rounded up, depth, 32]
    const float *b;      // [columns / 32 rounded up, rank, 32]
    const Number *onto;  // [rows, columns], or null
    Number *out;         // [rows, columns]
    float *inner;        // [rows, rank]
    int64_t rows, depth, rank, columns, threads;
};

// out = scaling · innerᵀ · x
template <typename Number>
struct LowRankGradient {
    const float *inner;  // [rows, rank]
    const Number *x;     // [rows, columns]
    float *out;          // [rank, columns]
    int64_t rows, rank, columns, threads;
    double scaling;
};

SIZE_OF(LowRank, LowRank<float>)
SIZE_OF(LowRankGradient, LowRankGradient<float>)

namespace {

constexpr int64_t ROWS = 4 * TALL;      // of a block
constexpr int64_t DEPTH = 256;          // numbers of a row that are converted to float32 at once
constexpr int64_t COLUMNS = 4 * PANEL;  // of a gradient, computed at once: short pieces of rows read slowly

int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

void copy(const float *from, int64_t size, float *to) { std::memcpy(to, from, sizeof(float) * size); }
void copy(const Narrow *from, int64_t size, float *to) { widened(from, size, to); }

// Rows of x · aᵀ.
template <typename Number>
void multiply_a(const LowRank<Number> &l, int64_t begin, int64_t rows)
{
    alignas(4 * LANES) float scratch[ROWS * DEPTH];
    for (int64_t first = 0; first < l.rank; first += PANEL) {
        const int64_t some = std::min<int64_t>(PANEL, l.rank - first);
        alignas(4 * LANES) float block[ROWS][PANEL] = {};
        for (int64_t k = 0; k < l.depth; k += DEPTH) {
            const int64_t part = std::min(DEPTH, l.depth - k);
            const Number *from = l.x + begin * l.depth + k;
            const float *x = widened(from, part, scratch);
            for (int64_t i = 1; i < rows; i++)
                widened(from + i * l.depth, part, scratch + i * DEPTH);
            multiply(rows, whole(some), part, {x, x == scratch ? DEPTH : l.depth, 1},
                     l.a + first * l.depth + k * PANEL, PANEL, block[0], PANEL, UNROLLED);
        }
        for (int64_t i = 0; i < rows; i++)
            copy(block[i], some, l.inner + (begin + i) * l.rank + first);
    }
}

// A tile of the result, from columns of a panel of b. Nothing is multiplied after the sums: GCC would fuse some
// of these multiplications with the additions, and a number would depend on its place in the tile.
template <int TILE, typename Number>
INLINE void add_tile(const LowRank<Number> &l, int64_t row, int64_t column, const float *b)
{
    constexpr int VECTORS = 2;
    const float *inner = l.inner + row * l.rank;
    Vector total[TILE][VECTORS] = {};
#pragma GCC unroll 8
    for (int64_t k = 0; k < l.rank; k++)
        for (int i = 0; i < TILE; i++)
            for (int v = 0; v < VECTORS; v++)
                total[i][v] += inner[i * l.rank + k] * at(b + k * PANEL + v * LANES);
    for (int i = 0; i < TILE; i++)
        for (int v = 0; v < VECTORS; v++) {
            const int64_t place = (row + i) * l.columns + column + v * LANES;
            store(l.onto ? load(l.onto + place) + total[i][v] : total[i][v], l.out + place);
        }
}

// The last columns, which fill no tile.
template <typename Number>
void add_columns(const LowRank<Number> &l, int64_t begin, int64_t end, int64_t column, const float *b)
{
    alignas(4 * LANES) float block[ROWS][PANEL] = {};
    multiply(end - begin, whole(l.columns - column), l.rank, {l.inner + begin * l.rank, l.rank, 1}, b,
             PANEL, block[0], PANEL);
    for (int64_t row = begin; row < end; row++)
        for (int64_t j = column; j < l.columns; j++) {
            const int64_t place = row * l.columns + j;
            const float product = block[row - begin][j - column];
            put(l.onto ? wide(l.onto[place]) + product : product, l.out[place]);
        }
}

template <typename Number>
void low_rank_rows(const LowRank<Number> &l, int64_t begin)
{
    const int64_t end = std::min(begin + ROWS, l.rows);
    multiply_a(l, begin, end - begin);
    const auto panel = [&](int64_t column) {
        return l.b + column / PANEL * PANEL * l.rank + column % PANEL;
    };
    const int64_t full = l.columns / (2 * LANES) * (2 * LANES);
    for (int64_t row = begin; row < end;) {
        const bool tall = row + TALL <= end;
        for (int64_t column = 0; column < full; column += 2 * LANES)
            if (tall)
                add_tile<TALL>(l, row, column, panel(column));
            else
                add_tile<1>(l, row, column, panel(column));
        row += tall ? TALL : 1;
    }
    if (full < l.columns)
        add_columns(l, begin, end, full, panel(full));
}

template <typename Number>
void low_rank(const LowRank<Number> &l)
{
#pragma omp parallel for num_threads(l.threads) schedule(static)
    for (int64_t row = 0; row < l.rows; row += ROWS)
        low_rank_rows(l, row);
}

// Some rows and columns of the gradient.
template <typename Number>
INLINE void gradient_part(const LowRankGradient<Number> &l, int64_t of_rank, int64_t first, int64_t some)
{
    const int64_t rank = std::min(SOME, l.rank - of_rank);
    alignas(4 * LANES) float block[SOME][COLUMNS] = {}, x[SOME][COLUMNS] = {};
    for (int64_t row = 0; row < l.rows; row += SOME) {
        const int64_t rows = std::min(SOME, l.rows - row);
        for (int64_t i = 0; i < rows; i++)
            copy(l.x + (row + i) * l.columns + first, some, x[i]);
        multiply(rank, whole(some), rows, {l.inner + row * l.rank + of_rank, 1, l.rank}, x[0],
                 COLUMNS, block[0], COLUMNS, UNROLLED);
    }
    for (int64_t r = 0; r < rank; r++)
        for (int64_t j = 0; j < some; j++)
            l.out[(of_rank + r) * l.columns + first + j] = block[r][j] * (float)l.scaling;
}

template <typename Number>
void low_rank_gradient(const LowRankGradient<Number> &l)
{
    const int64_t panels = (l.columns + PANEL * l.threads - 1) / (PANEL * l.threads);
    const int64_t some = std::min(COLUMNS, PANEL * std::max<int64_t>(panels, 1));
#pragma omp parallel for num_threads(l.threads) schedule(dynamic)
    for (int64_t first = 0; first < l.columns; first += some)
        for (int64_t of_rank = 0; of_rank < l.rank; of_rank += SOME)
            if (first + COLUMNS <= l.columns && some == COLUMNS)
                gradient_part(l, of_rank, first, COLUMNS);  // a constant, so that loops are unrolled
            else
                gradient_part(l, of_rank, first, std::min(some, l.columns - first));
}

}  // namespace

extern "C" {

void low_rank_float32(const LowRank<float> *call) { low_rank(*call); }
void low_rank_bfloat16(const LowRank<Narrow> *call) { low_rank(*call); }
void low_rank_gradient_float32(const LowRankGradient<float> *call) { low_rank_gradient(*call); }
void low_rank_gradient_bfloat16(const LowRankGradient<Narrow> *call) { low_rank_gradient(*call); }
}

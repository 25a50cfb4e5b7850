// The products of a low-rank adapter in an update, in float32 beside a layer in float32 or bfloat16:
// its inputs are converted as they are needed, and no product of the size of the rows is stored.

#include "multiply.h"

// inner = x · aᵀ, out = onto + scaling · inner · bᵀ
template <typename Number>
struct LowRank {
    const Number *x;     // [rows, depth]
    const float *a;      // [rank / 32 rounded up, depth, 32]
    const float *b;      // [columns / 32 rounded up, rank, 32]
    const Number *onto;  // [rows, columns], or null
    Number *out;         // [rows, columns]
    float *inner;        // [rows, rank]
    int64_t rows, depth, rank, columns, threads;
    double scaling;
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

int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

template <typename Number>
void low_rank_rows(const LowRank<Number> &l, int64_t row)
{
    const int64_t rows = std::min(SOME, l.rows - row);
    float *inner = l.inner + row * l.rank;
    for (int64_t first = 0; first < l.rank; first += PANEL) {
        const int64_t some = std::min<int64_t>(PANEL, l.rank - first);
        alignas(4 * LANES) float block[SOME][PANEL] = {};
        add_widened(l.x + row * l.depth, rows, l.depth, l.a + first * l.depth, whole(some),
                    block[0]);
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(inner + i * l.rank + first, block[i], sizeof(float) * some);
    }
    const float scaling = (float)l.scaling;
    for (int64_t first = 0; first < l.columns; first += PANEL) {
        const int64_t some = std::min<int64_t>(PANEL, l.columns - first);
        alignas(4 * LANES) float block[SOME][PANEL] = {};
        multiply(rows, whole(some), l.rank, {inner, l.rank, 1}, l.b + first * l.rank, PANEL,
                 block[0], PANEL);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t place = (row + i) * l.columns + first;
            int64_t j = 0;
            for (; j + LANES <= some; j += LANES) {
                const Vector product = at(block[i] + j) * scaling;
                store(l.onto ? load(l.onto + place + j) + product : product, l.out + place + j);
            }
            for (; j < some; j++) {
                const float product = block[i][j] * scaling;
                put(l.onto ? wide(l.onto[place + j]) + product : product, l.out[place + j]);
            }
        }
    }
}

template <typename Number>
void low_rank(const LowRank<Number> &l)
{
#pragma omp parallel for num_threads(l.threads) schedule(static)
    for (int64_t row = 0; row < l.rows; row += SOME)
        low_rank_rows(l, row);
}

// Some rows of 32 columns of the gradient.
template <typename Number>
void gradient_panel(const LowRankGradient<Number> &l, int64_t of_rank, int64_t first)
{
    const int64_t rank = std::min(SOME, l.rank - of_rank);
    const int64_t some = std::min<int64_t>(PANEL, l.columns - first);
    alignas(4 * LANES) float block[SOME][PANEL] = {}, x[SOME][PANEL] = {};
    for (int64_t row = 0; row < l.rows; row += SOME) {
        const int64_t rows = std::min(SOME, l.rows - row);
        for (int64_t i = 0; i < rows; i++) {
            const Number *from = l.x + (row + i) * l.columns + first;
            int64_t j = 0;
            for (; j + LANES <= some; j += LANES)
                at(x[i] + j) = load(from + j);
            for (; j < some; j++)
                x[i][j] = wide(from[j]);
        }
        multiply(rank, PANEL, rows, {l.inner + row * l.rank + of_rank, 1, l.rank}, x[0], PANEL,
                 block[0], PANEL);
    }
    for (int64_t r = 0; r < rank; r++)
        for (int64_t j = 0; j < some; j++)
            l.out[(of_rank + r) * l.columns + first + j] = block[r][j] * (float)l.scaling;
}

template <typename Number>
void low_rank_gradient(const LowRankGradient<Number> &l)
{
#pragma omp parallel for num_threads(l.threads) schedule(static)
    for (int64_t first = 0; first < l.columns; first += PANEL)
        for (int64_t of_rank = 0; of_rank < l.rank; of_rank += SOME)
            gradient_panel(l, of_rank, first);
}

}  // namespace

extern "C" {

void low_rank_float32(const LowRank<float> *call) { low_rank(*call); }
void low_rank_bfloat16(const LowRank<Narrow> *call) { low_rank(*call); }
void low_rank_gradient_float32(const LowRankGradient<float> *call) { low_rank_gradient(*call); }
void low_rank_gradient_bfloat16(const LowRankGradient<Narrow> *call) { low_rank_gradient(*call); }
}

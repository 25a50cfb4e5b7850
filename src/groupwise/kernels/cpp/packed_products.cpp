// Products with a packed weight in a rollout, in float32 or bfloat16 with sums in float32. The weight is in
// panels of a tile's width, which the micro-kernel of multiply.h reads in order.

#include <cstring>
#include <omp.h>
#include <optional>
#include <type_traits>

#include "layer.h"
#include "multiply.h"

namespace {

constexpr int64_t BLOCK = 16 * TALL;  // rows that stay in the second-level cache
constexpr int64_t CHUNK = 64;  // of the depth: so much of a panel stays in the first-level cache

// Rows of a block, a multiple of `unit` and at most BLOCK. All blocks have about as many, because every
// thread gets its share of the blocks: of 96 and 32 rows, one thread would compute three times as many.
int64_t rows_of_block(int64_t rows, int64_t unit)
{
    const int64_t units = (rows + BLOCK - 1) / BLOCK * unit;
    return rows ? (rows + units - 1) / units * unit : unit;
}

// What the products of a Number multiply: pairs of bfloat16 where the processor has such products, and
// float32 elsewhere.
#ifdef __AVX512BF16__
template <typename Number>
using Factor = Number;
#else
template <typename Number>
using Factor = float;
#endif

INLINE const Narrow *factors(const Narrow *from, int64_t, Narrow *) { return from; }
template <typename Number>
INLINE const float *factors(const Number *from, int64_t size, float *scratch)
{
    return widened(from, size, scratch);
}

// out[rows, 32] += x · panel[depth, 32], row i of x at x + i · x_row; at most BLOCK rows. Each part of the
// panel, in float32, is multiplied with all rows while it is in the first-level cache, and each tile fetches
// its share of the next part. Sums are in the order of the depth, as without parts.
template <typename Term = Single, typename Number>
INLINE void add_in_parts(const float *x, int64_t x_row, const Number *panel, int64_t rows, int64_t depth,
                         float *out)
{
    constexpr int64_t ROW = PANEL * sizeof(Number);  // bytes of the panel
    alignas(64) float scratch[CHUNK * PANEL];
    const int64_t tiles = (rows + TALL - 1) / TALL;
    int64_t share = ROW;  // of a tile, per number of the depth
    while (share / 2 * tiles >= ROW)
        share /= 2;
    for (int64_t k = 0; k < depth; k += CHUNK) {
        const int64_t deep = std::min(CHUNK, depth - k);
        const float *part = widened(panel + k * PANEL, deep * PANEL, scratch);
        Ahead next{(const char *)(panel + (k + CHUNK) * PANEL), share};
        for (int64_t row = 0; row < rows; row += TALL, next.from += CHUNK * share)
            multiply<Term>(std::min<int64_t>(TALL, rows - row), PANEL, deep, {x + row * x_row + k, x_row, 1},
                           part, PANEL, out + row * PANEL, PANEL, next);
    }
}

// out[rows, 32] += x · weight[depth, 32], row i of x at x + i · x_row
template <typename Number>
INLINE void add_product(const float *x, int64_t x_row, const Number *weight, int64_t rows, int64_t depth,
                        float *out)
{
    add_in_parts(x, x_row, weight, rows, depth, out);
}

#ifdef __AVX512BF16__
INLINE void add_product(const Narrow *x, int64_t x_row, const Narrow *weight, int64_t rows, int64_t depth,
                        float *out)
{
    int64_t done = 0;
#ifdef __AMX_BF16__
    if (amx) {
        done = depth / 32 * 32;
        sum_tiles(x, x_row, weight, rows, depth, out, UNIT * PANEL, out, [] {});
    }
#endif
    const float *pairs = (const float *)(x + done), *rest = (const float *)(weight + done * PANEL);
    add_in_parts<Pair>(pairs, x_row / 2, rest, rows, (depth - done) / 2, out);
}
#endif

// out[rows, 32] += x · weights in 4 bits, which become numbers in parts that stay in the first-level cache.
template <typename Number>
INLINE void add_small(const Linear<Number> &l, int64_t panel, const Factor<Number> *x, int64_t rows,
                      float *out)
{
    alignas(64) Factor<Number> part[OF_SCALE * PANEL];
    for (int64_t k = 0; k < l.depth; k += OF_SCALE) {
        decode<Number>(l.small, panel, l.depth, k, part);
        add_product(x + k, l.depth, part, rows, OF_SCALE, out);
    }
}

// What a thread has to set before it computes products of a Number, for a number of rows.
template <typename Number>
struct Ready {
    static constexpr int64_t ROWS = BLOCK;  // at most
    void set(int64_t) {}
};

#ifdef __AMX_BF16__
template <>
struct Ready<Narrow> {
    static constexpr int64_t ROWS = Tiles::ROWS;
    std::optional<Tiles> tiles;
    Ready()
    {
        if (amx)
            tiles.emplace();
    }
    void set(int64_t rows)
    {
        if (tiles)
            tiles->set(rows);
    }
};
#endif

// The product with A is cut into parts of its depth, so that all threads have some of it even where
// rows are few, and each part of A is read once. Parts are summed in order: a row has the same bits
// whatever else is computed.
constexpr int64_t PART = 256;

int64_t whole_rank(int64_t rank) { return (rank + UNIT - 1) / UNIT * UNIT; }

// inner = x · Aᵀ [rows, whole rank], over a part of the depth: up to SOME rows of a block, and 16 columns
// of A.
template <typename Number>
void adapter_part(const Linear<Number> &l, int64_t part, int64_t unit, int64_t first, int64_t end,
                  float *inner)
{
    const int64_t start = part * PART, depth = std::min(PART, l.depth - start);
    const int64_t width = whole_rank(l.rank);
    const float *a = l.a + (unit * l.depth + start) * UNIT;
    alignas(4 * LANES) float scratch[TALL * PART];
    for (int64_t row = first; row < end; row += TALL, inner += TALL * width) {
        const int64_t rows = std::min<int64_t>(TALL, end - row);
        const Number *from = l.x + row * l.depth + start;
        const float *x = widened(from, depth, scratch);
        for (int64_t i = 1; i < rows; i++)
            widened(from + i * l.depth, depth, scratch + i * PART);
        float *out = inner + unit * UNIT;
        for (int64_t i = 0; i < rows; i++)
            std::fill(out + i * width, out + i * width + UNIT, 0.0f);
        multiply(rows, UNIT, depth, {x, x == scratch ? PART : l.depth, 1}, a, UNIT, out, width);
    }
}

// All parts of x · Aᵀ for some rows, shared by the threads of a parallel block: [parts, rows, whole rank].
template <typename Number>
void inner_products(const Linear<Number> &l, int64_t begin, int64_t end, float *inner)
{
    const int64_t width = whole_rank(l.rank), parts = (l.depth + PART - 1) / PART;
    const int64_t some = (end - begin + SOME - 1) / SOME, units = width / UNIT;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < units * parts * some; i++) {
        const int64_t part = i / some % parts, row = i % some * SOME, first = begin + row;
        float *to = inner + (part * (end - begin) + row) * width;
        adapter_part(l, part, i / some / parts, first, std::min(first + SOME, end), to);
    }
}

// The sum of parts of `size` numbers.
void sum_parts(const float *parts, int64_t count, int64_t size, float *sum)
{
    std::memcpy(sum, parts, sizeof(float) * size);
    for (int64_t part = 1; part < count; part++)
        for (int64_t i = 0; i < size; i += LANES)
            at(sum + i) += at(parts + part * size + i);
}

// out[rows, 32] += inner · Bᵀ of a panel; the columns of each half have a part of the rank.
template <typename Number>
INLINE void add_adapter(const Linear<Number> &l, int64_t panel, const float *inner, int64_t rows,
                        float *out)
{
    const int64_t width = whole_rank(l.rank), *start = l.start + 2 * panel;
    const float *b = l.b + panel * l.high * PANEL;
    if (start[0] == start[1])
        multiply(rows, PANEL, l.high, {inner + start[0], width, 1}, b, PANEL, out, PANEL);
    else
        for (int64_t half = 0; half < 2; half++)
            multiply(rows, UNIT, l.high, {inner + start[half], width, 1}, b + half * UNIT, PANEL,
                     out + half * UNIT, PANEL);
}

// A row of a panel that is summed: activation, rounding and the sum with another row.
template <typename Number>
INLINE void finish_row(const Linear<Number> &l, int64_t panel, int64_t row, float *sums)
{
    const int64_t own = l.gated ? UNIT : PANEL, column = panel * own;
    const int64_t columns = std::min(own, l.columns - column), place = row * l.columns + column;
    for (int64_t j = 0; l.gated && j < UNIT; j += LANES) {
        const Vector gate = rounded<Number>(at(sums + j));
        const Vector up = rounded<Number>(at(sums + UNIT + j));
        at(sums + j) = rounded<Number>(gate * sigmoid(gate)) * up;
    }
    int64_t j = 0;
    for (; j + LANES <= columns; j += LANES) {
        const Vector more = l.onto ? load(l.onto + place + j) : Vector{};
        store(rounded<Number>(at(sums + j)) + more, l.out + place + j);
    }
    for (; j < columns; j++)
        put(rounded<Number>(sums[j]) + (l.onto ? wide(l.onto[place + j]) : 0.0f), l.out[place + j]);
}

// Rows of one panel, block by block on the stack, with adapter, activation and sum before they are
// stored.
template <typename Number>
void linear_panel(const Linear<Number> &l, int64_t panel, int64_t first, int64_t end,
                  const Factor<Number> *x, const float *inner, Ready<Factor<Number>> &ready)
{
    constexpr int64_t STEP = Ready<Factor<Number>>::ROWS;
    const Number *weight = l.weight + panel * l.depth * PANEL;
    alignas(64) float block[STEP][PANEL];
    for (int64_t row = first; row < end; row += STEP) {
        const int64_t rows = std::min<int64_t>(STEP, end - row);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < PANEL; j++)
                block[i][j] = l.bias[panel * PANEL + j];
        ready.set(rows);
        if (l.small.codes)
            add_small(l, panel, x + row * l.depth, rows, block[0]);
        else
            add_product(x + row * l.depth, l.depth, weight, rows, l.depth, block[0]);
        if (inner) {
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < PANEL; j += LANES)
                    at(block[i] + j) = rounded<Number>(at(block[i] + j));
            add_adapter(l, panel, inner + (row - first) * whole_rank(l.rank), rows, block[0]);
        }
        for (int64_t i = 0; i < rows; i++)
            finish_row(l, panel, row + i, block[i]);
    }
}

#ifdef __AMX_BF16__
// Panels of a thread, 32 rows at a time, which are finished while the next ones are multiplied.
class PanelsInTiles {
    struct Block {
        alignas(64) float sums[Tiles::ROWS][PANEL];
        int64_t panel, row, rows = 0, finished = 0;
    };
    const Linear<Narrow> &l;
    Tiles tiles;
    Block blocks[2];
    int64_t count = 0;

    INLINE void finish_rows(Block &block, int64_t some)
    {
        const int64_t end = std::min(block.finished + some, block.rows);
        for (int64_t i = block.finished; i < end; i++)
            finish_row(l, block.panel, block.row + i, block.sums[i]);
        block.finished = end;
    }

public:
    explicit PanelsInTiles(const Linear<Narrow> &l) : l(l) {}

    void compute(int64_t panel, int64_t first, int64_t end)
    {
        alignas(64) float bias[UNIT][PANEL];
        for (int64_t i = 0; i < UNIT; i++)
            std::memcpy(bias[i], l.bias + panel * PANEL, sizeof bias[i]);
        for (int64_t row = first; row < end; row += Tiles::ROWS, count++) {
            Block &now = blocks[count % 2], &last = blocks[(count + 1) % 2];
            now.panel = panel, now.row = row, now.rows = std::min(Tiles::ROWS, end - row);
            tiles.set(now.rows);
            sum_tiles(l.x + row * l.depth, l.depth, l.weight + panel * l.depth * PANEL, now.rows, l.depth,
                      bias[0], 0, now.sums[0], [&] { finish_rows(last, 2); });
            finish_rows(last, Tiles::ROWS);
            now.finished = 0;
        }
    }

    void finish() { finish_rows(blocks[(count + 1) % 2], Tiles::ROWS); }
};

// Whether all of a product is computed in tiles.
bool fits_tiles(const Linear<Narrow> &l) { return amx && !l.a && !l.small.codes && l.depth % 32 == 0; }

void linear_in_tiles(const Linear<Narrow> &l)
{
    const int64_t own = l.gated ? UNIT : PANEL, panels = (l.columns + own - 1) / own;
    const int64_t size = rows_of_block(l.rows, Tiles::ROWS), units = (l.rows + size - 1) / size * panels;
#pragma omp parallel num_threads(l.threads)
    {
        PanelsInTiles mine(l);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < units; i++) {
            const int64_t first = i / panels * size;
            mine.compute(i % panels, first, std::min(first + size, l.rows));
        }
        mine.finish();
    }
}
#endif

}  // namespace

template <typename Number>
int linear(const Linear<Number> &l)
{
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<Number, Narrow>)
        if (fits_tiles(l)) {
            linear_in_tiles(l);
            return 0;
        }
#endif
    const int64_t own = l.gated ? UNIT : PANEL, panels = (l.columns + own - 1) / own;
    const int64_t width = l.a ? whole_rank(l.rank) : 0, parts = (l.depth + PART - 1) / PART;
    const int64_t of_block = std::min(BLOCK, l.rows) * width;
    const int64_t converted = std::is_same_v<Number, Factor<Number>> ? 0 : l.depth;
    const auto inner = scratch<float>(parts * of_block);
    const auto sums = scratch<float>(of_block * l.threads);
    const auto copy = scratch<Factor<Number>>(converted * l.rows);
    if (!inner || !sums || !copy)
        return 1;
    // No barrier where nothing is converted, and where there is no adapter.
    const int64_t step = l.a ? BLOCK : std::max<int64_t>(l.rows, 1);
#pragma omp parallel num_threads(l.threads)
    {
        if (converted) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < l.rows; i++)
                factors(l.x + i * l.depth, l.depth, copy.get() + i * l.depth);
        }
        const auto *x = factors(l.x, 0, copy.get());  // what is converted already
        float *sum = l.a ? sums.get() + of_block * omp_get_thread_num() : nullptr;
        Ready<Factor<Number>> ready;
        for (int64_t begin = 0; begin < l.rows; begin += step) {
            const int64_t stop = std::min(begin + step, l.rows), rows = stop - begin;
            if (l.a) {
                inner_products(l, begin, stop, inner.get());
                sum_parts(inner.get(), parts, rows * width, sum);
            }
            const int64_t size = rows_of_block(rows, TALL);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < (rows + size - 1) / size * panels; i++) {
                const int64_t first = begin + i / panels * size;
                linear_panel(l, i % panels, first, std::min(first + size, stop), x, sum, ready);
            }
        }
    }
    return 0;
}

template int linear(const Linear<float> &l);
template int linear(const Linear<Narrow> &l);

SIZE_OF(FourBits, FourBits)
SIZE_OF(Linear, Linear<float>)

extern "C" {

int linear_float32(const Linear<float> *call) { return linear(*call); }
int linear_bfloat16(const Linear<Narrow> *call) { return linear(*call); }

// Whether the processor multiplies pairs of bfloat16, as which weights are packed then.
int64_t multiplies_pairs()
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
}

// Products of any two matrices in an update, in float32 or bfloat16 with sums in float32. Both factors are
// packed into panels of a tile's width, so that the micro-kernel of multiply.h reads them in order (GEBP:
// Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

#include <cstring>
#include <omp.h>
#include <type_traits>
#include <unistd.h>

#include "memory.h"
#include "multiply.h"
#include "product.h"

SIZE_OF(Product, Product<float, float>)

namespace {

constexpr int64_t PACK = 8 * TALL;  // rows that are packed into the second-level cache
// How deep a product may be for these and a panel to fit into it.
const int64_t DEEPEST = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 19) / (4 * (PACK + PANEL));
constexpr int64_t DEEPEST_IN_TILES = 1 << 12;  // a panel of 32 columns has 256 KB then
constexpr int64_t MOST_SUMS = 1 << 24;  // that are kept in float32 for a result in 16 bits

// With a width that GCC knows, contiguous numbers are moved at once.
template <int WIDTH>
INLINE void copy(const float *from, float *to) { std::memcpy(to, from, WIDTH * sizeof(float)); }
template <int WIDTH>
INLINE void copy(const Narrow *from, float *to)
{
    for (int64_t j = 0; j < WIDTH; j++)
        to[j] = wide(from[j]);
}

// WIDTH rows or columns of a factor as [depth, WIDTH] in float32, padded with zeros:
// packed(k, j) = from[j · step + k · depth_step].
template <int WIDTH, typename Number>
void pack(const Number *from, int64_t size, int64_t step, int64_t depth_step, int64_t depth,
          float *packed)
{
    size = std::min<int64_t>(size, WIDTH);
    if (size < WIDTH)
        std::fill(packed, packed + depth * WIDTH, 0.0f);
    if (depth_step == 1)
        transpose(from, step, size, depth, packed, WIDTH);
    else if (step == 1 && size == WIDTH)
        for (int64_t k = 0; k < depth; k++)
            copy<WIDTH>(from + k * depth_step, packed + k * WIDTH);
    else
        for (int64_t k = 0; k < depth; k++)
            for (int64_t j = 0; j < size; j++)
                packed[k * WIDTH + j] = wide(from[k * depth_step + j * step]);
}

template <typename Number, typename Out>
struct Multiplication : Product<Number, Out> {
    using Of = Product<Number, Out>;
    using Of::left, Of::right, Of::out, Of::rows, Of::columns, Of::depth, Of::left_row;
    using Of::left_step, Of::right_row, Of::right_step, Of::onto, Of::threads;

    // Columns of the right factor as [depth, 32].
    void pack_right(int64_t column, float *panel) const
    {
        pack<PANEL>(right + column * right_step, columns - column, right_step, right_row, depth,
                    panel);
    }

    // Rows of the left factor as [depth, TALL].
    void pack_left(int64_t row, float *packed) const
    {
        pack<TALL>(left + row * left_row, rows - row, left_row, left_step, depth, packed);
    }

    // A tile of the result, from rows of the left factor and a packed panel.
    INLINE void finish(int64_t row, int64_t column, Left some, const float *panel) const
    {
        const int64_t tall = std::min<int64_t>(TALL, rows - row);
        const int64_t broad = std::min<int64_t>(PANEL, columns - column);
        Out *place = out + row * columns + column;
        alignas(4 * LANES) float block[TALL][PANEL] = {};
        for (int64_t i = 0; onto && i < tall; i++)
            for (int64_t j = 0; j < broad; j++)
                block[i][j] = wide(place[i * columns + j]);
        multiply(tall, PANEL, depth, some, panel, PANEL, block[0], PANEL, UNROLLED);
        for (int64_t i = 0; i < tall; i++)
            for (int64_t j = 0; j < broad; j++)
                put(block[i][j], place[i * columns + j]);
    }

    // Rows whose numbers are contiguous are not packed, and converted unless they are float32.
    bool in_rows() const { return left_step == 1; }
    bool in_place() const { return in_rows() && std::is_same_v<Number, float>; }

    // Rows of the left factor, or what `prepared` has made of them.
    Left rows_from(int64_t row, const float *prepared) const
    {
        if (!in_rows())
            return {prepared + row * depth, 1, TALL};
        if constexpr (std::is_same_v<Number, float>)
            return {left + row * left_row, left_row, 1};
        return {prepared + row * depth, depth, 1};
    }

    // Each thread packs a panel and multiplies it with all rows, prepared before.
    void by_panels(float *whole, float *panel) const
    {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < (in_place() ? 0 : rows); first += TALL)
            if (in_rows())
                for (int64_t row = first; row < std::min(first + TALL, rows); row++)
                    widened(left + row * left_row, depth, whole + row * depth);
            else
                pack_left(first, whole + first * depth);
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < columns; column += PANEL) {
            pack_right(column, panel);
            for (int64_t row = 0; row < rows; row += TALL)
                finish(row, column, rows_from(row, whole), panel);
        }
    }

    // Each thread packs rows and multiplies them with all panels, packed before.
    void by_rows(float *whole, float *packed) const
    {
#pragma omp for schedule(static)
        for (int64_t column = 0; column < columns; column += PANEL)
            pack_right(column, whole + column * depth);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < rows; first += PACK) {
            const int64_t end = std::min(first + PACK, rows);
            for (int64_t row = first; row < end; row += TALL)
                pack_left(row, packed + (row - first) * depth);
            for (int64_t column = 0; column < columns; column += PANEL)
                for (int64_t row = first; row < end; row += TALL)
                    finish(row, column, {packed + (row - first) * depth, 1, TALL},
                           whole + column * depth);
        }
    }

    int compute() const
    {
        if (depth <= deepest())
            return compute_whole();
        if constexpr (std::is_same_v<Out, float>)
            return compute_in_parts();
        else
            return rows * columns <= MOST_SUMS ? compute_in_float32() : compute_whole();
    }

    bool in_tiles() const
    {
        if constexpr (std::is_same_v<Number, Narrow>)
            return fits_tiles<Out>(*this);
        return false;
    }

    int64_t deepest() const { return in_tiles() ? DEEPEST_IN_TILES : DEEPEST; }

    // The sum of products with equal parts of the depth, added in order. Without tiles it has the bits
    // of the whole.
    int compute_in_parts() const
    {
        const int64_t parts = (depth + deepest() - 1) / deepest();
        const int64_t size = ((depth + parts - 1) / parts + PANEL - 1) / PANEL * PANEL;
        for (int64_t k = 0; k < depth; k += size) {
            Multiplication part = *this;
            part.left += k * left_step;
            part.right += k * right_row;
            part.depth = std::min(size, depth - k);
            part.onto = onto || k;
            if (part.compute_whole())
                return 1;
        }
        return 0;
    }

    // The same in 16 bits: sums are rounded once.
    int compute_in_float32() const
    {
        const auto sums = memory_of<float>(rows * columns);
        if (!sums)
            return 1;
        if (onto)
            widened(out, rows * columns, sums.get());
        const Product<Number, float> same{left, right, sums.get(), rows, columns, depth, left_row,
                                          left_step, right_row, right_step, onto, threads};
        if (Multiplication<Number, float>{same}.compute_in_parts())
            return 1;
#pragma omp parallel for num_threads(threads)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = row * columns; i < (row + 1) * columns; i++)
                put(sums[i], out[i]);
        return 0;
    }

    // The right factor is packed as a whole where the left one is longer, else the left one.
    int compute_whole() const
    {
        if constexpr (std::is_same_v<Number, Narrow>)
            if (in_tiles())
                return multiply_tiles<Out>(*this);
        const bool long_left = !in_rows() && rows > columns;
        const int64_t of_rows = (rows + TALL - 1) / TALL * TALL;
        const int64_t of_columns = (columns + PANEL - 1) / PANEL * PANEL;
        const int64_t whole = (long_left ? of_columns : in_place() ? 0 : of_rows) * depth;
        const int64_t part = (long_left ? PACK : PANEL) * depth;
        const auto memory = memory_of<float>(whole + part * threads);
        if (!memory)
            return 1;
#pragma omp parallel num_threads(threads)
        {
            float *all = memory.get(), *mine = all + whole + part * omp_get_thread_num();
            if (long_left)
                by_rows(all, mine);
            else
                by_panels(all, mine);
        }
        return 0;
    }
};

}  // namespace

extern "C" {

// Products return 0, or 1 when out of memory.
int product_float32(const Product<float, float> *call)
{
    return Multiplication<float, float>{*call}.compute();
}

#define PRODUCT(name, Out)                                                                         \
    int product_##name(const Product<Narrow, Out> *call)                                           \
    {                                                                                              \
        return Multiplication<Narrow, Out>{*call}.compute();                                       \
    }

PRODUCT(bfloat16, Narrow)
PRODUCT(bfloat16_to_float32, float)
}

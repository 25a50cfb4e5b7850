// Products of large matrices of bfloat16 in the tiles of AMX, with sums in float32. oneDNN computes
// dyᵀ · x, the gradient of a weight, at half the speed of other products, because its left factor has
// to be transposed. Here both factors are packed into tiles as the instructions read them: the shorter
// one as a whole, and of the other one as many panels as stay in the second-level cache.

#include "product.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <omp.h>

namespace {

constexpr int64_t DEEP = 32;           // numbers of a row of a tile
constexpr int64_t STAGE = 2 * TILE;    // numbers of a panel of 32 rows or columns, DEEP deep
constexpr int64_t NEAR = 1 << 19;      // numbers that stay in the second-level cache
constexpr int64_t MOST = 8;            // panels of them, which leave room for the other factor's

// One factor: factor(i, k) = data[i · along + k · deep], for a row or column i.
struct Factor {
    const Narrow *data;
    int64_t size, depth, along, deep;
};

// Lane l: the 8 numbers at from + l · step.
INLINE __m512i lanes(const Narrow *from, int64_t step)
{
    const auto lane = [&](int l) { return _mm_loadu_si128((const __m128i *)(from + l * step)); };
    __m512i all = _mm512_castsi128_si512(lane(0));
    all = _mm512_mask_broadcast_i32x4(all, 0x00f0, lane(1));
    all = _mm512_mask_broadcast_i32x4(all, 0x0f00, lane(2));
    return _mm512_mask_broadcast_i32x4(all, 0xf000, lane(3));
}

// to[i, k] = from[k, i], for 16 i and 32 k: eight rows of `from` per lane, transposed in each lane.
INLINE void transpose_tile(const Narrow *from, int64_t row, Narrow *to)
{
    for (int i = 0; i < UNIT; i += 8) {
        __m512i one[8], pair[8];
        for (int k = 0; k < 8; k++)
            one[k] = lanes(from + k * row + i, 8 * row);
        for (int k = 0; k < 8; k += 2) {
            pair[k] = _mm512_unpacklo_epi16(one[k], one[k + 1]);
            pair[k + 1] = _mm512_unpackhi_epi16(one[k], one[k + 1]);
        }
        for (int half = 0; half < 2; half++) {
            const __m512i a = _mm512_unpacklo_epi32(pair[half], pair[2 + half]);
            const __m512i b = _mm512_unpackhi_epi32(pair[half], pair[2 + half]);
            const __m512i c = _mm512_unpacklo_epi32(pair[4 + half], pair[6 + half]);
            const __m512i d = _mm512_unpackhi_epi32(pair[4 + half], pair[6 + half]);
            Narrow *place = to + (i + 4 * half) * DEEP;
            _mm512_store_si512(place, _mm512_unpacklo_epi64(a, c));
            _mm512_store_si512(place + DEEP, _mm512_unpackhi_epi64(a, c));
            _mm512_store_si512(place + 2 * DEEP, _mm512_unpacklo_epi64(b, d));
            _mm512_store_si512(place + 3 * DEEP, _mm512_unpackhi_epi64(b, d));
        }
    }
}

// to[k / 2, i, k % 2] = from[k, i], for 16 i and 32 k.
INLINE void pair_rows(const Narrow *from, int64_t row, Narrow *to)
{
    for (int k = 0; k < DEEP; k += 2, from += 2 * row) {
        const __m512i even = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
        const __m256i odd = _mm256_loadu_si256((const __m256i *)(from + row));
        const __m512i both = _mm512_inserti64x4(even, odd, 1);
        _mm512_store_si512(to + k * UNIT, paired(both));
    }
}

// A tile as the instructions read it: [i, k] of the left factor, [k / 2, i, k % 2] of the right one.
template <bool LEFT>
INLINE void pack_tile(const Narrow *from, int64_t along, int64_t deep, Narrow *to)
{
    if (deep != 1)
        return LEFT ? transpose_tile(from, deep, to) : pair_rows(from, deep, to);
    Vector rows[UNIT];
    for (int i = 0; i < UNIT; i++)
        rows[i] = (Vector)_mm512_loadu_si512(from + i * along);
    if (!LEFT)
        swap_all(rows);
    for (int i = 0; i < UNIT; i++)
        _mm512_store_si512(to + i * DEEP, (__m512i)rows[i]);
}

// As `pack_tile`, for a tile that the factor does not fill: zeros beyond its edges.
template <bool LEFT>
void pack_edge(const Factor &f, int64_t first, int64_t k, Narrow *to)
{
    alignas(64) Narrow whole[TILE] = {};
    const int64_t along = f.deep == 1 ? DEEP : 1, deep = f.deep == 1 ? 1 : UNIT;
    for (int64_t i = first; i < std::min(first + UNIT, f.size); i++)
        for (int64_t l = k; l < std::min(k + DEEP, f.depth); l++)
            whole[(i - first) * along + (l - k) * deep] = f.data[i * f.along + l * f.deep];
    pack_tile<LEFT>(whole, along, deep, to);
}

// Panels of a factor, as [panels, depth / 32, 2 tiles].
template <bool LEFT>
void pack_panels(const Factor &f, int64_t first, int64_t end, Narrow *packed)
{
    const int64_t of_panel = (f.depth + DEEP - 1) / DEEP * STAGE;
    for (int64_t k = 0; k < f.depth; k += DEEP)  // side by side, as the numbers are in memory
        for (int64_t i = first * PANEL; i < end * PANEL; i += UNIT) {
            const int64_t panel = i / PANEL - first;
            Narrow *to = packed + panel * of_panel + k / DEEP * STAGE + i % PANEL / UNIT * TILE;
            if (i + UNIT <= f.size && k + DEEP <= f.depth)
                pack_tile<LEFT>(f.data + i * f.along + k * f.deep, f.along, f.deep, to);
            else
                pack_edge<LEFT>(f, i, k, to);
        }
}

INLINE void prefetch_tile(const Narrow *tile)
{
    for (int64_t i = 0; i < TILE; i += DEEP)
        __builtin_prefetch(tile + i);
}

// out[32, 32] = left · right, of packed panels. The tiles of the next step are prefetched: where two
// threads share a core, products take a fifth less time so. From `ahead`, an eighth of the panel that
// follows comes into the second-level cache.
INLINE void multiply_panels(const Narrow *left, const Narrow *right, int64_t depth,
                            const Narrow *ahead, float *out)
{
    constexpr int64_t OF_TILE = 2 * DEEP, OF_PANEL = 4 * PANEL;  // bytes of a row
    asm volatile("" ::: "memory");  // GCC 12 does not know what these instructions read
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEEP, left += STAGE, right += STAGE, ahead += STAGE / MOST) {
        _tile_loadd(4, left, OF_TILE);
        _tile_loadd(6, right, OF_TILE);
        prefetch_tile(left + STAGE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + TILE, OF_TILE);
        prefetch_tile(right + STAGE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE, OF_TILE);
        prefetch_tile(left + STAGE + TILE);
        _tile_dpbf16ps(2, 5, 6);
        prefetch_tile(right + STAGE + TILE);
        for (int64_t i = 0; i < STAGE / MOST; i += DEEP)
            __builtin_prefetch(ahead + i, 0, 2);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, OF_PANEL);
    _tile_stored(1, out + UNIT, OF_PANEL);
    _tile_stored(2, out + UNIT * PANEL, OF_PANEL);
    _tile_stored(3, out + UNIT * PANEL + UNIT, OF_PANEL);
}

INLINE void put_vector(Vector x, float *place) { store(x, place); }
INLINE void put_vector(Vector x, Narrow *place)
{
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(place, &narrow, sizeof narrow);
}

template <typename Out>
struct TiledProduct : Product<Narrow, Out> {
    using Of = Product<Narrow, Out>;
    using Of::left, Of::right, Of::out, Of::rows, Of::columns, Of::depth, Of::left_row;
    using Of::left_step, Of::right_row, Of::right_step, Of::onto, Of::threads;

    Factor of_left() const { return {left, rows, depth, left_row, left_step}; }
    Factor of_right() const { return {right, columns, depth, right_step, right_row}; }

    // 32 rows and columns of the result, stored as soon as they are summed.
    INLINE void finish(int64_t row, int64_t column, const Narrow *one, const Narrow *other,
                       const Narrow *ahead) const
    {
        const int64_t tall = std::min<int64_t>(PANEL, rows - row);
        const int64_t broad = std::min<int64_t>(PANEL, columns - column);
        alignas(64) float block[PANEL][PANEL];
        Out *place = out + row * columns + column;
        for (int64_t i = 0; i < tall; i++)
            for (int64_t j = 0; j < broad; j += 64 / sizeof(Out))
                __builtin_prefetch(place + i * columns + j, 1);
        multiply_panels(one, other, depth, ahead, block[0]);
        for (int64_t i = 0; i < tall; i++, place += columns) {
            int64_t j = 0;
            for (; j + LANES <= broad; j += LANES)
                put_vector(at(block[i] + j) + (onto ? load(place + j) : Vector{}), place + j);
            for (; j < broad; j++)
                put(block[i][j] + (onto ? wide(place[j]) : 0.0f), place[j]);
        }
    }

    // Each thread packs some panels of the long factor and multiplies them with all of the short one,
    // packed before.
    template <bool ROWS>
    void compute(Narrow *whole, Narrow *mine, int64_t of_panel, int64_t group) const
    {
        const Factor far = ROWS ? of_left() : of_right(), close = ROWS ? of_right() : of_left();
        const int64_t panels = (far.size + PANEL - 1) / PANEL;
        const int64_t others = (close.size + PANEL - 1) / PANEL;
        Tiles tiles;
        tiles.set(PANEL);
#pragma omp for schedule(static)
        for (int64_t other = 0; other < others; other++)
            pack_panels<!ROWS>(close, other, other + 1, whole + other * of_panel);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < panels; first += group) {
            const int64_t end = std::min(first + group, panels);
            pack_panels<ROWS>(far, first, end, mine);
            for (int64_t other = 0; other < others; other++)
                for (int64_t panel = first; panel < end; panel++) {
                    const Narrow *one = mine + (panel - first) * of_panel;
                    const Narrow *two = whole + other * of_panel;
                    const Narrow *ahead = two + of_panel + (panel - first) * (of_panel / MOST);
                    if (ROWS)
                        finish(panel * PANEL, other * PANEL, one, two, ahead);
                    else
                        finish(other * PANEL, panel * PANEL, two, one, ahead);
                }
        }
    }

    int compute() const
    {
        const bool by_rows = rows >= columns;
        const int64_t panels = (std::max(rows, columns) + PANEL - 1) / PANEL;
        const int64_t others = (std::min(rows, columns) + PANEL - 1) / PANEL;
        const int64_t of_panel = (depth + DEEP - 1) / DEEP * STAGE;
        const int64_t fitting = std::min(MOST, NEAR / std::max<int64_t>(of_panel, 1));
        const int64_t fair = (panels + threads - 1) / threads;
        const int64_t group = std::max<int64_t>(std::min(fitting, fair), 1);
        const int64_t size = (others + group * threads) * of_panel;
        const auto packed = memory_of<Narrow>(size);
        if (!packed)
            return 1;
#pragma omp parallel num_threads(threads)
        {
            Narrow *all = packed.get(), *mine = all + (others + group * omp_get_thread_num()) * of_panel;
            if (by_rows)
                compute<true>(all, mine, of_panel, group);
            else
                compute<false>(all, mine, of_panel, group);
        }
        return 0;
    }
};

}  // namespace

// Whether products of bfloat16 are computed in the tiles of AMX.
extern "C" int64_t multiplies_tiles() { return amx; }

template <typename Out>
bool fits_tiles(const Product<Narrow, Out> &p)
{
    return amx && (p.left_row == 1 || p.left_step == 1) && (p.right_row == 1 || p.right_step == 1);
}

template <typename Out>
int multiply_tiles(const Product<Narrow, Out> &product)
{
    return TiledProduct<Out>{product}.compute();
}

#else

extern "C" int64_t multiplies_tiles() { return 0; }

template <typename Out>
bool fits_tiles(const Product<Narrow, Out> &)
{
    return false;
}

template <typename Out>
int multiply_tiles(const Product<Narrow, Out> &)
{
    return 1;
}

#endif

template bool fits_tiles(const Product<Narrow, Narrow> &);
template bool fits_tiles(const Product<Narrow, float> &);
template int multiply_tiles(const Product<Narrow, Narrow> &);
template int multiply_tiles(const Product<Narrow, float> &);

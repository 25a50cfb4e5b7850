// Products of large matrices of bfloat16 in the tiles of AMX, with sums in float32. Factors are packed into
// tiles as the instructions read them: one as a whole, unless it is read in place, and of the other one as
// many panels as stay in the second-level cache.

#include "product.h"
#include "tiles.h"

#ifdef TILES
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

// Whether the instructions read a panel in place: one of a left factor whose depth is contiguous.
template <bool LEFT>
bool in_place(const Factor &f, int64_t panel)
{
    return LEFT && f.deep == 1 && f.depth % DEEP == 0 && (panel + 1) * PANEL <= f.size;
}

// A panel, where it is or where it has been packed.
template <bool LEFT>
Operand panel_of(const Factor &f, int64_t panel, const Narrow *packed)
{
    if (in_place<LEFT>(f, panel))
        return {f.data + panel * PANEL * f.along, 2 * f.along, UNIT * f.along, DEEP};
    return {packed, 2 * DEEP, TILE, STAGE};
}

// Panels of a factor, as [panels, depth / 32, 2 tiles].
template <bool LEFT>
void pack_panels(const Factor &f, int64_t first, int64_t end, Narrow *packed)
{
    const int64_t of_panel = (f.depth + DEEP - 1) / DEEP * STAGE;
    const auto pack = [&](int64_t i, int64_t k) {
        const int64_t panel = i / PANEL - first;
        Narrow *to = packed + panel * of_panel + k / DEEP * STAGE + i % PANEL / UNIT * TILE;
        if (i + UNIT <= f.size && k + DEEP <= f.depth)
            pack_tile<LEFT>(f.data + i * f.along + k * f.deep, f.along, f.deep, to);
        else
            pack_edge<LEFT>(f, i, k, to);
    };
    // In the order in which the numbers are in memory.
    if (f.deep == 1) {
        for (int64_t i = first * PANEL; i < end * PANEL; i += UNIT)
            for (int64_t k = in_place<LEFT>(f, i / PANEL) ? f.depth : 0; k < f.depth; k += DEEP)
                pack(i, k);
    } else {
        for (int64_t k = 0; k < f.depth; k += DEEP)
            for (int64_t i = first * PANEL; i < end * PANEL; i += UNIT)
                pack(i, k);
    }
}

INLINE void put_row(const float *sums, float *place)
{
    store(at(sums), place);
    store(at(sums + LANES), place + LANES);
}

INLINE void put_row(const float *sums, Narrow *place)
{
    const __m512bh narrow = _mm512_cvtne2ps_pbh(_mm512_load_ps(sums + LANES), _mm512_load_ps(sums));
    std::memcpy(place, &narrow, sizeof narrow);
}

// 32 rows and columns of the result. They are rounded and stored while the next ones are multiplied.
template <typename Out>
struct Block {
    alignas(64) float sums[PANEL][PANEL];
    Out *place;
    int64_t row, tall, broad, stored = 0;
    bool onto;

    INLINE void store_row()
    {
        float *from = sums[stored];
        Out *to = place + stored++ * row;
        if (broad < PANEL) {
            for (int64_t j = 0; j < broad; j++)
                put(from[j] + (onto ? wide(to[j]) : 0.0f), to[j]);
            return;
        }
        for (int64_t j = 0; onto && j < PANEL; j += LANES)
            at(from + j) += load(to + j);
        put_row(from, to);
    }

    INLINE void store_rows(int64_t count)
    {
        for (const int64_t end = std::min(stored + count, tall); stored < end;)
            store_row();
    }
};

// out[32, 32] = left · right, of two panels, while the rows of `last` are stored. From `ahead`, an eighth
// of the panel that follows comes into the second-level cache.
template <typename Out>
INLINE void multiply_panels(const Operand &left, const Operand &right, int64_t depth,
                            const Narrow *ahead, float *out, Block<Out> &last)
{
    constexpr int64_t OF_PANEL = 4 * PANEL;  // bytes of a row
    const Narrow *one = left.data, *two = right.data;
    asm volatile("" ::: "memory");  // GCC 12 does not know what these instructions read
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += DEEP) {
        _tile_loadd(4, one, left.row);
        _tile_loadd(6, two, right.row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, two + right.second, right.row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, one + left.second, left.row);
        _tile_dpbf16ps(2, 5, 6);
        for (int64_t i = 0; i < STAGE / MOST; i += DEEP)
            __builtin_prefetch(ahead + i, 0, 2);
        _tile_dpbf16ps(3, 5, 7);
        last.store_rows(2);
        one += left.step, two += right.step, ahead += STAGE / MOST;
    }
    last.store_rows(PANEL);
    _tile_stored(0, out, OF_PANEL);
    _tile_stored(1, out + UNIT, OF_PANEL);
    _tile_stored(2, out + UNIT * PANEL, OF_PANEL);
    _tile_stored(3, out + UNIT * PANEL + UNIT, OF_PANEL);
}

template <typename Out>
struct TiledProduct : Product<Narrow, Out> {
    using Of = Product<Narrow, Out>;
    using Of::left, Of::right, Of::out, Of::rows, Of::columns, Of::depth, Of::left_row;
    using Of::left_step, Of::right_row, Of::right_step, Of::onto, Of::threads;

    Factor of_left() const { return {left, rows, depth, left_row, left_step}; }
    Factor of_right() const { return {right, columns, depth, right_step, right_row}; }

    // Begins 32 rows and columns of the result, and stores those before them.
    INLINE void compute_block(int64_t at_row, int64_t at_column, const Operand &one, const Operand &other,
                              const Narrow *ahead, Block<Out> &now, Block<Out> &last) const
    {
        now.place = out + at_row * columns + at_column, now.row = columns, now.onto = onto;
        now.tall = std::min<int64_t>(PANEL, rows - at_row);
        now.broad = std::min<int64_t>(PANEL, columns - at_column);
        for (int64_t i = 0; i < now.tall; i++)
            for (int64_t j = 0; j < now.broad; j += 64 / sizeof(Out))
                __builtin_prefetch(now.place + i * columns + j, 1);
        multiply_panels(one, other, depth, ahead, now.sums[0], last);
        now.stored = 0;
    }

    // Each thread packs some panels of one factor and multiplies them with all of the other one, packed
    // before.
    template <bool ROWS>
    void compute(Narrow *whole, Narrow *mine, int64_t of_panel, int64_t group) const
    {
        const Factor far = ROWS ? of_left() : of_right(), close = ROWS ? of_right() : of_left();
        const int64_t panels = (far.size + PANEL - 1) / PANEL;
        const int64_t others = (close.size + PANEL - 1) / PANEL;
        const auto panel_of_close = [&](int64_t other) {
            return panel_of<!ROWS>(close, other, whole + other * of_panel);
        };
        Tiles tiles;
        tiles.set(PANEL);
        Block<Out> blocks[2];
        blocks[0].tall = blocks[1].tall = 0;
        int64_t count = 0;
        const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
        const int64_t begin = others * part / parts;
        pack_panels<!ROWS>(close, begin, others * (part + 1) / parts, whole + begin * of_panel);
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < panels; first += group) {
            const int64_t end = std::min(first + group, panels);
            pack_panels<ROWS>(far, first, end, mine);
            for (int64_t other = 0; other < others; other++)
                for (int64_t panel = first; panel < end; panel++, count++) {
                    const Operand one = panel_of<ROWS>(far, panel, mine + (panel - first) * of_panel);
                    const Operand two = panel_of_close(other), next = panel_of_close(other + 1);
                    const Narrow *ahead = next.data + (panel - first) * (of_panel / MOST);
                    Block<Out> &now = blocks[count % 2], &last = blocks[(count + 1) % 2];
                    if (ROWS)
                        compute_block(panel * PANEL, other * PANEL, one, two, ahead, now, last);
                    else
                        compute_block(other * PANEL, panel * PANEL, two, one, ahead, now, last);
                }
        }
        blocks[(count + 1) % 2].store_rows(PANEL);
    }

    int compute() const
    {
        const bool by_rows = rows >= columns && !in_place<true>(of_left(), 0);
        const int64_t panels = ((by_rows ? rows : columns) + PANEL - 1) / PANEL;
        const int64_t others = ((by_rows ? columns : rows) + PANEL - 1) / PANEL;
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

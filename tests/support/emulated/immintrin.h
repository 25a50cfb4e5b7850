// The instructions of AVX-512 and AMX that the kernels use, in plain C++, so that kernels for processors with
// these instructions run on any other. A use of tiles that such a processor refuses ends the program here as well.
// Denormal numbers, which the instructions for bfloat16 treat as zero, are kept.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define syscall(...) 0L  // the system grants the tiles

#define EMULATED static inline __attribute__((always_inline))

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

namespace emulated {

typedef uint16_t Of16 __attribute__((vector_size(64)));
typedef uint32_t Of32 __attribute__((vector_size(64)));
typedef uint64_t Of64 __attribute__((vector_size(64)));

template <typename To>
EMULATED To read(const void *place)
{
    To to;
    std::memcpy(&to, place, sizeof to);
    return to;
}

// 16-bit numbers where the mask has a bit, and zeros.
template <typename To>
EMULATED To masked(uint32_t mask, const void *place)
{
    uint16_t out[sizeof(To) / 2] = {};
    for (size_t i = 0; i < sizeof(To) / 2; i++)
        if (mask >> i & 1)
            out[i] = read<uint16_t>((const uint16_t *)place + i);
    return read<To>(out);
}

// The last number given is the first lane.
template <typename Number, typename... Numbers>
EMULATED __m512i lanes(Numbers... numbers)
{
    constexpr int SIZE = 64 / sizeof(Number);
    static_assert(sizeof...(numbers) == SIZE);
    const Number given[SIZE] = {(Number)numbers...};
    Number out[SIZE];
    for (int i = 0; i < SIZE; i++)
        out[i] = given[SIZE - 1 - i];
    return read<__m512i>(out);
}

EMULATED float wide(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    return read<float>(&bits);
}

EMULATED uint16_t narrow(float x)
{
    const uint32_t bits = read<uint32_t>(&x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : (bits >> 16 | 0x40);
}

// Of every 16 bytes, one half of each: a0 b0 a1 b1 …
template <typename Lanes>
EMULATED __m512i interleaved(__m512i left, __m512i right, bool upper)
{
    const Lanes a = (Lanes)left, b = (Lanes)right;
    constexpr int SIZE = 16 / sizeof(a[0]), ALL = 64 / sizeof(a[0]);
    Lanes out;
    for (int lane = 0; lane < ALL; lane += SIZE)
        for (int i = 0; i < SIZE / 2; i++) {
            out[lane + 2 * i] = a[lane + i + (upper ? SIZE / 2 : 0)];
            out[lane + 2 * i + 1] = b[lane + i + (upper ? SIZE / 2 : 0)];
        }
    return (__m512i)out;
}

EMULATED void aligned(const void *place)
{
    if ((uintptr_t)place % 64) {
        std::fprintf(stderr, "an aligned access at %p\n", place);
        std::abort();
    }
}

}  // namespace emulated

EMULATED __m128i _mm_loadu_si128(const __m128i *place) { return emulated::read<__m128i>(place); }
EMULATED __m256i _mm256_loadu_si256(const __m256i *place) { return emulated::read<__m256i>(place); }
EMULATED void _mm256_storeu_si256(__m256i *place, __m256i x) { std::memcpy(place, &x, sizeof x); }
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void *place)
{
    return emulated::masked<__m256i>(mask, place);
}

EMULATED __m512 _mm512_load_ps(const void *place)
{
    emulated::aligned(place);
    return emulated::read<__m512>(place);
}
EMULATED __m512i _mm512_loadu_si512(const void *place) { return emulated::read<__m512i>(place); }
EMULATED void _mm512_store_si512(void *place, __m512i x)
{
    emulated::aligned(place);
    std::memcpy(place, &x, sizeof x);
}
EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void *place)
{
    return emulated::masked<__m512i>(mask, place);
}

EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
EMULATED __m512i _mm512_set1_epi32(int x) { return (__m512i)(emulated::Of32{} + (uint32_t)x); }
template <typename... Numbers>
EMULATED __m512i _mm512_set_epi32(Numbers... numbers) { return emulated::lanes<uint32_t>(numbers...); }
template <typename... Numbers>
EMULATED __m512i _mm512_set_epi16(Numbers... numbers) { return emulated::lanes<uint16_t>(numbers...); }

EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b)
{
    return (__m512i)((emulated::Of32)a + (emulated::Of32)b);
}
EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b)
{
    return (__m512i)((emulated::Of32)a - (emulated::Of32)b);
}
EMULATED __m512i _mm512_slli_epi32(__m512i x, int by) { return (__m512i)((emulated::Of32)x << by); }
EMULATED __mmask16 _mm512_cmplt_epu32_mask(__m512i left, __m512i right)
{
    const emulated::Of32 a = (emulated::Of32)left, b = (emulated::Of32)right;
    __mmask16 mask = 0;
    for (int i = 0; i < 16; i++)
        mask |= (a[i] < b[i]) << i;
    return mask;
}

EMULATED __m512 _mm512_mask_mov_ps(__m512 without, __mmask16 mask, __m512 x)
{
    for (int i = 0; i < 16; i++)
        without[i] = mask >> i & 1 ? x[i] : without[i];
    return without;
}
EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) { return _mm512_mask_mov_ps(__m512{}, mask, x); }

EMULATED __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
EMULATED __m512i _mm512_castsi256_si512(__m256i x) { return __m512i{x[0], x[1], x[2], x[3]}; }
EMULATED __m512i _mm512_castsi128_si512(__m128i x) { return __m512i{x[0], x[1]}; }
EMULATED __m512i _mm512_inserti64x4(__m512i into, __m256i x, int half)
{
    for (int i = 0; i < 4; i++)
        into[4 * half + i] = x[i];
    return into;
}
EMULATED __m512i _mm512_mask_broadcast_i32x4(__m512i without, __mmask16 mask, __m128i x)
{
    emulated::Of32 out = (emulated::Of32)without;
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1)
            out[i] = (uint32_t)(x[i % 4 / 2] >> i % 2 * 32);
    return (__m512i)out;
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i x)
{
    const emulated::Of16 from = (emulated::Of16)x, of = (emulated::Of16)order;
    emulated::Of16 out;
    for (int i = 0; i < 32; i++)
        out[i] = from[of[i] % 32];
    return (__m512i)out;
}
#define UNPACK(bits)                                                                                       \
    EMULATED __m512i _mm512_unpacklo_epi##bits(__m512i a, __m512i b)                                       \
    {                                                                                                      \
        return emulated::interleaved<emulated::Of##bits>(a, b, false);                                     \
    }                                                                                                      \
    EMULATED __m512i _mm512_unpackhi_epi##bits(__m512i a, __m512i b)                                       \
    {                                                                                                      \
        return emulated::interleaved<emulated::Of##bits>(a, b, true);                                      \
    }
UNPACK(16)
UNPACK(32)
UNPACK(64)
#undef UNPACK

EMULATED __m512i _mm512_cvtepu16_epi32(__m256i x)
{
    emulated::Of32 out;
    for (int i = 0; i < 16; i++)
        out[i] = (uint16_t)(x[i / 4] >> i % 4 * 16);
    return (__m512i)out;
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 x)
{
    __m256bh out;
    for (int i = 0; i < 16; i++)
        out[i] = (short)emulated::narrow(x[i]);
    return out;
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower)
{
    __m512bh out;
    for (int i = 0; i < 16; i++) {
        out[i] = (short)emulated::narrow(lower[i]);
        out[16 + i] = (short)emulated::narrow(upper[i]);
    }
    return out;
}
EMULATED __m512 _mm512_dpbf16_ps(__m512 total, __m512bh left, __m512bh right)
{
    const auto even = [](__m512bh x) { return (__m512)((emulated::Of32)x << 16); };
    const auto odd = [](__m512bh x) { return (__m512)((emulated::Of32)x & 0xffff0000); };
    const __m512 a[2] = {odd(left), even(left)}, b[2] = {odd(right), even(right)};
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 16; i++)
            total[i] = std::fma(a[half][i], b[half][i], total[i]);
    return total;
}

namespace emulated {

// The tiles of a thread: eight of up to 16 rows of up to 64 bytes.
struct Tile {
    int rows, bytes;
    alignas(64) uint8_t data[16][64];
};

struct Setting {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

inline thread_local Tile tiles[8];
inline thread_local Setting setting;

inline void require(bool holds, const char *what)
{
    if (!holds) {
        std::fprintf(stderr, "AMX: %s\n", what);
        std::abort();
    }
}

inline Tile &tile(int number)
{
    require(setting.palette == 1, "no tiles are set");
    require(0 <= number && number < 8 && tiles[number].rows && tiles[number].bytes, "the tile is not set");
    return tiles[number];
}

inline void configure(const Setting &now)
{
    require(now.palette <= 1 && !now.start, "a palette or row that does not exist");
    for (uint8_t x : now.none)
        require(!x, "reserved bytes are set");
    setting = now;
    for (int i = 0; i < 16; i++) {
        require(i < 8 || (!now.rows[i] && !now.bytes[i]), "more than eight tiles");
        require(now.rows[i] <= 16 && now.bytes[i] <= 64, "a tile of more than 16 rows of 64 bytes");
        require(!now.rows[i] == !now.bytes[i], "a tile with rows and no columns, or the other way round");
    }
    for (int i = 0; i < 8; i++) {
        tiles[i] = {};
        tiles[i].rows = now.rows[i], tiles[i].bytes = now.bytes[i];
    }
}

inline void multiply_pairs(Tile &sum, const Tile &left, const Tile &right)
{
    require(&sum != &left && &sum != &right && &left != &right, "a product of tiles that are not three");
    require(sum.rows == left.rows && sum.bytes == right.bytes && left.bytes == 4 * right.rows,
            "the sizes of three tiles do not fit together");
    for (int m = 0; m < sum.rows; m++) {
        float total[2][16] = {};
        for (int k = 0; k < right.rows; k++)
            for (int part = 0; part < 2; part++) {
                const float x = wide(read<uint16_t>(&left.data[m][4 * k + 2 * part]));
                for (int n = 0; n < sum.bytes / 4; n++)
                    total[part][n] =
                        std::fma(x, wide(read<uint16_t>(&right.data[k][4 * n + 2 * part])), total[part][n]);
            }
        for (int n = 0; n < sum.bytes / 4; n++) {
            const float x = read<float>(&sum.data[m][4 * n]) + (total[0][n] + total[1][n]);
            std::memcpy(&sum.data[m][4 * n], &x, sizeof x);
        }
    }
}

}  // namespace emulated

EMULATED void _tile_storeconfig(void *place) { std::memcpy(place, &emulated::setting, sizeof emulated::setting); }
EMULATED void _tile_loadconfig(const void *place) { emulated::configure(emulated::read<emulated::Setting>(place)); }
EMULATED void _tile_release() { emulated::configure({}); }
EMULATED void _tile_zero(int number)
{
    emulated::Tile &tile = emulated::tile(number);
    std::memset(tile.data, 0, sizeof tile.data);
}
EMULATED void _tile_loadd(int number, const void *place, int64_t row)
{
    _tile_zero(number);
    emulated::Tile &tile = emulated::tile(number);
    for (int i = 0; i < tile.rows; i++)
        std::memcpy(tile.data[i], (const char *)place + i * row, tile.bytes);
}
EMULATED void _tile_stored(int number, void *place, int64_t row)
{
    const emulated::Tile &tile = emulated::tile(number);
    for (int i = 0; i < tile.rows; i++)
        std::memcpy((char *)place + i * row, tile.data[i], tile.bytes);
}
EMULATED void _tile_dpbf16ps(int sum, int left, int right)
{
    emulated::multiply_pairs(emulated::tile(sum), emulated::tile(left), emulated::tile(right));
}

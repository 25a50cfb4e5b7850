// Attention of a decoding step, in float32 or bfloat16: the completions of a slot share the keys of
// their prompt, whose scores are one product of matrices (the batched prefix of shared-prefix
// attention, as in "Hydragen", 2402.05099); each attends to its own suffix by itself. Softmax runs
// over blocks of keys, each of which corrects the sums of those before it ("FlashAttention",
// 2205.14135).

#include <omp.h>
#include <vector>

#include "memory.h"
#include "slot_head.h"
#include "tile_decoding.h"

namespace {

// Rows of one slot that see the same part of its prompt.
struct Share {
    int64_t begin, end;
};

template <typename Head, typename Number>
int attend_with(const Attention<Number> &a)
{
    const Places &places = a.places;
    std::vector<Share> shares;
    int64_t most = 0;
    bool split = false;  // a window begins in the prompt at different places for rows of one slot
    for (int64_t begin = 0, end = 0; begin < places.rows; begin = end) {
        const int64_t slot = places.slot[begin], length = places.prompt_length[slot];
        const auto hidden = [&](int64_t row) { return std::min(Head::hidden(a, row), length); };
        while (end < places.rows && places.slot[end] == slot && hidden(end) == hidden(begin))
            end++;
        split |= end < places.rows && places.slot[end] == slot;
        shares.push_back({begin, end});
        most = std::max(most, Head(a, begin, end, 0).assign(nullptr));
    }
    const auto scratch = memory_of<float>(most * a.threads);
    if (!scratch)
        return 1;
    const int64_t units = shares.size() * a.cache.key_heads;
    const auto head_of = [&](int64_t unit) {
        const Share &share = shares[unit / a.cache.key_heads];
        return Head(a, share.begin, share.end, unit % a.cache.key_heads);
    };
#pragma omp parallel num_threads(a.threads)
    {
        if (split) {
#pragma omp for
            for (int64_t i = 0; i < units; i++)
                head_of(i).write();
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < units; i++) {
            Head head = head_of(i);
            if (!split)
                head.write();
            head.assign(scratch.get() + most * omp_get_thread_num());
            head.attend();
        }
    }
    return 0;
}

}  // namespace

template <typename Number>
int attend(const Attention<Number> &a)
{
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<Number, Narrow>)
        if (a.cache.dim % (2 * LANES) == 0) {
#ifdef TILES
            if (amx)
                return attend_with<TiledSlotHead>(a);
#endif
            return attend_with<SlotHead<Narrow, Narrow>>(a);
        }
#endif
    return attend_with<SlotHead<Number, float>>(a);
}

template int attend(const Attention<float> &a);
template int attend(const Attention<Narrow> &a);

SIZE_OF(Heads, Heads<float>)
SIZE_OF(Cache, Cache<float>)
SIZE_OF(Places, Places)
SIZE_OF(Attention, Attention<float>)

extern "C" {

int attend_float32(const Attention<float> *call) { return attend(*call); }
int attend_bfloat16(const Attention<Narrow> *call) { return attend(*call); }
}

// Weights as the panels that products read (packed_products.cpp): at the start of every rollout all of a
// model's are copied, which PyTorch does number by number, in twice the time.

#include "vectors.h"

extern "C" {

// to[panel, k, j] = from[panel · 32 + j, k], for from [rows, depth] and to [panels, depth, 32]; with a
// gate like `from`, 16 columns of the gate and then 16 of `from`. Pairs of bfloat16
// and eight codes of 4 bits are moved as one number.
void pack_panels(const float *gate, const float *from, int64_t rows, int64_t depth, float *to,
                 int64_t threads)
{
    const int64_t size = gate ? UNIT : PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row += size) {
        const int64_t some = std::min(size, rows - row);
        float *panel = to + row / size * depth * PANEL;
        if (gate)
            transpose(gate + row * depth, depth, some, depth, panel, PANEL);
        transpose(from + row * depth, depth, some, depth, panel + PANEL - size, PANEL);
    }
}
}

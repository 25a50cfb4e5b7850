// What a layer of a rollout is made of.

#pragma once

#include <cstdint>

struct Linear {
    const float *x;       // [rows, depth]
    const float *weight;  // [panels, depth, 32]; of a gated one 16 of the gate, then 16 others
    const float *bias;    // [panels, 32]
    const float *onto;    // [rows, columns] to be added, or null
    float *out;           // [rows, columns]; may be `onto`
    int64_t rows, depth, columns, gated, threads;
};

extern "C" {

void linear(const Linear *given);

// out may be x
void rms_norm_float32(const float *x, const float *weight, int64_t rows, int64_t size, double eps,
                      float *out, int64_t threads);

void turn(float *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const float *cos,
          const float *sin, const int64_t *position, int64_t threads);
}

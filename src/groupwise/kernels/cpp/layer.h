// The operations of a decoder layer in a rollout.

#pragma once

#include "vectors.h"

struct Linear {
    const float *x;       // [rows, depth]
    const float *weight;  // [panels, depth, 32]; if gated, 16 columns of the gate, then 16 of W
    const float *bias;    // [panels, 32]
    const float *onto;    // [rows, columns], added to the product, or null
    float *out;           // [rows, columns]; may be `onto`
    int64_t rows, depth, columns, gated, threads;
};

struct Norm {
    const float *weight;  // or null where there is none
    double eps;
};

extern "C" {

void linear(const Linear *call);

// out may be x
void rms_norm_float32(const float *x, const float *weight, int64_t rows, int64_t size, double eps,
                      float *out, int64_t threads);

// Rotary position embedding in place (Su et al., "RoFormer", 2104.09864).
void rotary(float *x, int64_t rows, int64_t row, int64_t heads, int64_t dim, const float *cos,
            const float *sin, const int64_t *position, int64_t threads);
}

// The product of any two matrices of an update.

#pragma once

#include "vectors.h"

// out = left · right, or out += left · right, where left(i, k) = left[i · left_row + k · left_step] and
// right(k, j) = right[k · right_row + j · right_step].
template <typename Number, typename Out>
struct Product {
    const Number *left, *right;
    Out *out;  // [rows, columns]
    int64_t rows, columns, depth, left_row, left_step, right_row, right_step, onto, threads;
};

// Whether a product is computed in the tiles of AMX: where the processor has them, and each factor
// one dimension whose numbers are contiguous.
template <typename Out>
bool fits_tiles(const Product<Narrow, Out> &product);

// Returns 0, or 1 when out of memory.
template <typename Out>
int multiply_tiles(const Product<Narrow, Out> &product);

// Order statistics on small arrays. Apart from sample.cpp, which is built once per instruction set: a standard template
// instantiated there could be merged into a build that the machine cannot run.
#pragma once

#include <cstdint>

// Return the k-th largest of n values (1 ≤ k ≤ n, no NaN). Reorders them.
float order_kth_largest(float * values, int32_t n, int32_t k) noexcept;

// Move the k largest of n items (1 ≤ k ≤ n) to the front, in no order but that the k-th largest is items[k − 1].
void order_keep_largest(uint64_t * items, int32_t n, int32_t k) noexcept;

// Sort n items, largest first.
void order_sort(uint64_t * items, int32_t n) noexcept;

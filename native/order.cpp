#include "order.h"

#include <algorithm>
#include <functional>

float order_kth_largest(float * values, int32_t n, int32_t k) noexcept {
    std::nth_element(values, values + (k - 1), values + n, std::greater<float>());
    return values[k - 1];
}

void order_keep_largest(uint64_t * items, int32_t n, int32_t k) noexcept {
    std::nth_element(items, items + (k - 1), items + n, std::greater<uint64_t>());
}

void order_sort(uint64_t * items, int32_t n) noexcept {
    std::sort(items, items + n, std::greater<uint64_t>());
}

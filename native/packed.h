// Weights packed for this processor's dot products: 16 or 32 rows side by side.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int32_t n_quant = 32;  // values of a row of inputs that share a scale

// Rows of inputs as 8-bit numbers. Per row and block of 32 values: the scale, its sum times the scale, and what makes up
// for weights that are stored with an offset, once or per 16 values.
struct quantised {
    int8_t * values;      // (n_rows, n_in)
    float * scales;       // (n_rows, n_in / 32)
    float * scaled_sums;  // (n_rows, n_in / 32)
    int32_t * starts;     // (n_rows, n_in / 32, 2)
};

// How a type of weights is packed and multiplied. One output is computed alike whatever is computed beside it.
struct packed_kind {
    int32_t type;         // ggml's number
    int32_t n_step;       // rows of weights have a multiple of so many values
    int32_t n_group_rows;  // rows of weights that are packed together
    bool is_quantised;
    // Bytes of a group of rows of n_in values.
    size_t (*n_group_bytes)(int32_t n_in);
    // Pack a group of rows, each `stride` bytes behind the one before.
    void (*pack)(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group);
    // Make blocks [begin, end) of 32 values of a row of inputs 8-bit numbers.
    void (*quantise)(const float * values, int32_t begin, int32_t end, const quantised & out);
    // Multiply a group with up to n_most_rows rows of inputs; write n_group_rows values each to out[i].
    void (*multiply)(const uint8_t * group, int32_t n_in, const quantised & rows, const float * const * inputs,
                     int32_t n_rows, float * const * out);
};

constexpr int32_t n_most_rows = 12;  // as many registers hold the sums

// Return how a type is packed, or nullptr. Only where `packed_suits_processor`.
const packed_kind * find_packed_kind(int32_t type) noexcept;

bool packed_suits_processor() noexcept;

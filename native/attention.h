// Attention of single rows over cells of 16-bit floats.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int32_t n_most_heads = 6;  // query heads that read the same keys together: as many registers hold the sums

// What some query heads read and write, of one token or of some tokens. Keys and values of all heads share one stride.
struct attention_row {
    const float * queries[n_most_heads];  // (n_heads), each (n_key)
    float * out[n_most_heads];            // (n_heads), each (n_value)
    const uint8_t * keys;                 // (n_cells) rows of n_key halves
    const uint8_t * values;               // (n_cells) rows of n_value halves
    size_t key_stride, value_stride;      // bytes
    const uint8_t * mask;                 // (n_cells) halves, added to the scores: −∞ hides a cell; or nullptr
    int32_t n_shown[n_most_heads];        // (n_heads): each sees the first of the cells that are not hidden, one at least
    int32_t n_heads, n_cells, n_key, n_value;
    float scale;
};

constexpr int32_t n_attention_step = 16;         // sizes of heads are multiples of this
constexpr int32_t n_most_attention_value = 512;  // largest n_value

// Write softmax(scale × queries · keys + mask) · values. A hidden cell is not read: what it holds does not matter.
void attend(const attention_row & row) noexcept;

// The number of cells that a mask shows, where they are the first of those that another mask shows, with the same values;
// else −1.
int32_t n_shown_first(const uint8_t * mask, const uint8_t * other, int32_t n_cells) noexcept;

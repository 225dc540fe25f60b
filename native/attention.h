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
constexpr int32_t n_attention_part = 256;        // cells that are summed up apart, of those that a row sees

// Write softmax(scale × queries · keys + mask) · values. A hidden cell is not read: what it holds does not matter.
// What is written are the same bits as by `attend_parts` and `join_parts`.
void attend(const attention_row & row) noexcept;

// Bytes of what one head sums up of one part: a multiple of 64.
size_t n_part_bytes(int32_t n_value) noexcept;

// Sum up parts i_first … i_after − 1, each apart. Of part i, head h writes at `sums` + (i × n_all_heads + h) × n_part_bytes.
void attend_parts(const attention_row & row, int32_t i_first, int32_t i_after, int64_t n_all_heads, uint8_t * sums) noexcept;

// Write what a head has summed up of all parts, of which part i lies at `sums` + i × n_all_heads × n_part_bytes. Changes them.
void join_parts(float * out, int32_t n_value, int32_t n_parts, int64_t n_all_heads, uint8_t * sums) noexcept;

// The number of cells that a mask shows, where they are the first of those that another mask shows, with the same values;
// else −1.
int32_t n_shown_first(const uint8_t * mask, const uint8_t * other, int32_t n_cells) noexcept;

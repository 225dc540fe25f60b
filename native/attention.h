// Attention over cells of 16-bit floats, in parts of 256 of the cells that a token sees, which are joined in order.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int32_t n_most_heads = 6;  // query heads that read the same keys together: as many registers hold the sums
constexpr int32_t n_attention_step = 16;         // sizes of heads are multiples of this
constexpr int32_t n_most_attention_value = 512;  // largest n_value
constexpr int32_t n_attention_part = 256;        // cells that are summed up apart

// What some query heads of one head of keys read, of one token or of some tokens.
struct attention_row {
    const float * queries[n_most_heads];  // (n_heads), each (n_key)
    const uint8_t * keys;                 // (n_cells) rows of n_key halves
    const uint8_t * values;               // (n_cells) rows of n_value halves
    size_t key_stride, value_stride;      // bytes
    int32_t n_shown[n_most_heads];        // (n_heads): each sees the first of the cells that are not hidden, one at least
    int32_t n_heads, n_key, n_value;
    float scale;
};

// A part of the cells that a token sees, in order, wherever they lie: what is computed depends on nothing else.
struct seen_cells {
    const uint8_t * mask;  // (n_cells) halves, added to the scores: −∞ hides a cell; or nullptr
    int32_t n_cells;
    int32_t i_part = -1;  // which part it is
    int32_t n = 0;        // its cells
    int32_t n_more = 0;   // cells behind them, of the next part
    int32_t i_next = 0;   // where to look for more
    alignas(64) int32_t cells[n_attention_part + 32];
    alignas(64) float added[n_attention_part + 32];  // the mask
};

// Pass over what is before a part.
void skip_to(seen_cells & seen, int32_t i_part) noexcept;

// Go to the next part. Return whether it has cells.
bool next_part(seen_cells & seen) noexcept;

// Bytes of what one head sums up: a multiple of 64.
size_t n_part_bytes(int32_t n_value) noexcept;

// Sum up softmax(scale × queries · keys + mask) · values over a part. Head h writes at `sums` + h × n_part_bytes, or adds to what
// it wrote there of the parts before. A hidden cell is not read: what it holds does not matter.
void add_part(const attention_row & row, const seen_cells & seen, bool is_first, uint8_t * sums) noexcept;

// Write what a head has summed up, of parts of which part i lies at `sums` + i × n_all_heads × n_part_bytes. Changes them.
void write_mean(float * out, int32_t n_value, int32_t n_parts, int64_t n_all_heads, uint8_t * sums) noexcept;

// The number of cells that a mask shows, where they are the first of those that another mask shows, with the same values;
// else −1.
int32_t n_shown_first(const uint8_t * mask, const uint8_t * other, int32_t n_cells) noexcept;

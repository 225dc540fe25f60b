// What changes single logits before any filter, in llama.cpp's order: bias, penalties, DRY. All of them are sparse, so
// they are written into the row itself and taken back afterwards.
#pragma once

#include "cbatch.h"

#include <cstdint>
#include <memory>
#include <vector>

// The first token of sequences past which DRY does not look for repetitions.
struct dry_head {
    int32_t token;
    int32_t i_group;  // in edits.groups
};

// A logit before it was changed.
struct edit_undo {
    int32_t token;
    float logit;
};

// The edits of one slot, and as many of the newest tokens of its sequence as they need.
struct edits {
    std::vector<cbatch_bias> bias;
    float repeat_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    int32_t repeat_last_n = 0;  // 0 also where the penalties change nothing
    float dry_multiplier = 0.0f;
    float dry_base = 0.0f;
    int32_t dry_allowed_length = 0;
    int32_t dry_last_n = 0;             // 0 also where DRY is off
    std::vector<dry_head> heads;  // ascending tokens
    std::vector<int32_t> groups;  // where the tails of each begin in `tails`: their number, then each after its length
    std::vector<int32_t> tails;

    int32_t n_window = 0;                // the larger of the two last_n
    std::unique_ptr<int32_t[]> tokens;   // (2 × n_window) the history: its newest end at n_tokens
    int32_t n_tokens = 0;
    bool is_placed = false;  // whether `end` is known: from the first span with an output on
    int32_t end = 0;         // positions below it are in the history

    std::unique_ptr<edit_undo[]> undo;    // (n_bias + 2 × n_window)
    int32_t n_undo = 0;
    std::unique_ptr<int32_t[]> repeats;   // (dry_last_n) how many tokens are repeated up to each
};

// Check and copy. Returns CBATCH_OK, _BAD_SAMPLING or _BAD_TOKEN. Throws std::bad_alloc.
int32_t edits_init(const cbatch_binding & binding, int32_t n_vocab, edits * e);

// Return whether anything is to be changed.
bool edits_any(const edits & e) noexcept;

// Add the new tokens of a span to the history; at bind it has every token up to the first output.
void edits_feed(edits * e, const cbatch_span & span, const int32_t * tokens) noexcept;

// Change the row.   counts: (n_vocab) zeros, and zeros again afterwards.
void edits_apply(edits * e, float * logits, int32_t * counts) noexcept;

// Restore what edits_apply changed.
void edits_undo(edits * e, float * logits) noexcept;

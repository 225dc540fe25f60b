// One row from the model's logits to a token: what is reported of it, mask, edits, and the choice.
#pragma once

#include "cbatch.h"
#include "edit.h"
#include "sample.h"

#include <cstdint>

// How rows of one slot are sampled.
struct row_binding {
    sample_rule rule = {};
    edits changes;
    bool has_logprobs = false;
    int32_t n_top = 0;
};

// Check and copy. Returns CBATCH_OK, _BAD_SAMPLING or _BAD_TOKEN. Throws std::bad_alloc.
int32_t row_binding_init(const cbatch_binding & binding, int32_t n_vocab, row_binding * b);

// A row to sample, and where to put what is found.
struct row_task {
    const float * model;       // (n_vocab) the model's row, for log-probabilities
    float * logits;            // (n_vocab) the row to sample; as before afterwards
    int32_t n_vocab;
    const uint32_t * mask;     // or NULL
    int32_t i_output;
    cbatch_logprobs * report;  // or NULL; written where the binding asks
    uint64_t * kept;           // or NULL; see cbatch_sample_row
};

// Return a token id, CBATCH_BROKEN_ROW or _EMPTY_ROW. Allocates nothing.
int32_t row_sample(const sample_code & code, row_binding * b, const row_task & task,
                   const sample_scratch & scratch) noexcept;

// Write the log-probabilities of a token that is given, not sampled.   logits: (n_vocab), or NULL for a broken row.
void row_score(const sample_code & code, const float * logits, int32_t n_vocab, int32_t target, int32_t n_top,
               const sample_scratch & scratch, cbatch_logprobs * report) noexcept;

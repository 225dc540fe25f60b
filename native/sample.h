// How one token is chosen from one row of logits: the exact definition, which cbatch/backend/sampling.py repeats.
//
// Order of tokens: logit descending, id ascending among equals (−0 equals 0). M is the largest logit.
// A NaN anywhere, or M not finite: broken row. temperature == 0: the first in the order. Otherwise
//   1. top_k: the first top_k in the order (0: all).
//   2. top_p < 1: the shortest prefix of those, at least one, with mass × 2^32 ≥ total mass × floor(top_p × 2^32),
//      masses being sums of weights at temperature 1.
//   3. min_p > 0: of those, logit ≥ M + log(min_p), in double precision.
//   4. Draw: r = (random × W) >> 64 with W the sum of the weights at `temperature`; walking up the ids, the first whose
//      cumulative weight is above r.
// Weights are integers, so no sum depends on its order: w = floor(2^32 × 2^x), x = (l − M) × scale in float32, with
// scale = log2(e) / temperature, and 2^x by a polynomial whose operations have a fixed order.
// random is 64 bits of Philox4x32-10: key = seed, counter = (i_output, i_choice, 0, 0).
#pragma once

#include "cbatch.h"

#include <cstdint>

constexpr int32_t n_block = 128;         // logits whose maximum is kept
constexpr int32_t n_best_max = 256;      // tokens that are ordered outright; a longer prefix is found by histograms
constexpr int32_t n_candidates = 1024;   // room for candidates of the above
constexpr int32_t n_bins = 2048;         // bins of one histogram
constexpr uint64_t top_p_all = UINT64_C(1) << 32;  // sample_rule.top_p that keeps all

// What one thread needs to sample; sized for one n_vocab, in memory of its owner.
struct sample_scratch {
    float * block_max;      // (n_blocks) largest logit of each block
    float * block_copy;     // (n_blocks) the same, reordered
    uint64_t * block_sum;   // (n_blocks) sum of the kept weights of each block
    uint64_t * candidates;  // (n_candidates)
    uint64_t * bins;        // (n_bins)
};

// cbatch_sampling with everything that does not depend on the row worked out.
struct sample_rule {
    uint64_t seed;
    uint64_t top_p;     // floor(top_p × 2^32); top_p_all keeps all
    double log_min_p;   // −∞ keeps all
    float scale;        // log2(e) / temperature; 0 = greedy
    int32_t top_k;
    int32_t i_choice;
};

// Return whether every value is in its range, and work out the rule.
bool sample_rule_init(const cbatch_sampling & sampling, sample_rule * rule) noexcept;

// Return about how many picoseconds one logit of a row costs under the rule. Measured on an AVX-512 machine.
int64_t sample_cost_ps(const sample_rule & rule) noexcept;

// Return the bytes that a scratch for n_vocab needs.
int64_t sample_scratch_size(int32_t n_vocab) noexcept;

// Point into `memory`, which must be aligned for uint64_t.
sample_scratch sample_scratch_at(char * memory, int32_t n_vocab) noexcept;

// Return the 64 random bits of one draw.
uint64_t sample_random(uint64_t seed, int32_t i_output, int32_t i_choice) noexcept;

// The sampling code of one instruction set.
struct sample_code {
    // Return a token id or CBATCH_BROKEN_ROW.  logits: (n_vocab) float32, read only.
    int32_t (*row)(const float * logits, int32_t n_vocab, const sample_rule & rule, uint64_t random,
                   const sample_scratch & scratch) noexcept;
    // Write the weights of n logits, none above max, to out: (n) uint64.
    void (*weights)(const float * logits, int32_t n, float max, float scale, uint64_t * out) noexcept;
};

extern const sample_code sample_code_base;
extern const sample_code sample_code_avx2;    // on x86-64 only
extern const sample_code sample_code_avx512;  // on x86-64 only

// Return the code for CBATCH_ISA_*, or NULL where the build or the machine has it not.
const sample_code * sample_code_for(int32_t isa) noexcept;

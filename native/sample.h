// How one token is chosen from one row of logits: the exact definition, which tests/oracle/sampling.py repeats.
//
// Order of steps: llama.cpp's default. Source: common/common.h, common_params_sampling.samplers; bias comes before
// them (common/sampling.cpp, common_sampler_init).
//   0. Tokens that the mask does not allow: logit −∞. Bias, penalties, DRY: edit.h.
// Order of tokens: logit descending, id ascending among equals (−0 equals 0). M is the largest logit.
// A NaN anywhere, or M not finite: broken row. temperature == 0: the first in the order. Otherwise
//   1. top_n_sigma > 0: logit ≥ M − top_n_sigma × deviation, over all logits above −∞, in double precision.
//   2. top_k: of those, what is among the first top_k in the order (0: all).
//   3. typical_p < 1: centre c = M − Σ w (M − l) / Σ w, in double precision: the mean logit, where −log p is the
//      entropy. The shortest prefix, by |c − l| in float32 ascending and then id, with
//      mass × 2^32 > total × floor(typical_p × 2^32). −∞ is in none. M is the largest logit of these from here on.
//   4. top_p < 1: the shortest prefix of those in the order of tokens, at least one, with
//      mass × 2^32 ≥ total mass × floor(top_p × 2^32), masses being sums of weights at temperature 1.
//   5. min_p > 0: of those, logit ≥ M + log(min_p), in double precision.
//   6. XTC, where xtc_threshold ≤ 0.5 and the first word of the generator's second stream is below
//      floor(xtc_probability × 2^32): without those whose weight × 2^32 ≥ total mass × floor(xtc_threshold × 2^32), but
//      for the last of them in the order. M is the largest logit of these from here on.
//   7. Draw: r = (random × W) >> 64 with W the sum of the weights at `temperature`; walking up the ids, the first whose
//      cumulative weight is above r.
// Weights are integers, so no sum depends on its order: w = floor(2^32 × 2^x), x = (l − M) × scale in float32, with
// scale = log2(e) / temperature, and 2^x by a polynomial whose operations have a fixed order. Sums of doubles are made of
// 16, of every 16th logit each, added up from the first to the last.
// random is 64 bits of Philox4x32-10: key = seed, counter = (i_output, i_choice, stream, 0), stream 0 for the draw and 1
// for XTC.
#pragma once

#include "cbatch.h"

#include <cstdint>

constexpr int32_t n_block = 128;         // logits whose maximum is kept
constexpr int32_t n_best_max = 256;      // tokens that are ordered outright; a longer prefix is found by histograms
constexpr int32_t n_candidates = 1024;   // room for candidates of the above
constexpr int32_t n_bins = 2048;         // bins of one histogram
constexpr uint64_t share_all = UINT64_C(1) << 32;  // a share of 1: what keeps all, or always happens

// What one thread needs to sample; sized for one n_vocab, in memory of its owner, zero at first.
struct sample_scratch {
    float * block_max;      // (n_blocks) largest logit of each block
    float * block_copy;     // (n_blocks) the same, reordered
    uint64_t * block_sum;   // (n_blocks) sum of the kept weights of each block
    uint64_t * candidates;  // (n_candidates)
    uint64_t * bins;        // (n_bins)
    float * masked;         // (n_vocab) the row where it has a mask
    float * kept;           // (n_vocab) the row where typical_p or XTC left tokens out
    int32_t * counts;       // (n_vocab) zeros, for edits_apply
};

// cbatch_sampling with everything that does not depend on the row worked out. Shares are floor(share × 2^32).
struct sample_rule {
    uint64_t seed;
    uint64_t top_p;
    uint64_t typical_p;
    uint64_t xtc_probability;  // 0 also where the threshold turns XTC off
    uint64_t xtc_threshold;
    double log_min_p;          // −∞ keeps all
    double top_n_sigma;        // 0 keeps all
    float scale;               // log2(e) / temperature; 0 = greedy
    int32_t top_k;
    int32_t i_choice;
};

// The random bits of one row.
struct sample_bits {
    uint64_t draw;
    uint32_t xtc;
};

// Return whether every value is in its range, and work out the rule.
bool sample_rule_init(const cbatch_sampling & sampling, sample_rule * rule) noexcept;

// Return about how many picoseconds one logit of a row costs under the rule. Measured on an AVX-512 machine.
int64_t sample_cost_ps(const sample_rule & rule) noexcept;

// Return the bytes that a scratch for n_vocab needs.
int64_t sample_scratch_size(int32_t n_vocab) noexcept;

// Point into `memory`, which must be zero and aligned for uint64_t.
sample_scratch sample_scratch_at(char * memory, int32_t n_vocab) noexcept;

// Return the random bits of one row.
sample_bits sample_random(const sample_rule & rule, int32_t i_output) noexcept;

// The sampling code of one instruction set. Rows are (n_vocab) float32.
struct sample_code {
    // Return a token id, CBATCH_BROKEN_ROW or _EMPTY_ROW.   kept: as in cbatch_sample_row.
    int32_t (*row)(const float * logits, int32_t n_vocab, const sample_rule & rule, const sample_bits & bits,
                   const sample_scratch & scratch, uint64_t * kept) noexcept;
    // Write the row to scratch.masked, −∞ where the mask does not allow a token; a NaN stays.
    void (*mask)(const float * logits, int32_t n_vocab, const uint32_t * mask, const sample_scratch & scratch) noexcept;
    // Write the n_top likeliest; return log Σ exp(logit), NaN for a broken row.
    double (*report)(const float * logits, int32_t n_vocab, int32_t n_top, const sample_scratch & scratch,
                     cbatch_logprobs * out) noexcept;
    // Write the weights of n logits, none above max, to out: (n) uint64.
    void (*weights)(const float * logits, int32_t n, float max, float scale, uint64_t * out) noexcept;
};

extern const sample_code sample_code_base;
extern const sample_code sample_code_avx2;    // on x86-64 only
extern const sample_code sample_code_avx512;  // on x86-64 only

// Return the code for CBATCH_ISA_*, or NULL where the build or the machine does not have it.
const sample_code * sample_code_for(int32_t isa) noexcept;

// The sampler. Built once per instruction set, so everything here is local to the file but one name: see CMakeLists.txt.
#include "sample.h"

#include "order.h"

#include <cmath>
#include <cstring>

#ifndef CBATCH_ISA
#define CBATCH_ISA base
#endif
#define CBATCH_JOIN_NAMES(a, b) a##b
#define CBATCH_JOIN(a, b) CBATCH_JOIN_NAMES(a, b)

namespace {

// Floats in one register.
#if defined(__AVX512F__)
constexpr int n_lanes = 16;
#elif defined(__AVX2__)
constexpr int n_lanes = 8;
#else
constexpr int n_lanes = 4;
#endif
using float_lanes = float __attribute__((vector_size(n_lanes * sizeof(float))));
using int_lanes = int32_t __attribute__((vector_size(n_lanes * sizeof(int32_t))));

constexpr float scale_one = 0x1.715476p+0f;  // log2(e): the scale of temperature 1

// One row and what has been found out about it.
struct row {
    const float * logits;  // (n)
    int32_t n;
    int32_t n_blocks;
    float max;
    const sample_scratch * scratch;
};

// The kept set: logit > tau, or == tau with an id below tie_end.
struct cut {
    float tau;
    int32_t tie_end;
};

int32_t block_length(const row & r, int32_t i_block) {
    const int32_t n = r.n - i_block * n_block;
    return n < n_block ? n : n_block;
}

// ---- the first pass: maxima and NaN ----

struct block_scan {
    float max;
    bool has_nan;
};

block_scan scan_tail(const float * logits, int32_t n) {
    block_scan found = {-INFINITY, false};
    for (int32_t i = 0; i < n; i++) {
        found.max = logits[i] > found.max ? logits[i] : found.max;
        found.has_nan |= logits[i] != logits[i];
    }
    return found;
}

float largest_lane(const float_lanes & lanes) {
    float v[n_lanes];
    memcpy(v, &lanes, sizeof(v));
    for (int n = n_lanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
        }
    }
    return v[0];
}

bool any_lane(const int_lanes & lanes) {
    int32_t v[n_lanes];
    memcpy(v, &lanes, sizeof(v));
    int32_t any = 0;
    for (int i = 0; i < n_lanes; i++) {
        any |= v[i];
    }
    return any != 0;
}

// Write the block maxima, and r->max; return whether the row can be sampled.
bool scan_row(row * r) {
    float_lanes top = {};
    top -= INFINITY;
    int_lanes is_nan = {};
    const int32_t n_full = r->n / n_block;
    for (int32_t i_block = 0; i_block < n_full; i_block++) {
        const float * logits = r->logits + i_block * n_block;
        float_lanes max;
        memcpy(&max, logits, sizeof(max));
        is_nan |= max != max;
        for (int32_t i = n_lanes; i < n_block; i += n_lanes) {
            float_lanes v;
            memcpy(&v, logits + i, sizeof(v));
            is_nan |= v != v;
            max = v > max ? v : max;
        }
        top = max > top ? max : top;
        r->scratch->block_max[i_block] = largest_lane(max);
    }
    r->max = largest_lane(top);
    bool has_nan = any_lane(is_nan);
    if (n_full < r->n_blocks) {
        const block_scan tail = scan_tail(r->logits + n_full * n_block, r->n - n_full * n_block);
        r->scratch->block_max[n_full] = tail.max;
        r->max = tail.max > r->max ? tail.max : r->max;
        has_nan |= tail.has_nan;
    }
    return !has_nan && std::isfinite(r->max);
}

int32_t first_maximum(const row & r) {
    int32_t i_block = 0;
    while (r.scratch->block_max[i_block] != r.max) {
        i_block++;
    }
    int32_t id = i_block * n_block;
    while (r.logits[id] != r.max) {
        id++;
    }
    return id;
}

// ---- weights ----

// floor(2^32 × 2^x), x = (logit − max) × scale; 0 below x = −32, exactly 2^32 at 0.
// x = n + f with n whole and |f| ≤ 1/2: adding 1.5 × 2^23 rounds. Source of the polynomial: Cephes exp2f.c.
inline uint64_t weight_of(float logit, float max, float scale) {
    float x = (logit - max) * scale;
    x = x > -33.0f ? x : -33.0f;
    const float n = (x + 12582912.0f) - 12582912.0f;
    const float f = x - n;
    float p = 0x1.41fbbcp-13f;
    p = p * f + 0x1.5f3e52p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    const uint64_t fixed = static_cast<uint64_t>(static_cast<int32_t>(p * 1073741824.0f));  // p × 2^30, exact
    return (fixed << 2) >> static_cast<uint64_t>(static_cast<int32_t>(-n));
}

uint64_t sum_at_least(const float * logits, int32_t n, float tau, float max, float scale) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint64_t w = weight_of(logits[i], max, scale);
        sum += logits[i] >= tau ? w : 0;
    }
    return sum;
}

uint64_t sum_above(const float * logits, int32_t n, float tau, float max, float scale) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint64_t w = weight_of(logits[i], max, scale);
        sum += logits[i] > tau ? w : 0;
    }
    return sum;
}

uint64_t sum_block(const row & r, int32_t i_block, const cut & c, float scale) {
    const float * logits = r.logits + i_block * n_block;
    const int32_t n = block_length(r, i_block);
    int32_t n_ties = c.tie_end - i_block * n_block;  // ids of this block in which a tie is kept
    n_ties = n_ties < 0 ? 0 : n_ties > n ? n : n_ties;
    return sum_at_least(logits, n_ties, c.tau, r.max, scale) +
           sum_above(logits + n_ties, n - n_ties, c.tau, r.max, scale);
}

// Return whether no logit of the block is kept with a weight above 0.
bool can_skip(const row & r, int32_t i_block, const cut & c, float scale) {
    const float max = r.scratch->block_max[i_block];
    return max < c.tau || (max - r.max) * scale <= -33.0f;
}

// Write the blocks' sums of kept weights; return their sum.
uint64_t sum_kept(const row & r, const cut & c, float scale) {
    uint64_t total = 0;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        const uint64_t sum = can_skip(r, i, c, scale) ? 0 : sum_block(r, i, c, scale);
        r.scratch->block_sum[i] = sum;
        total += sum;
    }
    return total;
}

uint64_t multiply_high(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

int32_t draw(const row & r, const cut & c, float scale, uint64_t random) {
    uint64_t rest = multiply_high(random, sum_kept(r, c, scale));
    int32_t i_block = 0;
    while (rest >= r.scratch->block_sum[i_block]) {
        rest -= r.scratch->block_sum[i_block++];
    }
    for (int32_t id = i_block * n_block;; id++) {
        const float logit = r.logits[id];
        if (logit > c.tau || (logit == c.tau && id < c.tie_end)) {
            const uint64_t w = weight_of(logit, r.max, scale);
            if (rest < w) {
                return id;
            }
            rest -= w;
        }
    }
}

// ---- the order: a float as an unsigned number, ties by id ----

uint32_t key_of(float logit) {
    const float positive_zero = logit + 0.0f;  // −0 becomes 0
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float logit_of(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float logit;
    memcpy(&logit, &bits, sizeof(logit));
    return logit;
}

uint64_t item_of(float logit, int32_t id) {
    return static_cast<uint64_t>(key_of(logit)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

cut cut_at(uint64_t item) {
    const uint32_t id = 0xffffffffu - static_cast<uint32_t>(item);
    return {logit_of(static_cast<uint32_t>(item >> 32)), static_cast<int32_t>(id) + 1};
}

// A logit that at least k of the row reach: the k-th largest block maximum.
float reached_by(const row & r, int32_t k) {
    if (r.n_blocks < k) {
        return -INFINITY;
    }
    memcpy(r.scratch->block_copy, r.scratch->block_max, r.n_blocks * sizeof(float));
    return order_kth_largest(r.scratch->block_copy, r.n_blocks, k);
}

// Append the block's items above `floor`, which is raised whenever the room runs out.
void gather_block(const row & r, int32_t i_block, int32_t k, uint64_t * floor, int32_t * n_items) {
    uint64_t * items = r.scratch->candidates;
    const int32_t begin = i_block * n_block;
    const int32_t end = begin + block_length(r, i_block);
    float tau = logit_of(static_cast<uint32_t>(*floor >> 32));
    for (int32_t id = begin; id < end; id++) {
        if (r.logits[id] < tau) {
            continue;
        }
        const uint64_t item = item_of(r.logits[id], id);
        if (item < *floor) {
            continue;
        }
        items[(*n_items)++] = item;
        if (*n_items == n_candidates) {
            order_keep_largest(items, *n_items, k);
            *n_items = k;
            *floor = items[k - 1];
            tau = logit_of(static_cast<uint32_t>(*floor >> 32));
        }
    }
}

// Write the first k (≤ n_best_max, ≤ n) tokens of the order to scratch->candidates, the first first.
void find_best(const row & r, int32_t k) {
    uint64_t floor = static_cast<uint64_t>(key_of(reached_by(r, k))) << 32;
    int32_t n_items = 0;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        if (r.scratch->block_max[i] >= logit_of(static_cast<uint32_t>(floor >> 32))) {
            gather_block(r, i, k, &floor, &n_items);
        }
    }
    order_keep_largest(r.scratch->candidates, n_items, k);
    order_sort(r.scratch->candidates, k);
}

// ---- a cut far down the order: radix descent over the keys ----

// Return the lowest id that is above n_ties ids with logit tau.
int32_t end_of_ties(const row & r, float tau, int64_t n_ties) {
    for (int32_t i = 0; i < r.n_blocks; i++) {
        if (r.scratch->block_max[i] < tau) {
            continue;
        }
        const float * logits = r.logits + i * n_block;
        const int32_t n = block_length(r, i);
        int32_t n_found = 0;
        for (int32_t j = 0; j < n; j++) {
            n_found += logits[j] == tau;
        }
        if (n_found < n_ties) {
            n_ties -= n_found;
            continue;
        }
        int32_t id = i * n_block;
        while (n_ties > 0) {
            n_ties -= r.logits[id++] == tau;
        }
        return id;
    }
    return r.n;
}

// What a prefix of the order is measured in: tokens, or their mass at temperature 1.
enum class measure { count, mass };

// One digit of the key, given the digits above it.
struct digit {
    int32_t shift;     // bits below it
    int32_t n_bits;
    uint32_t above;    // the digits above it
};

uint64_t amount_of(const row & r, float logit, measure by) {
    return by == measure::count ? 1 : weight_of(logit, r.max, scale_one);
}

// Add every token to the bin of its first digit.
void fill_first_bins(const row & r, const digit & d, measure by) {
    uint64_t amounts[n_block];
    for (int32_t i = 0; i < r.n_blocks; i++) {
        const float * logits = r.logits + i * n_block;
        const int32_t n = block_length(r, i);
        for (int32_t j = 0; j < n; j++) {
            amounts[j] = amount_of(r, logits[j], by);
        }
        for (int32_t j = 0; j < n; j++) {
            r.scratch->bins[key_of(logits[j]) >> d.shift] += amounts[j];
        }
    }
}

// Return how many tokens of the block have d.above as their higher digits.
int32_t count_below(const row & r, int32_t i_block, const digit & d) {
    const float * logits = r.logits + i_block * n_block;
    const int32_t n = block_length(r, i_block);
    const int32_t above_shift = d.shift + d.n_bits;
    int32_t n_found = 0;
    for (int32_t j = 0; j < n; j++) {
        n_found += key_of(logits[j]) >> above_shift == d.above;
    }
    return n_found;
}

// Add those tokens of the block to the bins of their digit.
void add_below(const row & r, int32_t i_block, const digit & d, measure by) {
    const float * logits = r.logits + i_block * n_block;
    const int32_t n = block_length(r, i_block);
    const int32_t above_shift = d.shift + d.n_bits;
    const uint32_t mask = (1u << d.n_bits) - 1;
    int32_t found[n_block];
    int32_t n_found = 0;
    for (int32_t j = 0; j < n; j++) {  // without a branch: which tokens these are cannot be predicted
        found[n_found] = j;
        n_found += key_of(logits[j]) >> above_shift == d.above;
    }
    for (int32_t j = 0; j < n_found; j++) {
        const float logit = logits[found[j]];
        r.scratch->bins[(key_of(logit) >> d.shift) & mask] += amount_of(r, logit, by);
    }
}

void fill_next_bins(const row & r, const digit & d, measure by) {
    const int32_t above_shift = d.shift + d.n_bits;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        const bool can_hold = key_of(r.scratch->block_max[i]) >> above_shift >= d.above;
        if (can_hold && count_below(r, i, d) > 0) {
            add_below(r, i, d, by);
        }
    }
}

// Return the cut of the shortest prefix of the order that measures at least `target` (≥ 1, at most what all measure).
cut descend(const row & r, measure by, uint64_t target) {
    const int32_t n_bits[3] = {11, 11, 10};
    digit d = {32, 0, 0};
    uint64_t before = 0;  // what the tokens above the current digits measure
    for (int i = 0; i < 3; i++) {
        d.n_bits = n_bits[i];
        d.shift -= d.n_bits;
        memset(r.scratch->bins, 0, n_bins * sizeof(r.scratch->bins[0]));
        if (i == 0) {
            fill_first_bins(r, d, by);
        } else {
            fill_next_bins(r, d, by);
        }
        uint32_t bin = (1u << d.n_bits) - 1;
        while (bin > 0 && before + r.scratch->bins[bin] < target) {
            before += r.scratch->bins[bin--];
        }
        d.above = d.above << d.n_bits | bin;
    }
    const float tau = logit_of(d.above);
    const uint64_t each = amount_of(r, tau, by);
    return {tau, end_of_ties(r, tau, static_cast<int64_t>((target - before + each - 1) / each))};
}

// ---- the filters ----

// The mass that a prefix must have: total × top_p, rounded up, at least 1.
uint64_t needed_mass(uint64_t total, uint64_t top_p) {
    const unsigned __int128 scaled = static_cast<unsigned __int128>(total) * top_p;
    const uint64_t need = static_cast<uint64_t>((scaled + 0xffffffffu) >> 32);
    return need > 0 ? need : 1;
}

uint64_t weight_of_item(const row & r, uint64_t item) {
    return weight_of(logit_of(static_cast<uint32_t>(item >> 32)), r.max, scale_one);
}

// Write the cut after which the first k tokens, in scratch->candidates, reach the mass; return whether they do.
bool cut_best(const row & r, int32_t k, uint64_t need, cut * c) {
    uint64_t mass = 0;
    for (int32_t i = 0; i < k; i++) {
        mass += weight_of_item(r, r.scratch->candidates[i]);
        if (mass >= need) {
            *c = cut_at(r.scratch->candidates[i]);
            return true;
        }
    }
    return false;
}

uint64_t mass_of_best(const row & r, int32_t k) {
    uint64_t mass = 0;
    for (int32_t i = 0; i < k; i++) {
        mass += weight_of_item(r, r.scratch->candidates[i]);
    }
    return mass;
}

cut filter_few(const row & r, const sample_rule & rule) {
    const int32_t k = rule.top_k;
    find_best(r, k);
    cut c = cut_at(r.scratch->candidates[k - 1]);
    if (rule.top_p < top_p_all) {
        cut_best(r, k, needed_mass(mass_of_best(r, k), rule.top_p), &c);
    }
    return c;
}

cut filter_many(const row & r, const sample_rule & rule) {
    cut c = {-INFINITY, r.n};
    if (rule.top_k > 0 && rule.top_k < r.n) {
        c = descend(r, measure::count, rule.top_k);
    }
    if (rule.top_p < top_p_all) {
        const uint64_t need = needed_mass(sum_kept(r, c, scale_one), rule.top_p);
        const int32_t k = r.n < n_best_max ? r.n : n_best_max;
        find_best(r, k);
        if (!cut_best(r, k, need, &c)) {
            c = descend(r, measure::mass, need);
        }
    }
    return c;
}

// Raise the cut to logits of at least max + log(min_p).
void filter_min_p(const row & r, double log_min_p, cut * c) {
    const double least = static_cast<double>(r.max) + log_min_p;
    float tau = static_cast<float>(least);
    if (static_cast<double>(tau) < least) {
        tau = std::nextafterf(tau, INFINITY);
    }
    if (tau > c->tau) {
        *c = {tau, r.n};
    }
}

int32_t sample_row(const float * logits, int32_t n_vocab, const sample_rule & rule, uint64_t random,
                   const sample_scratch & scratch) noexcept {
    row r = {logits, n_vocab, (n_vocab - 1) / n_block + 1, 0.0f, &scratch};
    if (!scan_row(&r)) {
        return CBATCH_BROKEN_ROW;
    }
    if (rule.scale == 0.0f) {
        return first_maximum(r);
    }
    const bool is_few = rule.top_k > 0 && rule.top_k <= n_best_max && rule.top_k < n_vocab;
    cut c = is_few ? filter_few(r, rule) : filter_many(r, rule);
    filter_min_p(r, rule.log_min_p, &c);
    return draw(r, c, rule.scale, random);
}

void sample_weights(const float * logits, int32_t n, float max, float scale, uint64_t * out) noexcept {
    for (int32_t i = 0; i < n; i++) {
        out[i] = weight_of(logits[i], max, scale);
    }
}

}  // namespace

const sample_code CBATCH_JOIN(sample_code_, CBATCH_ISA) = {sample_row, sample_weights};

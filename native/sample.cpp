// The sampler. Built once per instruction set, so everything here is local to the file but one name: see CMakeLists.txt.
#include "sample.h"

#include "order.h"

#include <cfloat>
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

// Write the block maxima, and r->max; return 0 if the row can be sampled, else what stands for its token.
int32_t scan_row(row * r) {
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
    if (has_nan || r->max == INFINITY) {
        return CBATCH_BROKEN_ROW;
    }
    return r->max == -INFINITY ? CBATCH_EMPTY_ROW : 0;
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

// floor(2^(30 + n_shift) × 2^x), x ≤ 0; 0 from x = −(31 + n_shift) down, exact at 0.
// x = n + f with n whole and |f| ≤ 1/2: adding 1.5 × 2^23 rounds. Source of the polynomial: Cephes exp2f.c.
inline uint64_t power_of_two(float x, int n_shift) {
    const float least = -31.0f - static_cast<float>(n_shift);
    x = x > least ? x : least;
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
    return (fixed << n_shift) >> static_cast<uint64_t>(static_cast<int32_t>(-n));
}

// floor(2^32 × 2^x), x = (logit − max) × scale; 0 below x = −32, exactly 2^32 at 0.
inline uint64_t weight_of(float logit, float max, float scale) {
    return power_of_two((logit - max) * scale, 2);
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

// Write the first k (≤ n_best_max, ≤ n) tokens of the order to scratch->candidates, the first first, but none of −∞;
// return how many.
int32_t find_best(const row & r, int32_t k) {
    const float reached = reached_by(r, k);
    uint64_t floor = static_cast<uint64_t>(key_of(reached > -FLT_MAX ? reached : -FLT_MAX)) << 32;
    int32_t n_items = 0;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        if (r.scratch->block_max[i] >= logit_of(static_cast<uint32_t>(floor >> 32))) {
            gather_block(r, i, k, &floor, &n_items);
        }
    }
    k = n_items < k ? n_items : k;
    order_keep_largest(r.scratch->candidates, n_items, k);
    order_sort(r.scratch->candidates, k);
    return k;
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

// The measure of a row's prefixes. `logits` may be others than those that order it.
struct meter {
    measure by;
    const float * logits;  // (n)
    float max;
};

// One digit of the key, given the digits above it.
struct digit {
    int32_t shift;     // bits below it
    int32_t n_bits;
    uint32_t above;    // the digits above it
};

uint64_t amount_of(const meter & m, float logit) {
    return m.by == measure::count ? 1 : weight_of(logit, m.max, scale_one);
}

// Add every token to the bin of its first digit.
void fill_first_bins(const row & r, const digit & d, const meter & m) {
    uint64_t amounts[n_block];
    for (int32_t i = 0; i < r.n_blocks; i++) {
        const float * logits = r.logits + i * n_block;
        const float * measured = m.logits + i * n_block;
        const int32_t n = block_length(r, i);
        for (int32_t j = 0; j < n; j++) {
            amounts[j] = amount_of(m, measured[j]);
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
void add_below(const row & r, int32_t i_block, const digit & d, const meter & m) {
    const float * logits = r.logits + i_block * n_block;
    const float * measured = m.logits + i_block * n_block;
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
        const uint32_t key = key_of(logits[found[j]]);
        r.scratch->bins[(key >> d.shift) & mask] += amount_of(m, measured[found[j]]);
    }
}

void fill_next_bins(const row & r, const digit & d, const meter & m) {
    const int32_t above_shift = d.shift + d.n_bits;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        const bool can_hold = key_of(r.scratch->block_max[i]) >> above_shift >= d.above;
        if (can_hold && count_below(r, i, d) > 0) {
            add_below(r, i, d, m);
        }
    }
}

// Where a prefix of the order ends: at one of the tokens with logit tau.
struct descent {
    float tau;
    uint64_t before;  // what the tokens above tau measure
};

// Find where the shortest prefix ends that measures at least `target` (≥ 1, at most what all measure).
descent descend(const row & r, const meter & m, uint64_t target) {
    const int32_t n_bits[3] = {11, 11, 10};
    digit d = {32, 0, 0};
    uint64_t before = 0;  // what the tokens above the current digits measure
    for (int i = 0; i < 3; i++) {
        d.n_bits = n_bits[i];
        d.shift -= d.n_bits;
        memset(r.scratch->bins, 0, n_bins * sizeof(r.scratch->bins[0]));
        if (i == 0) {
            fill_first_bins(r, d, m);
        } else {
            fill_next_bins(r, d, m);
        }
        uint32_t bin = (1u << d.n_bits) - 1;
        while (bin > 0 && before + r.scratch->bins[bin] < target) {
            before += r.scratch->bins[bin--];
        }
        d.above = d.above << d.n_bits | bin;
    }
    return {logit_of(d.above), before};
}

// Return the cut of the shortest prefix of the order of tokens that measures at least `target`.
cut cut_by(const row & r, measure by, uint64_t target) {
    const meter m = {by, r.logits, r.max};
    const descent d = descend(r, m, target);
    const uint64_t each = amount_of(m, d.tau);
    return {d.tau, end_of_ties(r, d.tau, static_cast<int64_t>((target - d.before + each - 1) / each))};
}

// ---- the filters ----

// A share of a mass, rounded up, at least 1.
uint64_t needed_mass(uint64_t total, uint64_t share) {
    const unsigned __int128 scaled = static_cast<unsigned __int128>(total) * share;
    const uint64_t need = static_cast<uint64_t>((scaled + 0xffffffffu) >> 32);
    return need > 0 ? need : 1;
}

uint64_t weight_of_item(const row & r, uint64_t item) {
    return weight_of(logit_of(static_cast<uint32_t>(item >> 32)), r.max, scale_one);
}

bool is_kept(const cut & c, float logit, int32_t id) {
    return logit > c.tau || (logit == c.tau && id < c.tie_end);
}

bool is_item_kept(const cut & c, uint64_t item) {
    const int32_t id = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(item));
    return is_kept(c, logit_of(static_cast<uint32_t>(item >> 32)), id);
}

cut stricter(const cut & a, const cut & b) {
    return a.tau > b.tau || (a.tau == b.tau && a.tie_end < b.tie_end) ? a : b;
}

// Raise the cut to logits of at least `least`.
void raise_to(const row & r, double least, cut * c) {
    float tau = static_cast<float>(least);
    if (static_cast<double>(tau) < least) {
        tau = std::nextafterf(tau, INFINITY);
    }
    if (tau > c->tau) {
        *c = {tau, r.n};
    }
}

// ---- sums of doubles ----

constexpr int n_sums = 16;  // side by side, however many a register holds: so all builds round alike

double sum_of(const double * sums) {
    double total = 0.0;
    for (int i = 0; i < n_sums; i++) {
        total += sums[i];
    }
    return total;
}

// Add (logit − mean)^power of n logits, where above −∞; power is 1 or 2.
void add_powers(const float * logits, int32_t n, double mean, int power, double * sums) {
    for (int32_t i = 0; i < n; i++) {
        const double x = static_cast<double>(logits[i]) - mean;
        const double term = power == 1 ? x : x * x;
        sums[i] += logits[i] > -INFINITY ? term : 0.0;
    }
}

double sum_powers(const row & r, double mean, int power) {
    double sums[n_sums] = {};
    int32_t i = 0;
    for (; i + n_sums <= r.n; i += n_sums) {
        add_powers(r.logits + i, n_sums, mean, power, sums);
    }
    add_powers(r.logits + i, r.n - i, mean, power, sums);
    return sum_of(sums);
}

int32_t count_finite(const row & r) {
    int32_t n = 0;
    for (int32_t i = 0; i < r.n; i++) {
        n += r.logits[i] > -INFINITY;
    }
    return n;
}

// Add weight × (max − logit) of the first n logits of a block, n ≤ n_sums.
void add_depths(const row & r, const float * logits, int32_t first_id, int32_t n, const cut & c, double * sums) {
    for (int32_t i = 0; i < n; i++) {
        const double w = static_cast<double>(static_cast<int64_t>(weight_of(logits[i], r.max, scale_one)));
        const double depth = static_cast<double>(r.max) - static_cast<double>(logits[i]);
        const bool counts = (logits[i] > c.tau) | ((logits[i] == c.tau) & (first_id + i < c.tie_end));
        sums[i] += counts & (w > 0.0) ? w * depth : 0.0;
    }
}

double sum_depths(const row & r, const cut & c) {
    double sums[n_sums] = {};
    for (int32_t i_block = 0; i_block < r.n_blocks; i_block++) {
        if (can_skip(r, i_block, c, scale_one)) {
            continue;
        }
        const int32_t begin = i_block * n_block;
        const int32_t end = begin + block_length(r, i_block);
        for (int32_t id = begin; id < end; id += n_sums) {
            add_depths(r, r.logits + id, id, end - id < n_sums ? end - id : n_sums, c, sums);
        }
    }
    return sum_of(sums);
}

// ---- the filters, in their order ----

// Return the least logit within so many standard deviations of the largest. Source: llama-sampler.cpp, top-n-sigma.
double least_in_sigmas(const row & r, double n_sigmas) {
    const double n = static_cast<double>(count_finite(r));
    const double mean = sum_powers(r, 0.0, 1) / n;
    return static_cast<double>(r.max) - n_sigmas * std::sqrt(sum_powers(r, mean, 2) / n);
}

// Write minus the distance of each kept logit from the centre, −∞ for the others.
void write_nearness(const row & r, const cut & c, double centre) {
    float * near = r.scratch->kept;
    for (int32_t i = 0; i < r.n; i++) {
        const float distance = static_cast<float>(std::fabs(centre - static_cast<double>(r.logits[i])));
        const bool counts = (r.logits[i] > c.tau) | ((r.logits[i] == c.tau) & (i < c.tie_end));
        near[i] = counts & (r.logits[i] > -INFINITY) ? -distance : -INFINITY;
    }
}

// Return the lowest id above the ties at the end of a prefix that measures `target`: they differ in weight.
int32_t end_of_near_ties(const row & near, const meter & m, const descent & d, uint64_t target) {
    uint64_t mass = d.before;
    for (int32_t i = 0; i < near.n_blocks; i++) {
        if (near.scratch->block_max[i] < d.tau) {
            continue;
        }
        const int32_t begin = i * n_block;
        const int32_t end = begin + block_length(near, i);
        for (int32_t id = begin; id < end; id++) {
            if (near.logits[id] == d.tau) {
                mass += amount_of(m, m.logits[id]);
                if (mass >= target) {
                    return id + 1;
                }
            }
        }
    }
    return near.n;
}

// Leave out what is not typical: the row is a copy from here on, −∞ where a token is left out.
// Source: llama-sampler.cpp, llama_sampler_typical_apply.
void keep_typical(row * r, cut * c, uint64_t typical_p) {
    const uint64_t total = sum_kept(*r, *c, scale_one);
    const double centre =
        static_cast<double>(r->max) - sum_depths(*r, *c) / static_cast<double>(static_cast<int64_t>(total));
    write_nearness(*r, *c, centre);
    float * kept = r->scratch->kept;
    row near = {kept, r->n, r->n_blocks, 0.0f, r->scratch};
    scan_row(&near);
    const meter m = {measure::mass, r->logits, r->max};
    const uint64_t target = static_cast<uint64_t>((static_cast<unsigned __int128>(total) * typical_p) >> 32) + 1;
    const descent d = descend(near, m, target);
    const int32_t tie_end = end_of_near_ties(near, m, d, target);
    for (int32_t i = 0; i < r->n; i++) {
        const bool counts = (kept[i] > d.tau) | ((kept[i] == d.tau) & (i < tie_end));
        kept[i] = counts ? r->logits[i] : -INFINITY;
    }
    r->logits = kept;
    scan_row(r);
    *c = {-INFINITY, r->n};
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

// Narrow the cut to top_p of what it keeps.   n_best: how many in scratch->candidates are all that it may keep, or 0.
void filter_top_p(const row & r, uint64_t top_p, int32_t n_best, cut * c) {
    if (n_best > 0) {
        while (!is_item_kept(*c, r.scratch->candidates[n_best - 1])) {
            n_best--;
        }
        cut_best(r, n_best, needed_mass(mass_of_best(r, n_best), top_p), c);
        return;
    }
    const uint64_t need = needed_mass(sum_kept(r, *c, scale_one), top_p);
    const int32_t k = find_best(r, r.n < n_best_max ? r.n : n_best_max);
    if (!cut_best(r, k, need, c)) {
        *c = cut_by(r, measure::mass, need);
    }
}

// What XTC takes out: the kept tokens of at least this weight, but for the last of them in the order.
struct top_choices {
    uint64_t least_weight;
    int32_t n;
    int32_t last_id;
};

bool may_have_top(const row & r, int32_t i_block, uint64_t least_weight) {
    const uint64_t w = weight_of(r.scratch->block_max[i_block], r.max, scale_one);
    return w + (w >> 8) >= least_weight;  // the polynomial is not strictly monotonic
}

bool is_top(const row & r, int32_t id, const cut & c, uint64_t least_weight) {
    return is_kept(c, r.logits[id], id) && weight_of(r.logits[id], r.max, scale_one) >= least_weight;
}

top_choices find_top(const row & r, const cut & c, uint64_t least_weight) {
    top_choices found = {least_weight, 0, 0};
    float least = INFINITY;
    for (int32_t i = 0; i < r.n_blocks; i++) {
        if (!may_have_top(r, i, least_weight)) {
            continue;
        }
        const int32_t begin = i * n_block;
        const int32_t end = begin + block_length(r, i);
        for (int32_t id = begin; id < end; id++) {
            if (is_top(r, id, c, least_weight)) {
                found.n++;
                found.last_id = r.logits[id] <= least ? id : found.last_id;
                least = r.logits[id] <= least ? r.logits[id] : least;
            }
        }
    }
    return found;
}

// Leave out the top choices: the row is a copy from here on.
void exclude_top(row * r, const cut & c, uint64_t threshold) {
    const top_choices top = find_top(*r, c, needed_mass(sum_kept(*r, c, scale_one), threshold));
    if (top.n < 2) {
        return;
    }
    float * kept = r->scratch->kept;
    for (int32_t i = 0; i < r->n_blocks; i++) {
        const int32_t begin = i * n_block;
        const int32_t n = block_length(*r, i);
        if (!may_have_top(*r, i, top.least_weight)) {
            memmove(kept + begin, r->logits + begin, n * sizeof(float));
            continue;
        }
        for (int32_t id = begin; id < begin + n; id++) {
            const bool is_out = id != top.last_id && is_top(*r, id, c, top.least_weight);
            kept[id] = is_out ? -INFINITY : r->logits[id];
        }
    }
    r->logits = kept;
    scan_row(r);
}

// Return which tokens are left; may replace the row by a copy that lacks some.
cut filter(row * r, const sample_rule & rule, uint32_t xtc_bits) {
    cut c = {-INFINITY, r->n};
    int32_t n_best = 0;
    if (rule.top_n_sigma > 0.0) {
        raise_to(*r, least_in_sigmas(*r, rule.top_n_sigma), &c);
    }
    if (rule.top_k > 0 && rule.top_k < r->n && rule.top_k <= n_best_max) {
        n_best = find_best(*r, rule.top_k);
        c = stricter(c, cut_at(r->scratch->candidates[n_best - 1]));
    } else if (rule.top_k > 0 && rule.top_k < r->n) {
        c = stricter(c, cut_by(*r, measure::count, rule.top_k));
    }
    if (rule.typical_p < share_all) {
        keep_typical(r, &c, rule.typical_p);
        n_best = 0;
    }
    if (rule.top_p < share_all) {
        filter_top_p(*r, rule.top_p, n_best, &c);
    }
    raise_to(*r, static_cast<double>(r->max) + rule.log_min_p, &c);
    if (xtc_bits < rule.xtc_probability) {
        exclude_top(r, c, rule.xtc_threshold);
    }
    return c;
}

// ---- what sample_code holds ----

void write_kept(const row & r, const cut & c, float scale, uint64_t * kept) {
    for (int32_t id = 0; id < r.n; id++) {
        kept[id] = is_kept(c, r.logits[id], id) ? weight_of(r.logits[id], r.max, scale) : 0;
    }
}

int32_t sample_row(const float * logits, int32_t n_vocab, const sample_rule & rule, const sample_bits & bits,
                   const sample_scratch & scratch, uint64_t * kept) noexcept {
    row r = {logits, n_vocab, (n_vocab - 1) / n_block + 1, 0.0f, &scratch};
    const int32_t problem = scan_row(&r);
    if (problem != 0) {
        return problem;
    }
    if (rule.scale == 0.0f) {
        const int32_t token = first_maximum(r);
        if (kept != nullptr) {
            memset(kept, 0, n_vocab * sizeof(kept[0]));
            kept[token] = UINT64_C(1) << 32;
        }
        return token;
    }
    const cut c = filter(&r, rule, bits.xtc);
    if (kept != nullptr) {
        write_kept(r, c, rule.scale, kept);
    }
    return draw(r, c, rule.scale, bits.draw);
}

void sample_mask(const float * logits, int32_t n_vocab, const uint32_t * mask,
                 const sample_scratch & scratch) noexcept {
    float * out = scratch.masked;
    int32_t id = 0;
    for (; id + 32 <= n_vocab; id += 32) {
        const uint32_t word = mask[id / 32];
        for (int32_t i = 0; i < 32; i++) {
            const bool stays = ((word >> i & 1) != 0) | (logits[id + i] != logits[id + i]);
            out[id + i] = stays ? logits[id + i] : -INFINITY;
        }
    }
    for (; id < n_vocab; id++) {
        const bool stays = (mask[id / 32] >> (id % 32) & 1) != 0 || logits[id] != logits[id];
        out[id] = stays ? logits[id] : -INFINITY;
    }
}

// log Σ exp(logit). Weights of 2^42 and less: what is cut off of n of them is below n × 2^−42.
double log_sum(const row & r) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < r.n; i++) {
        sum += power_of_two((r.logits[i] - r.max) * scale_one, 12);
    }
    return static_cast<double>(r.max) + std::log(static_cast<double>(sum) * 0x1p-42);
}

double sample_report(const float * logits, int32_t n_vocab, int32_t n_top, const sample_scratch & scratch,
                     cbatch_logprobs * out) noexcept {
    row r = {logits, n_vocab, (n_vocab - 1) / n_block + 1, 0.0f, &scratch};
    out->n_top = 0;
    if (scan_row(&r) != 0) {
        return NAN;
    }
    const double log_total = log_sum(r);
    out->n_top = n_top > 0 ? find_best(r, n_top < n_vocab ? n_top : n_vocab) : 0;
    for (int32_t i = 0; i < out->n_top; i++) {
        const uint64_t item = scratch.candidates[i];
        const double logit = logit_of(static_cast<uint32_t>(item >> 32));
        out->token[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(item));
        out->top_logprob[i] = static_cast<float>(logit - log_total);
    }
    return log_total;
}

void sample_weights(const float * logits, int32_t n, float max, float scale, uint64_t * out) noexcept {
    for (int32_t i = 0; i < n; i++) {
        out[i] = weight_of(logits[i], max, scale);
    }
}

}  // namespace

const sample_code CBATCH_JOIN(sample_code_, CBATCH_ISA) = {sample_row, sample_mask, sample_report,
                                                               sample_weights};

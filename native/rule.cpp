// The parts of sampling that are not worth building for several instruction sets.
#include "sample.h"

#include <cmath>

namespace {

constexpr double log2_e = 1.4426950408889634;

bool in_unit(double value) noexcept {
    return value >= 0.0 && value <= 1.0;
}

int32_t block_count(int32_t n_vocab) noexcept {
    return (n_vocab - 1) / n_block + 1;
}

// Clamped so that a difference of 0 stays 0 and one of −∞ stays −∞.
float scale_of(double temperature) noexcept {
    return static_cast<float>(std::fmin(std::fmax(log2_e / temperature, 1e-30), 1e30));
}

uint64_t share_of(double share) noexcept {
    return static_cast<uint64_t>(share * 4294967296.0);
}

bool are_filters_sane(const cbatch_sampling & s) noexcept {
    return in_unit(s.top_p) && in_unit(s.min_p) && in_unit(s.typical_p) && in_unit(s.xtc_probability) &&
           in_unit(s.xtc_threshold) && std::isfinite(s.top_n_sigma) && s.top_k >= 0;
}

}  // namespace

bool sample_rule_init(const cbatch_sampling & s, sample_rule * rule) noexcept {
    if (!std::isfinite(s.temperature) || s.temperature < 0.0 || !are_filters_sane(s) || s.i_choice < 0) {
        return false;
    }
    rule->seed = s.seed;
    rule->top_p = share_of(s.top_p);
    rule->typical_p = share_of(s.typical_p);
    rule->xtc_probability = s.xtc_threshold <= 0.5 ? share_of(s.xtc_probability) : 0;
    rule->xtc_threshold = share_of(s.xtc_threshold);
    rule->log_min_p = s.min_p > 0.0 ? std::log(s.min_p) : -HUGE_VAL;
    rule->top_n_sigma = s.top_n_sigma > 0.0 ? s.top_n_sigma : 0.0;
    rule->scale = s.temperature > 0.0 ? scale_of(s.temperature) : 0.0f;
    rule->top_k = s.top_k;
    rule->i_choice = s.i_choice;
    return true;
}

int64_t sample_cost_ps(const sample_rule & rule) noexcept {
    if (rule.scale == 0.0f) {
        return 100;
    }
    const bool is_few = rule.top_k > 0 && rule.top_k <= n_best_max;
    int64_t cost = is_few || (rule.top_k == 0 && rule.top_p == share_all) ? 200 : 3000;
    cost += rule.top_n_sigma > 0.0 ? 500 : 0;
    cost += rule.typical_p < share_all ? 3000 : 0;
    return cost + (rule.xtc_probability > 0 ? 500 : 0);
}

int64_t sample_scratch_size(int32_t n_vocab) noexcept {
    const int64_t n_words = n_candidates + n_bins + 2 * block_count(n_vocab);
    return n_words * static_cast<int64_t>(sizeof(uint64_t)) + 3 * n_vocab * static_cast<int64_t>(sizeof(float));
}

sample_scratch sample_scratch_at(char * memory, int32_t n_vocab) noexcept {
    const int32_t n_blocks = block_count(n_vocab);
    uint64_t * words = reinterpret_cast<uint64_t *>(memory);
    sample_scratch s;
    s.candidates = words;
    s.bins = s.candidates + n_candidates;
    s.block_sum = s.bins + n_bins;
    s.block_max = reinterpret_cast<float *>(s.block_sum + n_blocks);
    s.block_copy = s.block_max + n_blocks;
    s.masked = s.block_copy + n_blocks;
    s.kept = s.masked + n_vocab;
    s.counts = reinterpret_cast<int32_t *>(s.kept + n_vocab);
    return s;
}

// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
void cbatch_philox(const uint32_t * counter, const uint32_t * key, uint32_t * out) noexcept {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k[2] = {key[0], key[1]};
    for (int i_round = 0; i_round < 10; i_round++) {
        const uint64_t a = UINT64_C(0xD2511F53) * c[0];
        const uint64_t b = UINT64_C(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; i++) {
            c[i] = next[i];
        }
        k[0] += UINT32_C(0x9E3779B9);
        k[1] += UINT32_C(0xBB67AE85);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = c[i];
    }
}

sample_bits sample_random(const sample_rule & rule, int32_t i_output) noexcept {
    uint32_t counter[4] = {static_cast<uint32_t>(i_output), static_cast<uint32_t>(rule.i_choice), 0, 0};
    const uint32_t key[2] = {static_cast<uint32_t>(rule.seed), static_cast<uint32_t>(rule.seed >> 32)};
    uint32_t words[4];
    cbatch_philox(counter, key, words);
    sample_bits bits = {words[0] | static_cast<uint64_t>(words[1]) << 32, 0};
    if (rule.xtc_probability > 0) {
        counter[2] = 1;
        cbatch_philox(counter, key, words);
        bits.xtc = words[0];
    }
    return bits;
}

int32_t cbatch_isa_best(void) noexcept {
#ifdef CBATCH_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return CBATCH_ISA_AVX512;
    }
    if (__builtin_cpu_supports("avx2")) {
        return CBATCH_ISA_AVX2;
    }
#endif
    return CBATCH_ISA_BASE;
}

const sample_code * sample_code_for(int32_t isa) noexcept {
    const int32_t best = cbatch_isa_best();
    const int32_t wanted = isa == CBATCH_ISA_BEST ? best : isa;
    if (wanted < CBATCH_ISA_BASE || wanted > best) {
        return nullptr;
    }
#ifdef CBATCH_X86
    if (wanted == CBATCH_ISA_AVX512) {
        return &sample_code_avx512;
    }
    if (wanted == CBATCH_ISA_AVX2) {
        return &sample_code_avx2;
    }
#endif
    return &sample_code_base;
}

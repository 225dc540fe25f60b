// Attention, for processors with AVX-512: 64 cells at a time, whose scores are exponentiated 16 at once.
#include "attention.h"

#include <immintrin.h>

// No templates of the standard library: see packed_kernels.cpp.
namespace {

using floats = __m512;

constexpr int32_t n_lanes = 16;
constexpr int32_t n_block = 64;  // cells
constexpr uint16_t hidden = 0xFC00;  // −∞
constexpr float lowest = -__builtin_inff();

floats load_halves(const uint8_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

// e^x for x ≤ 0, within 2 units in the last place; 0 for −∞.
floats exponential(floats x) {
    const floats clamped = _mm512_max_ps(_mm512_set1_ps(-110.0F), x);  // NaN stays: the second operand counts then
    const floats n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(0x1.715476p+0F)), 0);
    floats r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1F), clamped);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20F), r);
    floats p = _mm512_set1_ps(0x1.6c16c2p-10F);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.111112p-7F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-5F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.555556p-3F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
    return _mm512_scalef_ps(p, n);
}

floats add_pairs(floats a, floats b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

floats add_fours(floats a, floats b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

floats add_parts(floats a, floats b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// The sums of 16 registers' lanes, in one register.
floats sums_of(const float (*rows)[n_lanes]) {
    floats fours[4];
    for (int32_t i = 0; i < 4; i++) {
        const float(*r)[n_lanes] = rows + i * 4;
        fours[i] = add_fours(add_pairs(_mm512_load_ps(r[0]), _mm512_load_ps(r[1])),
                             add_pairs(_mm512_load_ps(r[2]), _mm512_load_ps(r[3])));
    }
    return add_parts(add_parts(fours[0], fours[1]), add_parts(fours[2], fours[3]));
}

// The first n of 16 lanes.
__mmask16 first_lanes(int32_t n) {
    return n >= n_lanes ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1U << n) - 1U);
}

// Look at the next 16 of all cells, and write those that are not hidden from `at` on. Return where they end.
int32_t see(seen_cells & seen, int32_t at) {
    const int32_t first = seen.i_next, n_left = seen.n_cells - first, n_here = n_left < n_lanes ? n_left : n_lanes;
    const __m512i places = _mm512_add_epi32(_mm512_set1_epi32(first),
                                            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    seen.i_next = first + n_here;
    if (seen.mask == nullptr) {
        _mm512_storeu_si512(seen.cells + at, places);
        _mm512_storeu_ps(seen.added + at, _mm512_setzero_ps());
        return at + n_here;
    }
    const __m256i all_hidden = _mm256_set1_epi16(static_cast<int16_t>(hidden));
    const __m256i halves = _mm256_mask_loadu_epi16(all_hidden, first_lanes(n_here), seen.mask + first * 2);
    const __mmask16 shown = _mm256_cmpneq_epi16_mask(halves, all_hidden);
    if (shown != 0) {
        _mm512_storeu_si512(seen.cells + at, _mm512_maskz_compress_epi32(shown, places));
        _mm512_storeu_ps(seen.added + at, _mm512_maskz_compress_ps(shown, _mm512_cvtph_ps(halves)));
    }
    return at + __builtin_popcount(shown);
}

template <int32_t n_heads, int32_t n_vectors>
void add_values(const attention_row & row, const int32_t * cells, int32_t n, const float (*weights)[n_block], int32_t at,
                float (*total)[n_most_attention_value]) {
    floats sums[n_heads][n_vectors];
    for (int32_t h = 0; h < n_heads; h++) {
        for (int32_t v = 0; v < n_vectors; v++) {
            sums[h][v] = _mm512_load_ps(total[h] + at + v * n_lanes);
        }
    }
    for (int32_t c = 0; c < n; c++) {
        const uint8_t * from = row.values + static_cast<size_t>(cells[c]) * row.value_stride + at * 2;
        floats values[n_vectors];
        for (int32_t v = 0; v < n_vectors; v++) {
            values[v] = load_halves(from + v * n_lanes * 2);
        }
#pragma GCC unroll 6
        for (int32_t h = 0; h < n_heads; h++) {
            const floats weight = _mm512_set1_ps(weights[h][c]);
            for (int32_t v = 0; v < n_vectors; v++) {
                sums[h][v] = _mm512_fmadd_ps(weight, values[v], sums[h][v]);
            }
        }
    }
    for (int32_t h = 0; h < n_heads; h++) {
        for (int32_t v = 0; v < n_vectors; v++) {
            _mm512_store_ps(total[h] + at + v * n_lanes, sums[h][v]);
        }
    }
}

// Begin to read what is needed soon. It may lie behind the last cell: such an address does nothing.
void fetch(const uint8_t * p, int32_t n) {
    for (int32_t i = 0; i < n * 2; i += 64) {
        _mm_prefetch(p + i, _MM_HINT_T0);
    }
}

// Scores of up to 16 cells for each head, −∞ behind those that it sees. `n_before` cells came before.
template <int32_t n_heads>
void score(const attention_row & row, const int32_t * cells, const float * added, int32_t n, int32_t n_before,
           float (*dots)[n_lanes][n_lanes], floats * scores) {
    for (int32_t c = 0; c < n; c++) {
        const uint8_t * key = row.keys + static_cast<size_t>(cells[c]) * row.key_stride;
        fetch(row.values + static_cast<size_t>(cells[c]) * row.value_stride, row.n_value);
        fetch(key + n_block * row.key_stride, row.n_key);
        floats sums[n_heads];
        for (int32_t h = 0; h < n_heads; h++) {
            sums[h] = _mm512_setzero_ps();
        }
        for (int32_t i = 0; i < row.n_key; i += n_lanes) {
            const floats k = load_halves(key + i * 2);
#pragma GCC unroll 6
            for (int32_t h = 0; h < n_heads; h++) {
                sums[h] = _mm512_fmadd_ps(k, _mm512_loadu_ps(row.queries[h] + i), sums[h]);
            }
        }
        for (int32_t h = 0; h < n_heads; h++) {
            _mm512_store_ps(dots[h][c], sums[h]);
        }
    }
    for (int32_t h = 0; h < n_heads; h++) {
        const int32_t n_left = row.n_shown[h] - n_before;
        const __mmask16 there = first_lanes(n_left < n ? n_left : n);
        const floats s = _mm512_fmadd_ps(sums_of(dots[h]), _mm512_set1_ps(row.scale), _mm512_load_ps(added));
        scores[h] = _mm512_mask_blend_ps(there, _mm512_set1_ps(lowest), s);
    }
}

// What some heads of a row have summed up of a part of the cells.
template <int32_t n_heads>
struct attention_sums {
    alignas(64) float dots[n_heads][n_lanes][n_lanes] = {};
    alignas(64) float weights[n_heads][n_block];
    alignas(64) float total[n_heads][n_most_attention_value];
    float most[n_heads], sum[n_heads];

    attention_sums(int32_t n_value) {
        for (int32_t h = 0; h < n_heads; h++) {
            most[h] = lowest;
            sum[h] = 0.0F;
            for (int32_t i = 0; i < n_value; i++) {
                total[h][i] = 0.0F;
            }
        }
    }

    // Add up to 64 cells. `n_before` came before.
    void add(const attention_row & row, const int32_t * cells, const float * added, int32_t n, int32_t n_before) {
        constexpr int32_t n_parts = n_block / n_lanes;
        floats scores[n_parts][n_heads];
        for (int32_t i = 0; i < n_parts; i++) {
            const int32_t first = i * n_lanes, n_part = n - first < n_lanes ? n - first : n_lanes;
            if (n_part > 0) {
                score<n_heads>(row, cells + first, added + first, n_part, n_before + first, dots, scores[i]);
                continue;
            }
            for (int32_t h = 0; h < n_heads; h++) {
                scores[i][h] = _mm512_set1_ps(lowest);
            }
        }
        for (int32_t h = 0; h < n_heads; h++) {
            const floats larger = _mm512_max_ps(_mm512_max_ps(scores[0][h], scores[1][h]),
                                                _mm512_max_ps(scores[2][h], scores[3][h]));
            const float found = _mm512_reduce_max_ps(larger);
            if (found > most[h]) {
                const floats shrink = exponential(_mm512_set1_ps(most[h] - found));
                for (int32_t i = 0; i < row.n_value; i += n_lanes) {
                    _mm512_store_ps(total[h] + i, _mm512_mul_ps(_mm512_load_ps(total[h] + i), shrink));
                }
                sum[h] *= _mm512_cvtss_f32(shrink);
                most[h] = found;
            }
            floats sums = _mm512_setzero_ps();
            for (int32_t i = 0; i < n_parts; i++) {
                const floats weight = exponential(_mm512_sub_ps(scores[i][h], _mm512_set1_ps(most[h])));
                _mm512_store_ps(weights[h] + i * n_lanes, weight);
                sums = _mm512_add_ps(sums, weight);
            }
            sum[h] += _mm512_reduce_add_ps(sums);
        }
        int32_t at = 0;
        for (; at + 4 * n_lanes <= row.n_value; at += 4 * n_lanes) {
            add_values<n_heads, 4>(row, cells, n, weights, at, total);
        }
        for (; at < row.n_value; at += n_lanes) {
            add_values<n_heads, 1>(row, cells, n, weights, at, total);
        }
    }
};

// What a head has summed up, with n_value sums of values behind it. Of no cells, `most` is −∞ and the rest 0.
struct alignas(64) head_sums {
    float most;  // largest score
    float sum;   // of weights

    float * total() {
        return reinterpret_cast<float *>(this + 1);
    }
};

// Add what was summed up of later cells.
void join(head_sums & to, float most, float sum, const float * other, int32_t n_value) {
    float * total = to.total();
    const float larger = most > to.most ? most : to.most;
    const floats own = exponential(_mm512_set1_ps(to.most - larger)), others = exponential(_mm512_set1_ps(most - larger));
    for (int32_t i = 0; i < n_value; i += n_lanes) {
        const floats scaled = _mm512_mul_ps(_mm512_load_ps(total + i), own);
        _mm512_store_ps(total + i, _mm512_fmadd_ps(_mm512_load_ps(other + i), others, scaled));
    }
    to.sum = to.sum * _mm512_cvtss_f32(own) + sum * _mm512_cvtss_f32(others);
    to.most = larger;
}

head_sums & sums_at(uint8_t * sums, int64_t i, int32_t n_value) {
    return *reinterpret_cast<head_sums *>(sums + static_cast<size_t>(i) * n_part_bytes(n_value));
}

template <int32_t n_heads>
void add_part_of(const attention_row & row, const seen_cells & seen, bool is_first, uint8_t * sums) {
    attention_sums<n_heads> part(row.n_value);
    const int32_t n_before = seen.i_part * n_attention_part;
    for (int32_t i = 0; i < seen.n; i += n_block) {
        const int32_t n_left = seen.n - i;
        part.add(row, seen.cells + i, seen.added + i, n_left < n_block ? n_left : n_block, n_before + i);
    }
    for (int32_t h = 0; h < n_heads; h++) {
        head_sums & to = sums_at(sums, h, row.n_value);
        if (is_first) {
            to.most = part.most[h];
            to.sum = part.sum[h];
            for (int32_t i = 0; i < row.n_value; i += n_lanes) {
                _mm512_store_ps(to.total() + i, _mm512_load_ps(part.total[h] + i));
            }
        } else if (row.n_shown[h] > n_before) {
            join(to, part.most[h], part.sum[h], part.total[h], row.n_value);
        }
    }
}

}  // namespace

void skip_to(seen_cells & seen, int32_t i_part) noexcept {
    const __m256i all_hidden = _mm256_set1_epi16(static_cast<int16_t>(hidden));
    int32_t n_left = i_part * n_attention_part;
    seen.i_part = i_part - 1;
    while (n_left > 0 && seen.i_next < seen.n_cells) {
        __mmask16 shown = first_lanes(seen.n_cells - seen.i_next);
        if (seen.mask != nullptr) {
            const __m256i halves = _mm256_mask_loadu_epi16(all_hidden, shown, seen.mask + seen.i_next * 2);
            shown = _mm256_cmpneq_epi16_mask(halves, all_hidden);
        }
        const int32_t n = __builtin_popcount(shown);
        if (n > n_left) {
            seen.n_more = see(seen, n_attention_part) - n_attention_part - n_left;
            _mm512_storeu_si512(seen.cells + n_attention_part, _mm512_loadu_si512(seen.cells + n_attention_part + n_left));
            _mm512_storeu_ps(seen.added + n_attention_part, _mm512_loadu_ps(seen.added + n_attention_part + n_left));
            return;
        }
        n_left -= n;
        seen.i_next += n_lanes;
    }
}

bool next_part(seen_cells & seen) noexcept {
    int32_t n = seen.n_more;
    if (n > 0) {
        _mm512_store_si512(seen.cells, _mm512_load_si512(seen.cells + n_attention_part));
        _mm512_store_ps(seen.added, _mm512_load_ps(seen.added + n_attention_part));
    }
    while (n < n_attention_part && seen.i_next < seen.n_cells) {
        n = see(seen, n);
    }
    seen.n = n < n_attention_part ? n : n_attention_part;
    seen.n_more = n - seen.n;
    seen.i_part++;
    return n > 0;
}

void add_part(const attention_row & row, const seen_cells & seen, bool is_first, uint8_t * sums) noexcept {
    switch (row.n_heads) {
        case 1: add_part_of<1>(row, seen, is_first, sums); break;
        case 2: add_part_of<2>(row, seen, is_first, sums); break;
        case 3: add_part_of<3>(row, seen, is_first, sums); break;
        case 4: add_part_of<4>(row, seen, is_first, sums); break;
        case 5: add_part_of<5>(row, seen, is_first, sums); break;
        default: add_part_of<6>(row, seen, is_first, sums); break;
    }
}

size_t n_part_bytes(int32_t n_value) noexcept {
    return sizeof(head_sums) + static_cast<size_t>(n_value) * sizeof(float);
}

void write_mean(float * out, int32_t n_value, int32_t n_parts, int64_t n_all_heads, uint8_t * sums) noexcept {
    head_sums & all = sums_at(sums, 0, n_value);
    for (int32_t i = 1; i < n_parts; i++) {
        head_sums & part = sums_at(sums, i * n_all_heads, n_value);
        if (part.most != lowest || part.sum != 0.0F) {
            join(all, part.most, part.sum, part.total(), n_value);
        }
    }
    const floats inverse = _mm512_set1_ps(all.sum == 0.0F ? 0.0F : 1.0F / all.sum);
    for (int32_t i = 0; i < n_value; i += n_lanes) {
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_load_ps(all.total() + i), inverse));
    }
}

int32_t n_shown_first(const uint8_t * mask, const uint8_t * other, int32_t n_cells) noexcept {
    constexpr int32_t n_step = 32;
    const __m512i all_hidden = _mm512_set1_epi16(static_cast<int16_t>(hidden));
    int32_t n_shown = 0;
    bool has_ended = false;
    for (int32_t i = 0; i < n_cells; i += n_step) {
        const int32_t n = n_cells - i;
        const __mmask32 there = n >= n_step ? 0xFFFFFFFFU : (1U << n) - 1U;
        const __m512i own = _mm512_mask_loadu_epi16(all_hidden, there, mask + i * 2);
        const __m512i others = _mm512_mask_loadu_epi16(all_hidden, there, other + i * 2);
        const __mmask32 shown = _mm512_cmpneq_epi16_mask(own, all_hidden);
        const __mmask32 differ = _mm512_cmpneq_epi16_mask(own, others);
        // from the first difference on it may show no cell
        const __mmask32 behind = has_ended ? 0xFFFFFFFFU : differ == 0 ? 0U : ~((differ & (0U - differ)) - 1U);
        if ((shown & behind) != 0) {
            return -1;
        }
        has_ended = has_ended || differ != 0;
        n_shown += __builtin_popcount(shown);
    }
    return n_shown;
}

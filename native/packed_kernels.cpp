// Products of packed weights, for processors with AVX-512 and its 8-bit dot products (VNNI).
//
// Sixteen rows of weights lie side by side, four values of each in a 64-byte register. An instruction multiplies them
// with four values of one row of inputs and adds the products to 16 sums. Sums of a block are exact integers; blocks are
// added in order. So an output does not depend on how many rows of inputs are computed together.
#include "packed.h"

#include <immintrin.h>

#include <cstring>

// No templates of the standard library: the linker could take these instances for files of every processor.
namespace {

using ints = __m512i;
using floats = __m512;

constexpr int32_t n_lanes = 16;
constexpr int32_t n_vector = 64;  // bytes
constexpr int32_t n_super = 256;  // values of a super-block of the K types

uint32_t word_at(const void * p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

ints load(const uint8_t * p) {
    return _mm512_loadu_si512(p);
}

floats load_halves(const uint8_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

ints nibbles(const uint8_t * p, bool is_high) {
    const ints v = load(p);
    return _mm512_and_si512(is_high ? _mm512_srli_epi16(v, 4) : v, _mm512_set1_epi8(0x0F));
}

// ---- types: where the values of a block lie in a group, and what they count ----
// `weights(i)`: the i-th four values of a block, as numbers from 0 on. `offset`: what these are too high by.
// `n_scaled`: values that share a scale.

// Block of ggml: half d; int8 q[32].
struct q8_0_block {
    static constexpr int32_t type = 8, n_step = 32, n_ggml = 34, n_scaled = 32, offset = 128;
    static constexpr bool has_least = false;
    static size_t n_group_bytes(int32_t n_in) { return static_cast<size_t>(n_in / 32) * n_lanes * n_ggml; }

    const uint8_t * scales;
    const uint8_t * values;

    q8_0_block(const uint8_t * group, int32_t n_in, int32_t i)
        : scales(group + i * 32), values(group + n_in + static_cast<size_t>(i) * 512) {}
    ints weights(int32_t i) const { return load(values + i * n_vector); }
    floats scale(int32_t) const { return load_halves(scales); }

    static void pack(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group) {
        const ints places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                               _mm512_set1_epi32(static_cast<int32_t>(stride)));
        const ints signs = _mm512_set1_epi8(static_cast<char>(0x80));
        for (int32_t b = 0; b < n_in / 32; b++) {
            const uint8_t * block = rows + static_cast<size_t>(b) * n_ggml;
            for (int32_t r = 0; r < n_lanes; r++) {
                std::memcpy(group + b * 32 + r * 2, block + r * stride, 2);
            }
            for (int32_t i = 0; i < 8; i++) {
                const ints v = _mm512_i32gather_epi32(places, block + 2 + i * 4, 1);
                _mm512_storeu_si512(group + n_in + static_cast<size_t>(b) * 512 + i * n_vector, _mm512_xor_si512(v, signs));
            }
        }
    }
};

// Block of ggml: half d; low, then high halves of bytes: q[0..15], q[16..31].
struct q4_0_block {
    static constexpr int32_t type = 2, n_step = 32, n_ggml = 18, n_scaled = 32, offset = 8;
    static constexpr bool has_least = false;
    static size_t n_group_bytes(int32_t n_in) { return static_cast<size_t>(n_in / 32) * n_lanes * n_ggml; }

    const uint8_t * scales;
    const uint8_t * values;

    q4_0_block(const uint8_t * group, int32_t n_in, int32_t i)
        : scales(group + i * 32), values(group + n_in + static_cast<size_t>(i) * 256) {}
    ints weights(int32_t i) const { return nibbles(values + i % 4 * n_vector, i >= 4); }
    floats scale(int32_t) const { return load_halves(scales); }

    static void pack(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group) {
        for (int32_t b = 0; b < n_in / 32; b++) {
            uint8_t * values = group + n_in + static_cast<size_t>(b) * 256;
            for (int32_t r = 0; r < n_lanes; r++) {
                const uint8_t * block = rows + r * stride + static_cast<size_t>(b) * n_ggml;
                std::memcpy(group + b * 32 + r * 2, block, 2);
                for (int32_t i = 0; i < 4; i++) {
                    std::memcpy(values + i * n_vector + r * 4, block + 2 + i * 4, 4);
                }
            }
        }
    }
};

// The 6-bit scale and least value of sub-block i of 8. Source: ggml/src/ggml-quants.c, get_scale_min_k4.
void scale_and_least(const uint8_t * packed, int32_t i, uint8_t & scale, uint8_t & least) {
    if (i < 4) {
        scale = packed[i] & 63;
        least = packed[i + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[i + 4] & 0x0F) | (packed[i - 4] >> 6 << 4));
        least = static_cast<uint8_t>((packed[i + 4] >> 4) | (packed[i] >> 6 << 4));
    }
}

// Super-block of ggml: half d, dmin; 6-bit scales and leasts, 12 bytes; Q5_K: a fifth bit, 32 bytes; four times 32 bytes:
// low halves one block, high halves the next.
template <bool has_fifth_bit>
struct q45_K_block {
    static constexpr int32_t type = has_fifth_bit ? 13 : 12, n_step = n_super, n_ggml = has_fifth_bit ? 176 : 144;
    static constexpr int32_t n_scaled = 32, offset = 0;
    static constexpr bool has_least = true;
    static constexpr int32_t n_head = 64 + 16 * n_lanes, n_body = 2048 + (has_fifth_bit ? 512 : 0);
    static size_t n_group_bytes(int32_t n_in) { return static_cast<size_t>(n_in / n_super) * (n_head + n_body); }

    const uint8_t * head;
    const uint8_t * values;
    const uint8_t * bits;
    int32_t i_block;

    q45_K_block(const uint8_t * group, int32_t n_in, int32_t i) : i_block(i % 8) {
        const size_t i_super = i / 8;
        head = group + i_super * n_head;
        const uint8_t * body = group + static_cast<size_t>(n_in / n_super) * n_head + i_super * n_body;
        values = body + i_block / 2 * 512;
        bits = body + 2048 + i_block * 64;
    }
    ints weights(int32_t i) const {
        ints v = nibbles(values + i * n_vector, i_block % 2 != 0);
        if constexpr (has_fifth_bit) {
            uint64_t mask;
            std::memcpy(&mask, bits + i * 8, sizeof mask);
            v = _mm512_mask_add_epi8(v, mask, v, _mm512_set1_epi8(16));
        }
        return v;
    }
    static floats counts(const uint8_t * p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    }
    floats scale(int32_t) const { return _mm512_mul_ps(load_halves(head), counts(head + 64 + i_block * n_lanes)); }
    floats least() const { return _mm512_mul_ps(load_halves(head + 32), counts(head + 64 + (8 + i_block) * n_lanes)); }

    static void pack(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group) {
        const int32_t n_supers = n_in / n_super;
        for (int32_t s = 0; s < n_supers; s++) {
            uint8_t * to_head = group + static_cast<size_t>(s) * n_head;
            uint8_t * body = group + static_cast<size_t>(n_supers) * n_head + static_cast<size_t>(s) * n_body;
            if (has_fifth_bit) {
                std::memset(body + 2048, 0, 512);
            }
            for (int32_t r = 0; r < n_lanes; r++) {
                const uint8_t * block = rows + r * stride + static_cast<size_t>(s) * n_ggml;
                const uint8_t * from = block + (has_fifth_bit ? 48 : 16);
                std::memcpy(to_head + r * 2, block, 2);
                std::memcpy(to_head + 32 + r * 2, block + 2, 2);
                for (int32_t b = 0; b < 8; b++) {
                    scale_and_least(block + 4, b, to_head[64 + b * n_lanes + r], to_head[64 + (8 + b) * n_lanes + r]);
                }
                for (int32_t c = 0; c < 4; c++) {
                    for (int32_t i = 0; i < 8; i++) {
                        std::memcpy(body + c * 512 + i * n_vector + r * 4, from + c * 32 + i * 4, 4);
                    }
                }
                for (int32_t b = 0; has_fifth_bit && b < 8; b++) {
                    for (int32_t k = 0; k < 32; k++) {  // bit r * 4 + k % 4 of the k / 4-th mask
                        const int32_t bit = r * 4 + k % 4;
                        const bool is_set = (block[16 + k] >> b & 1) != 0;
                        body[2048 + b * 64 + k / 4 * 8 + bit / 8] |= static_cast<uint8_t>(is_set << bit % 8);
                    }
                }
            }
        }
    }
};

// Super-block of ggml: low four bits, 128 bytes; high two, 64 bytes; int8 scales of 16 values each; half d.
struct q6_K_block {
    static constexpr int32_t type = 14, n_step = n_super, n_ggml = 210, n_scaled = 16, offset = 32;
    static constexpr bool has_least = false;
    static constexpr int32_t n_head = 32 + 16 * n_lanes, n_body = 2048 + 1024;
    static size_t n_group_bytes(int32_t n_in) { return static_cast<size_t>(n_in / n_super) * (n_head + n_body); }

    const uint8_t * head;
    const uint8_t * low;
    const uint8_t * high;
    int32_t i_block;

    q6_K_block(const uint8_t * group, int32_t n_in, int32_t i) : i_block(i % 8) {
        const size_t i_super = i / 8;
        head = group + i_super * n_head;
        const uint8_t * body = group + static_cast<size_t>(n_in / n_super) * n_head + i_super * n_body;
        low = body + i_block / 2 * 512;
        high = body + 2048 + i_block / 4 * 512;
    }
    ints weights(int32_t i) const {
        const ints two = _mm512_set1_epi8(0x30);
        const ints h = load(high + i * n_vector);
        ints shifted;
        switch (i_block % 4) {
            case 0: shifted = _mm512_slli_epi16(h, 4); break;
            case 1: shifted = _mm512_slli_epi16(h, 2); break;
            case 2: shifted = h; break;
            default: shifted = _mm512_srli_epi16(h, 2); break;
        }
        return _mm512_or_si512(nibbles(low + i * n_vector, i_block % 2 != 0), _mm512_and_si512(shifted, two));
    }
    floats scale(int32_t i_part) const {
        const auto * p = reinterpret_cast<const __m128i *>(head + 32 + (i_block * 2 + i_part) * n_lanes);
        return _mm512_mul_ps(load_halves(head), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))));
    }

    // Value k of a super-block, 0 to 63. Source: ggml/src/ggml-quants.c, dequantize_row_q6_K.
    static uint8_t value(const uint8_t * block, int32_t k) {
        const int32_t half = k / 128, l = k % 32, quarter = k % 128 / 32;
        const uint8_t low = block[half * 64 + quarter % 2 * 32 + l];
        const uint8_t high = block[128 + half * 32 + l];
        return static_cast<uint8_t>((quarter < 2 ? low & 0x0F : low >> 4) | (high >> 2 * quarter & 3) << 4);
    }

    static void pack(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group) {
        const int32_t n_supers = n_in / n_super;
        for (int32_t s = 0; s < n_supers; s++) {
            uint8_t * to_head = group + static_cast<size_t>(s) * n_head;
            uint8_t * body = group + static_cast<size_t>(n_supers) * n_head + static_cast<size_t>(s) * n_body;
            std::memset(body, 0, n_body);
            for (int32_t r = 0; r < n_lanes; r++) {
                const uint8_t * block = rows + r * stride + static_cast<size_t>(s) * n_ggml;
                std::memcpy(to_head + r * 2, block + 208, 2);
                for (int32_t i = 0; i < 16; i++) {
                    to_head[32 + i * n_lanes + r] = block[192 + i];
                }
                for (int32_t k = 0; k < n_super; k++) {
                    const int32_t b = k / 32, at = k % 32 / 4 * n_vector + r * 4 + k % 4;
                    const uint8_t v = value(block, k);
                    body[b / 2 * 512 + at] |= static_cast<uint8_t>((v & 0x0F) << b % 2 * 4);
                    body[2048 + b / 4 * 512 + at] |= static_cast<uint8_t>((v >> 4) << b % 4 * 2);
                }
            }
        }
    }
};

// ---- products of quantised weights ----

// Rounded to integers; 0 for what is no number.
ints rounded(floats v) {
    return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v);
}

template <class block>
void quantise(const float * values, int32_t begin, int32_t end, const quantised & out) {
    for (int32_t b = begin; b < end; b++) {
        const floats v0 = _mm512_loadu_ps(values + b * 32), v1 = _mm512_loadu_ps(values + b * 32 + n_lanes);
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(v0), _mm512_abs_ps(v1)));
        // rounded as ggml's Q8_0 is, which keeps scales in 16 bits
        const bool has_nan = _mm512_cmp_ps_mask(v0, v1, _CMP_UNORD_Q) != 0;
        const float scale = has_nan ? __builtin_nanf("") : _cvtsh_ss(_cvtss_sh(most / 127.0F, 0));
        const floats inverse = _mm512_set1_ps(scale != 0.0F ? 127.0F / most : 0.0F);
        const ints i0 = rounded(_mm512_mul_ps(v0, inverse)), i1 = rounded(_mm512_mul_ps(v1, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out.values + b * 32), _mm512_cvtsepi32_epi8(i0));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out.values + b * 32 + n_lanes), _mm512_cvtsepi32_epi8(i1));
        const int32_t sum0 = _mm512_reduce_add_epi32(i0), sum1 = _mm512_reduce_add_epi32(i1);
        out.scales[b] = scale;
        out.scaled_sums[b] = scale * static_cast<float>(sum0 + sum1);
        const bool is_split = block::n_scaled == 16;
        out.starts[b * 2] = -block::offset * (is_split ? sum0 : sum0 + sum1);
        out.starts[b * 2 + 1] = is_split ? -block::offset * sum1 : 0;
    }
}

template <class block, int32_t n_rows>
void multiply_rows(const uint8_t * group, int32_t n_in, const quantised & rows, float * const * out) {
    constexpr int32_t n_parts = 32 / block::n_scaled, n_quads = block::n_scaled / 4;
    // few rows: two sums each, since one would wait for itself
    constexpr int32_t n_sums = n_rows <= 4 ? 2 : 1;
    const int32_t n_blocks = n_in / 32;
    floats total[n_rows];
    for (int32_t r = 0; r < n_rows; r++) {
        total[r] = _mm512_setzero_ps();
    }
    for (int32_t b = 0; b < n_blocks; b++) {
        const block w(group, n_in, b);
        for (int32_t part = 0; part < n_parts; part++) {
            ints sums[n_rows][n_sums];
            for (int32_t r = 0; r < n_rows; r++) {
                sums[r][0] = block::offset == 0
                                 ? _mm512_setzero_si512()
                                 : _mm512_set1_epi32(rows.starts[(static_cast<size_t>(r) * n_blocks + b) * 2 + part]);
                if (n_sums == 2) {
                    sums[r][n_sums - 1] = _mm512_setzero_si512();
                }
            }
            const int8_t * values = rows.values + b * 32 + part * block::n_scaled;
#pragma GCC unroll 8
            for (int32_t i = 0; i < n_quads; i++) {
                const ints v = w.weights(part * n_quads + i);
#pragma GCC unroll 12
                for (int32_t r = 0; r < n_rows; r++) {
                    const auto four = static_cast<int32_t>(word_at(values + static_cast<size_t>(r) * n_in + i * 4));
                    ints & sum = sums[r][i % n_sums];
                    sum = _mm512_dpbusd_epi32(sum, v, _mm512_set1_epi32(four));
                }
            }
            const floats scale = w.scale(part);
            for (int32_t r = 0; r < n_rows; r++) {
                const ints sum = n_sums == 2 ? _mm512_add_epi32(sums[r][0], sums[r][n_sums - 1]) : sums[r][0];
                const floats both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[static_cast<size_t>(r) * n_blocks + b]));
                total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, total[r]);
            }
        }
        if constexpr (block::has_least) {
            const floats least = w.least();
            for (int32_t r = 0; r < n_rows; r++) {
                const floats sum = _mm512_set1_ps(rows.scaled_sums[static_cast<size_t>(r) * n_blocks + b]);
                total[r] = _mm512_fnmadd_ps(least, sum, total[r]);
            }
        }
    }
    for (int32_t r = 0; r < n_rows; r++) {
        _mm512_storeu_ps(out[r], total[r]);
    }
}

// ---- products of floats: 32 rows of weights, since one load of an input serves two registers ----

template <bool is_half>
struct float_values {
    static constexpr int32_t type = is_half ? 1 : 0, n_bytes = is_half ? 2 : 4, n_group_rows = 2 * n_lanes;
    static size_t n_group_bytes(int32_t n_in) { return static_cast<size_t>(n_in) * n_group_rows * n_bytes; }
    static floats at(const uint8_t * group, int32_t i, int32_t i_half) {
        const uint8_t * p = group + (static_cast<size_t>(i) * 2 + i_half) * n_lanes * n_bytes;
        if constexpr (is_half) {
            return load_halves(p);
        } else {
            return _mm512_loadu_ps(p);
        }
    }
    static void pack(const uint8_t * rows, size_t stride, int32_t n_in, uint8_t * group) {
        for (int32_t i = 0; i < n_in; i++) {
            for (int32_t r = 0; r < n_group_rows; r++) {
                std::memcpy(group + (static_cast<size_t>(i) * n_group_rows + r) * n_bytes,
                            rows + r * stride + static_cast<size_t>(i) * n_bytes, n_bytes);
            }
        }
    }
};

template <class values, int32_t n_rows>
void multiply_float_rows(const uint8_t * group, int32_t n_in, const float * const * inputs, float * const * out) {
    floats low[n_rows], high[n_rows];
    for (int32_t r = 0; r < n_rows; r++) {
        low[r] = high[r] = _mm512_setzero_ps();
    }
    for (int32_t i = 0; i < n_in; i++) {
        const floats w0 = values::at(group, i, 0), w1 = values::at(group, i, 1);
#pragma GCC unroll 12
        for (int32_t r = 0; r < n_rows; r++) {
            const floats input = _mm512_set1_ps(inputs[r][i]);
            low[r] = _mm512_fmadd_ps(w0, input, low[r]);
            high[r] = _mm512_fmadd_ps(w1, input, high[r]);
        }
    }
    for (int32_t r = 0; r < n_rows; r++) {
        _mm512_storeu_ps(out[r], low[r]);
        _mm512_storeu_ps(out[r] + n_lanes, high[r]);
    }
}

// ---- one entry per type ----

template <class block>
void multiply(const uint8_t * group, int32_t n_in, const quantised & rows, const float * const *, int32_t n_rows,
              float * const * out) {
    switch (n_rows) {
        case 1: multiply_rows<block, 1>(group, n_in, rows, out); break;
        case 2: multiply_rows<block, 2>(group, n_in, rows, out); break;
        case 3: multiply_rows<block, 3>(group, n_in, rows, out); break;
        case 4: multiply_rows<block, 4>(group, n_in, rows, out); break;
        case 5: multiply_rows<block, 5>(group, n_in, rows, out); break;
        case 6: multiply_rows<block, 6>(group, n_in, rows, out); break;
        case 7: multiply_rows<block, 7>(group, n_in, rows, out); break;
        case 8: multiply_rows<block, 8>(group, n_in, rows, out); break;
        case 9: multiply_rows<block, 9>(group, n_in, rows, out); break;
        case 10: multiply_rows<block, 10>(group, n_in, rows, out); break;
        case 11: multiply_rows<block, 11>(group, n_in, rows, out); break;
        default: multiply_rows<block, 12>(group, n_in, rows, out); break;
    }
}

template <class values>
void multiply_floats(const uint8_t * group, int32_t n_in, const quantised &, const float * const * inputs, int32_t n_rows,
                     float * const * out) {
    switch (n_rows) {
        case 1: multiply_float_rows<values, 1>(group, n_in, inputs, out); break;
        case 2: multiply_float_rows<values, 2>(group, n_in, inputs, out); break;
        case 3: multiply_float_rows<values, 3>(group, n_in, inputs, out); break;
        case 4: multiply_float_rows<values, 4>(group, n_in, inputs, out); break;
        case 5: multiply_float_rows<values, 5>(group, n_in, inputs, out); break;
        case 6: multiply_float_rows<values, 6>(group, n_in, inputs, out); break;
        case 7: multiply_float_rows<values, 7>(group, n_in, inputs, out); break;
        case 8: multiply_float_rows<values, 8>(group, n_in, inputs, out); break;
        case 9: multiply_float_rows<values, 9>(group, n_in, inputs, out); break;
        case 10: multiply_float_rows<values, 10>(group, n_in, inputs, out); break;
        case 11: multiply_float_rows<values, 11>(group, n_in, inputs, out); break;
        default: multiply_float_rows<values, 12>(group, n_in, inputs, out); break;
    }
}

template <class block>
constexpr packed_kind quantised_kind() {
    return {block::type, block::n_step, n_lanes, true, block::n_group_bytes, block::pack, quantise<block>, multiply<block>};
}

template <class values>
constexpr packed_kind float_kind() {
    return {values::type, 32, values::n_group_rows, false, values::n_group_bytes, values::pack, nullptr, multiply_floats<values>};
}

constexpr packed_kind kinds[] = {
    quantised_kind<q8_0_block>(),         quantised_kind<q4_0_block>(),        quantised_kind<q45_K_block<false>>(),
    quantised_kind<q45_K_block<true>>(),  quantised_kind<q6_K_block>(),        float_kind<float_values<true>>(),
    float_kind<float_values<false>>(),
};

}  // namespace

const packed_kind * find_packed_kind(int32_t type) noexcept {
    for (const packed_kind & kind : kinds) {
        if (kind.type == type) {
            return &kind;
        }
    }
    return nullptr;
}

// A buffer of ggml's CPU backend that holds weights packed, and multiplies them in ggml's own threads.
//
// ggml's CPU backend has a list of extra buffer types, as its own repacked weights have one: for each operation it asks
// them whether they compute it. Ours is put in front. llama.cpp asks a type for each weight whether it takes it while a
// model is loaded; ours says yes only in a thread that is loading for cbatch, and to weights of plain products alone.
#include "packed.h"

#include "attention.h"
#include "cbatch.h"
#include "ggml_abi.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

using namespace ggml_abi;

struct init_params {
    size_t n_bytes;
    void * memory;
    bool has_no_data;
};

// Functions of the library that is loaded. Source: ggml/include/ggml.h, ggml-backend.h, ggml-cpu.h; src/ggml-cpu.
struct functions {
    size_t (*overhead)();
    void * (*init)(init_params params);
    void (*free)(void * context);
    tensor * (*new_2d)(void * context, int32_t type, int64_t n0, int64_t n1);
    tensor * (*new_4d)(void * context, int32_t type, int64_t n0, int64_t n1, int64_t n2, int64_t n3);
    tensor * (*mul_mat)(void * context, tensor * a, tensor * b);
    tensor * (*attention)(void * context, tensor * queries, tensor * keys, tensor * values, tensor * mask, float scale,
                          float max_bias, float cap);
    const char * (*op_name)(int32_t op);
    const char * (*type_name)(int32_t type);
    size_t (*row_size)(int32_t type, int64_t n);
    tensor * (*set_name)(tensor * t, const char * name);
    buffer_type * (*cpu_type)();
    buffer * (*allocate)(buffer_type * type, size_t n_bytes);
    void (*free_buffer)(buffer * b);
    void * (*base_of)(buffer * b);
    size_t (*alignment_of)(buffer_type * type);
    const char * (*name_of)(buffer_type * type);
    void * (*device_of)(buffer_type * type);
    void * (*registry)();
    void * (*device_at)(void * registry, size_t i);
    void * (*address_in)(void * registry, const char * name);
    std::vector<buffer_type *> & (*extra_types)();
    void (*barrier)(void * threads);
    void (*set_chunk)(void * threads, int value);
    int (*next_chunk)(void * threads, int n);
};

functions ggml;
int32_t op_mul_mat, op_attention;
buffer_type packed_type;
thread_local bool is_wanted = false;

// Names of weights that a graph uses in nothing but a product, in all of llama.cpp's architectures.
const char * const names[] = {
    "attn_q.weight", "attn_k.weight",   "attn_v.weight", "attn_qkv.weight",  "attn_output.weight",
    "ffn_up.weight", "ffn_gate.weight", "ffn_down.weight",
};

bool is_known(const char * name) {
    if (std::strcmp(name, "output.weight") == 0 || std::strcmp(name, "token_embd.weight") == 0) {
        return true;
    }
    const char * end = std::strncmp(name, "blk.", 4) == 0 ? std::strchr(name + 4, '.') : nullptr;
    return end != nullptr && std::any_of(std::begin(names), std::end(names),
                                         [&](const char * known) { return std::strcmp(end + 1, known) == 0; });
}

bool can_pack(const tensor & w) {
    const packed_kind * kind = find_packed_kind(w.type);
    return kind != nullptr && w.ne[1] > 0 && w.ne[1] % kind->n_group_rows == 0 && w.ne[0] % kind->n_step == 0 &&
           w.ne[2] == 1 && w.ne[3] == 1 && w.view_src == nullptr && w.ne[0] <= INT32_MAX / 64 && w.ne[1] <= INT32_MAX / 64;
}

bool is_packed(const tensor & op) {
    return op.op == op_mul_mat && op.src[0]->buffer != nullptr && op.src[0]->buffer->type == &packed_type;
}

int64_t n_rows_of(const tensor & t) {
    return t.ne[1] * t.ne[2] * t.ne[3];
}

// Row i of a tensor whose rows are whole, as floats.
float * row_of(const tensor & t, int64_t i) {
    if (i < t.ne[1]) {  // nearly always; divisions take as long as the products of a short row
        return reinterpret_cast<float *>(static_cast<char *>(t.data) + i * static_cast<int64_t>(t.nb[1]));
    }
    const int64_t i1 = i % t.ne[1], i2 = i / t.ne[1] % t.ne[2], i3 = i / t.ne[1] / t.ne[2];
    return reinterpret_cast<float *>(static_cast<char *>(t.data) + i1 * static_cast<int64_t>(t.nb[1]) +
                                     i2 * static_cast<int64_t>(t.nb[2]) + i3 * static_cast<int64_t>(t.nb[3]));
}

constexpr size_t n_align = 64;

// Bytes of the inputs as 8-bit numbers, and where the parts lie.
size_t place(quantised & rows, char * work, int64_t n_rows, int64_t n_in) {
    const size_t n_values = static_cast<size_t>(n_rows) * n_in, n_blocks = n_values / n_quant;
    size_t at = 0;
    const auto take = [&](size_t n_bytes) {
        char * place = work + at;
        at += (n_bytes + n_align - 1) / n_align * n_align;
        return place;
    };
    rows.values = reinterpret_cast<int8_t *>(take(n_values));
    rows.scales = reinterpret_cast<float *>(take(n_blocks * sizeof(float)));
    rows.scaled_sums = reinterpret_cast<float *>(take(n_blocks * sizeof(float)));
    rows.starts = reinterpret_cast<int32_t *>(take(n_blocks * 2 * sizeof(int32_t)));
    return at;
}

quantised from_row(const quantised & rows, int64_t i, int64_t n_in) {
    const int64_t i_block = i * (n_in / n_quant);
    return {rows.values + i * n_in, rows.scales + i_block, rows.scaled_sums + i_block, rows.starts + i_block * 2};
}

// Inputs that a core keeps near while it goes through groups of weights.
constexpr int64_t n_near_bytes = 512 * 1024;

class product final : public tensor_traits {
public:
    bool work_size(int, const tensor * op, size_t & n_bytes) override {
        quantised rows{};
        const tensor & w = *op->src[0];
        n_bytes = find_packed_kind(w.type)->is_quantised ? place(rows, nullptr, n_rows_of(*op->src[1]), w.ne[0]) + n_align : 0;
        return true;
    }

    bool compute_forward(compute_params * params, tensor * op) override {
        const tensor & w = *op->src[0];
        const tensor & inputs = *op->src[1];
        const packed_kind & kind = *find_packed_kind(w.type);
        const auto n_in = static_cast<int32_t>(w.ne[0]);
        const int64_t n_rows = n_rows_of(inputs), n_blocks = n_in / n_quant;
        const int64_t i_thread = params->i_thread, n_threads = params->n_threads;

        if (i_thread == 0) {
            ggml.set_chunk(params->threads, static_cast<int>(n_threads));
        }
        quantised rows{};
        if (kind.is_quantised) {
            const auto work = reinterpret_cast<uintptr_t>(params->work);
            place(rows, reinterpret_cast<char *>((work + n_align - 1) / n_align * n_align), n_rows, n_in);
            const int64_t end = n_rows * n_blocks * (i_thread + 1) / n_threads;
            for (int64_t at = n_rows * n_blocks * i_thread / n_threads; at < end;) {
                const int64_t i = at / n_blocks, begin = at % n_blocks, until = std::min(n_blocks, begin + end - at);
                kind.quantise(row_of(inputs, i), static_cast<int32_t>(begin), static_cast<int32_t>(until),
                              from_row(rows, i, n_in));
                at += until - begin;
            }
        }
        ggml.barrier(params->threads);

        const int64_t n_groups = w.ne[1] / kind.n_group_rows;
        const int64_t n_per_chunk = std::max<int64_t>(1, n_groups / (n_threads * 8));
        const int64_t n_value = kind.is_quantised ? 1 : sizeof(float);
        const int64_t n_slab = std::max<int64_t>(2, n_near_bytes / n_value / n_in / n_most_rows) * n_most_rows;
        const int64_t n_chunks_per_slab = (n_groups + n_per_chunk - 1) / n_per_chunk;
        const int64_t n_chunks = n_chunks_per_slab * ((n_rows + n_slab - 1) / n_slab);
        for (int64_t chunk = i_thread; chunk < n_chunks; chunk = ggml.next_chunk(params->threads, 1)) {
            const int64_t first = chunk / n_chunks_per_slab * n_slab, last = std::min(n_rows, first + n_slab);
            const int64_t begin = chunk % n_chunks_per_slab * n_per_chunk, end = std::min(n_groups, begin + n_per_chunk);
            for (int64_t i_group = begin; i_group < end; i_group++) {
                multiply(kind, w, i_group, inputs, rows, first, last, *op);
            }
        }
        return true;
    }

private:
    static void multiply(const packed_kind & kind, const tensor & w, int64_t i_group, const tensor & inputs,
                         const quantised & rows, int64_t first, int64_t last, const tensor & to) {
        const auto n_in = static_cast<int32_t>(w.ne[0]);
        const uint8_t * group = static_cast<const uint8_t *>(w.data) + kind.n_group_bytes(n_in) * i_group;
        for (int64_t i = first; i < last;) {
            const int64_t n_left = last - i;
            // the last rows in two halves: few rows together would cost as much as many
            const int64_t n = n_left <= n_most_rows       ? n_left
                              : n_left < 2 * n_most_rows ? (n_left + 1) / 2
                                                         : n_most_rows;
            float * out[n_most_rows];
            const float * in[n_most_rows];
            for (int64_t r = 0; r < n; r++) {
                out[r] = row_of(to, i + r) + kind.n_group_rows * i_group;
                in[r] = row_of(inputs, i + r);
            }
            kind.multiply(group, n_in, from_row(rows, i, n_in), in, static_cast<int32_t>(n), out);
            i += n;
        }
    }
};

product the_product;

// Whether something is computed from a product of packed weights, by its first inputs.
bool is_of_packed(const tensor * t) {
    constexpr int32_t n_most_steps = 12;  // a view, its positions, a norm, a bias
    for (int32_t i = 0; t != nullptr && i < n_most_steps; i++, t = t->src[0]) {
        if (t->op == op_mul_mat) {
            return is_packed(*t);
        }
    }
    return false;
}

class attention final : public tensor_traits {
public:
    // Whether it is attention of a packed model, in a form that `attend` has. The rest stays ggml's own.
    static bool suits(const tensor & op) {
        const tensor & q = *op.src[0];
        const tensor & k = *op.src[1];
        const tensor & v = *op.src[2];
        const tensor * mask = op.src[3];
        float more[3];  // scale, bias, cap
        std::memcpy(more, op.op_params, sizeof more);
        return more[1] == 0.0F && more[2] == 0.0F && op.src[4] == nullptr && q.type == f32 && k.type == f16 && v.type == f16 &&
               (mask == nullptr || (mask->type == f16 && mask->nb[0] == 2 && mask->ne[2] == 1)) &&
               k.ne[0] % n_attention_step == 0 && v.ne[0] % n_attention_step == 0 && v.ne[0] <= n_most_attention_value &&
               k.ne[2] == v.ne[2] && k.ne[3] == v.ne[3] && q.ne[2] % k.ne[2] == 0 &&
               q.ne[3] % k.ne[3] == 0 && q.nb[0] == 4 && k.nb[0] == 2 && v.nb[0] == 2 && is_of_packed(&q);
    }

    bool work_size(int n_threads, const tensor * op, size_t & n_bytes) override {
        const tensor & q = *op->src[0];
        n_bytes = n_align + (is_divided(*op, n_threads) ? n_divided_bytes(*op) : n_bytes_of(*op, n_threads * n_most_of(q)));
        return true;
    }

    bool compute_forward(compute_params * params, tensor * op) override {
        const bool divides = is_divided(*op, params->n_threads);
        if (params->i_thread == 0) {
            ggml.set_chunk(params->threads, params->n_threads);
        }
        ggml.barrier(params->threads);
        if (divides) {
            divide(*params, *op);
        } else {
            compute(*params, *op);
        }
        return true;
    }

private:
    static constexpr int64_t n_divided = 512;          // cells
    static constexpr size_t n_most_bytes = 1U << 25U;  // of the sums of all parts
    static constexpr int64_t n_turns = 4;              // of a thread: one may be done sooner than another
    static constexpr int64_t n_most_sums = 192;        // heads of tokens whose sums a thread keeps: they stay in its cache

    // Some tokens one after another, which see the same cells and maybe more after them.
    struct group {
        int64_t i_stream, first, n;
        int32_t n_shown[n_most_heads];  // (n)
    };

    // Whether threads share the cells of each row: rows alone are too few then, or of too different lengths.
    static bool is_divided(const tensor & op, int64_t n_threads) {
        const tensor & q = *op.src[0];
        const int64_t n_rows = q.ne[3] * q.ne[1];
        return op.src[1]->ne[1] >= n_divided && n_divided_bytes(op) <= n_most_bytes &&
               (n_rows * op.src[1]->ne[2] < n_threads || (q.ne[1] == 1 && n_rows < n_threads * n_turns));
    }

    // Bytes of what all heads of some tokens sum up.
    static size_t n_bytes_of(const tensor & op, int64_t n_tokens) {
        return static_cast<size_t>(n_tokens * op.src[0]->ne[2]) * n_part_bytes(static_cast<int32_t>(op.src[2]->ne[0]));
    }

    static size_t n_divided_bytes(const tensor & op) {
        return n_bytes_of(op, op.src[0]->ne[1] * op.src[0]->ne[3] * n_parts_of(op));
    }

    // The most tokens that are computed together.
    static int64_t n_most_of(const tensor & q) {
        return std::clamp<int64_t>(n_most_sums / q.ne[2], 1, n_most_heads);
    }

    static int64_t n_parts_of(const tensor & op) {
        return (op.src[1]->ne[1] + n_attention_part - 1) / n_attention_part;
    }

    static uint8_t * sums_of(const compute_params & params) {
        return reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(params.work) + n_align - 1) / n_align * n_align);
    }

    // Compute tokens of which those that see the same keys are computed together, all heads of them part by part: keys lie side by
    // side. Where there are few, a unit of work is some heads of keys.
    static void compute(const compute_params & params, const tensor & op) {
        const tensor & q = *op.src[0];
        const tensor * mask = op.src[3];
        const int64_t n_kv = op.src[1]->ne[2], n_tokens = q.ne[1], n_units_least = params.n_threads * n_turns;
        const int64_t n_each = std::clamp<int64_t>(q.ne[3] * n_tokens * n_kv / n_units_least, 1, n_most_of(q));
        const int64_t n_together = mask == nullptr ? 1 : n_each;
        const int64_t n_groups = (n_tokens + n_together - 1) / n_together, n_all = q.ne[3] * n_groups;
        const int64_t n_kv_each = std::clamp<int64_t>(n_all * n_kv / n_units_least, 1, n_kv);
        const int64_t n_pieces = (n_kv + n_kv_each - 1) / n_kv_each;
        uint8_t * sums = sums_of(params) + n_bytes_of(op, params.i_thread * n_most_of(q));
        for (int64_t i = params.i_thread; i < n_all * n_pieces; i = ggml.next_chunk(params.threads, 1)) {
            const int64_t i_group = i / n_pieces, first = i_group % n_groups * n_together, i_kv = i % n_pieces * n_kv_each;
            const int64_t after = std::min(first + n_together, n_tokens), after_kv = std::min(i_kv + n_kv_each, n_kv);
            for (int64_t at = first; at < after;) {
                const group g = group_of(op, i_group / n_groups, at, after);
                seen_cells seen = cells_of(op, g);
                for (bool is_first = true; next_part(seen) || is_first; is_first = false) {
                    add_heads(op, g, seen, i_kv, after_kv, is_first, sums);
                }
                write(op, g, i_kv, after_kv, sums);
                at += g.n;
            }
        }
    }

    // Compute rows whose cells are shared among the threads; the bits are those of `compute`.
    static void divide(const compute_params & params, const tensor & op) {
        const tensor & q = *op.src[0];
        const int64_t n_tokens = q.ne[1], n_rows = q.ne[3] * n_tokens, n_parts = n_parts_of(op), n_all_heads = n_rows * q.ne[2];
        const int64_t n_range = std::max<int64_t>(1, n_rows * n_parts / (params.n_threads * n_turns));
        const int64_t n_ranges = (n_parts + n_range - 1) / n_range, n_value = op.src[2]->ne[0];
        const size_t stride = n_part_bytes(static_cast<int32_t>(n_value));
        uint8_t * sums = sums_of(params);
        for (int64_t i = params.i_thread; i < n_rows * n_ranges; i = ggml.next_chunk(params.threads, 1)) {
            const int64_t i_row = i / n_ranges, first = i % n_ranges * n_range, after = std::min(first + n_range, n_parts);
            const group g = group_of(op, i_row / n_tokens, i_row % n_tokens, i_row % n_tokens + 1);
            seen_cells seen = cells_of(op, g);
            skip_to(seen, static_cast<int32_t>(first));
            for (int64_t part = first; part < after; part++) {
                next_part(seen);
                add_heads(op, g, seen, 0, op.src[1]->ne[2], true, sums + static_cast<size_t>(part * n_all_heads + i_row * q.ne[2]) * stride);
            }
        }
        ggml.barrier(params.threads);
        for (int64_t i = params.i_thread; i < n_all_heads; i += params.n_threads) {
            const int64_t i_row = i / q.ne[2];
            auto * out = reinterpret_cast<float *>(at(op, i % q.ne[2], i_row % n_tokens, i_row / n_tokens));
            write_mean(out, static_cast<int32_t>(n_value), static_cast<int32_t>(n_parts), n_all_heads,
                       sums + static_cast<size_t>(i) * stride);
        }
    }

    // A token and those behind it, up to `after`, that see the same cells and maybe more after them.
    static group group_of(const tensor & op, int64_t i_stream, int64_t first, int64_t after) {
        const tensor * mask = op.src[3];
        const auto n_cells = static_cast<int32_t>(op.src[1]->ne[1]);
        group g{i_stream, first, 1, {n_cells}};
        for (; first + g.n < after; g.n++) {
            const uint8_t * before = at(*mask, first + g.n - 1, 0, i_stream % mask->ne[3]);
            const int32_t n = n_shown_first(before, before + mask->nb[1], n_cells);
            if (n <= 0) {
                break;
            }
            g.n_shown[g.n - 1] = n;
            g.n_shown[g.n] = n_cells;
        }
        return g;
    }

    static seen_cells cells_of(const tensor & op, const group & g) {
        const tensor * mask = op.src[3];
        seen_cells seen;
        seen.mask = mask == nullptr ? nullptr : at(*mask, g.first + g.n - 1, 0, g.i_stream % mask->ne[3]);
        seen.n_cells = static_cast<int32_t>(op.src[1]->ne[1]);
        return seen;
    }

    // Sum up a part of the cells for the query heads that read some heads of keys, each group of them at its own sums.
    static void add_heads(const tensor & op, const group & g, const seen_cells & seen, int64_t i_kv, int64_t after, bool is_first,
                          uint8_t * sums) {
        const tensor & q = *op.src[0];
        const tensor & k = *op.src[1];
        const tensor & v = *op.src[2];
        const int64_t n_per_kv = q.ne[2] / k.ne[2], i_cells = g.i_stream / (q.ne[3] / k.ne[3]);
        attention_row row{};
        row.key_stride = k.nb[1];
        row.value_stride = v.nb[1];
        row.n_key = static_cast<int32_t>(k.ne[0]);
        row.n_value = static_cast<int32_t>(v.ne[0]);
        std::memcpy(&row.scale, op.op_params, sizeof row.scale);
        for (; i_kv < after; i_kv++) {
            row.keys = at(k, 0, i_kv, i_cells);
            row.values = at(v, 0, i_kv, i_cells);
            for (int64_t i = 0; i < n_per_kv * g.n; i += row.n_heads) {
                row.n_heads = static_cast<int32_t>(std::min<int64_t>(n_most_heads, n_per_kv * g.n - i));
                for (int32_t j = 0; j < row.n_heads; j++) {
                    const int64_t t = (i + j) / n_per_kv, h = i_kv * n_per_kv + (i + j) % n_per_kv;
                    row.queries[j] = reinterpret_cast<const float *>(at(q, g.first + t, h, g.i_stream));
                    row.n_shown[j] = g.n_shown[t];
                }
                add_part(row, seen, is_first, sums);
                sums += static_cast<size_t>(row.n_heads) * n_part_bytes(row.n_value);
            }
        }
    }

    // Write what `add_heads` has summed up.
    static void write(const tensor & op, const group & g, int64_t i_kv, int64_t after, uint8_t * sums) {
        const int64_t n_per_kv = op.src[0]->ne[2] / op.src[1]->ne[2], n_value = op.src[2]->ne[0];
        for (; i_kv < after; i_kv++) {
            for (int64_t i = 0; i < n_per_kv * g.n; i++) {
                auto * out = reinterpret_cast<float *>(at(op, i_kv * n_per_kv + i % n_per_kv, g.first + i / n_per_kv, g.i_stream));
                write_mean(out, static_cast<int32_t>(n_value), 1, 0, sums);
                sums += n_part_bytes(static_cast<int32_t>(n_value));
            }
        }
    }

    static uint8_t * at(const tensor & t, int64_t i1, int64_t i2, int64_t i3) {
        return static_cast<uint8_t *>(t.data) + static_cast<size_t>(i1) * t.nb[1] + static_cast<size_t>(i2) * t.nb[2] +
               static_cast<size_t>(i3) * t.nb[3];
    }
};

attention the_attention;

class packed_buffer final : public extra_buffer_type {
public:
    bool supports_op(void *, const tensor * op) override {
        if (!is_packed(*op) || op->src[1]->type != f32 || !can_pack(*op->src[0])) {
            return false;
        }
        // of a model that is being loaded, the buffer is a stand-in without bytes
        return op->src[0]->buffer->n_bytes > 0 || (is_wanted && is_known(op->src[0]->name));
    }
    tensor_traits * get_tensor_traits(const tensor * op) override {
        if (is_packed(*op)) {
            return &the_product;
        }
        return op->op == op_attention && attention::suits(*op) ? &the_attention : nullptr;
    }
};

packed_buffer the_buffer;

const char * name_of(buffer_type *) {
    return "CBATCH_PACKED";
}

size_t n_packed_bytes(buffer_type *, const tensor * t) {
    const packed_kind * kind = find_packed_kind(t->type);
    return kind->n_group_bytes(static_cast<int32_t>(t->ne[0])) * static_cast<size_t>(t->ne[1] / kind->n_group_rows);
}

size_t alignment(buffer_type *) {
    return n_align;
}

void set_tensor(buffer *, tensor * t, const void * data, size_t offset, size_t n_bytes) {
    const packed_kind & kind = *find_packed_kind(t->type);
    const auto n_in = static_cast<int32_t>(t->ne[0]);
    const size_t stride = ggml.row_size(t->type, n_in), n_group = kind.n_group_bytes(n_in);
    const int64_t begin = static_cast<int64_t>(offset / stride), end = static_cast<int64_t>((offset + n_bytes) / stride);
    for (int64_t row = begin; row + kind.n_group_rows <= end; row += kind.n_group_rows) {
        kind.pack(static_cast<const uint8_t *>(data) + (row - begin) * stride, stride, n_in,
                  static_cast<uint8_t *>(t->data) + n_group * (row / kind.n_group_rows));
    }
}

buffer * allocate(buffer_type *, size_t n_bytes) {
    buffer * b = ggml.allocate(ggml.cpu_type(), n_bytes);
    if (b != nullptr) {
        b->type = &packed_type;
        b->functions.set_tensor = set_tensor;
        b->functions.get_tensor = nullptr;
        b->functions.copy_tensor = nullptr;
    }
    return b;
}

#if defined(CBATCH_PACKED)

bool find_functions(void * library) {
    return find(library, "ggml_tensor_overhead", ggml.overhead) && find(library, "ggml_init", ggml.init) &&
           find(library, "ggml_free", ggml.free) && find(library, "ggml_new_tensor_2d", ggml.new_2d) &&
           find(library, "ggml_new_tensor_4d", ggml.new_4d) && find(library, "ggml_mul_mat", ggml.mul_mat) &&
           find(library, "ggml_flash_attn_ext", ggml.attention) && find(library, "ggml_op_name", ggml.op_name) &&
           find(library, "ggml_type_name", ggml.type_name) && find(library, "ggml_row_size", ggml.row_size) &&
           find(library, "ggml_set_name", ggml.set_name) && find(library, "ggml_backend_cpu_buffer_type", ggml.cpu_type) &&
           find(library, "ggml_backend_buft_alloc_buffer", ggml.allocate) &&
           find(library, "ggml_backend_buffer_free", ggml.free_buffer) &&
           find(library, "ggml_backend_buffer_get_base", ggml.base_of) &&
           find(library, "ggml_backend_buft_get_alignment", ggml.alignment_of) &&
           find(library, "ggml_backend_buft_name", ggml.name_of) &&
           find(library, "ggml_backend_buft_get_device", ggml.device_of) &&
           find(library, "ggml_backend_reg_dev_get", ggml.device_at) && find(library, "ggml_backend_cpu_reg", ggml.registry) &&
           find(library, "ggml_backend_reg_get_proc_address", ggml.address_in) &&
           find(library, "_Z39ggml_backend_cpu_get_extra_buffer_typesv", ggml.extra_types) &&
           find(library, "ggml_barrier", ggml.barrier) && find(library, "ggml_threadpool_chunk_set", ggml.set_chunk) &&
           find(library, "ggml_threadpool_chunk_add", ggml.next_chunk);
}

bool has_known_types() {
    const struct {
        int32_t type;
        const char * name;
    } known[] = {{f32, "f32"}, {f16, "f16"}, {q4_0, "q4_0"}, {q8_0, "q8_0"}, {q4_K, "q4_K"}, {q5_K, "q5_K"}, {q6_K, "q6_K"}};
    return std::all_of(std::begin(known), std::end(known),
                       [](const auto & k) { return std::strcmp(ggml.type_name(k.type), k.name) == 0; });
}

bool has_known_tensors() {
    void * context = ggml.init({ggml.overhead() * 16, nullptr, true});
    if (context == nullptr) {
        return false;
    }
    tensor & a = *ggml.new_2d(context, f32, 64, 48);
    tensor & b = *ggml.new_2d(context, f32, 64, 5);
    ggml.set_name(&a, "weights");
    tensor & c = *ggml.mul_mat(context, &a, &b);
    op_mul_mat = c.op;
    tensor & queries = *ggml.new_4d(context, f32, 64, 3, 4, 2);
    tensor & cells = *ggml.new_4d(context, f16, 64, 32, 2, 2);
    tensor & mask = *ggml.new_4d(context, f16, 32, 64, 1, 2);
    tensor & attended = *ggml.attention(context, &queries, &cells, &cells, &mask, 0.25F, 0.0F, 0.0F);
    op_attention = attended.op;
    float scale;
    std::memcpy(&scale, attended.op_params, sizeof scale);
    const bool fits = a.type == f32 && a.buffer == nullptr && a.ne[0] == 64 && a.ne[1] == 48 && a.ne[2] == 1 && a.ne[3] == 1 &&
                      a.nb[0] == 4 && a.nb[1] == 256 && a.data == nullptr && a.view_src == nullptr &&
                      std::strcmp(a.name, "weights") == 0 && c.src[0] == &a && c.src[1] == &b && c.src[2] == nullptr &&
                      c.ne[0] == 48 && c.ne[1] == 5 && std::strcmp(ggml.op_name(c.op), "MUL_MAT") == 0 &&
                      std::strcmp(ggml.op_name(attended.op), "FLASH_ATTN_EXT") == 0 && scale == 0.25F &&
                      attended.src[0] == &queries && attended.src[2] == &cells && attended.src[3] == &mask &&
                      attended.ne[1] == 4 && attended.ne[2] == 3 && attended.ne[3] == 2 &&
                      ggml.overhead() - sizeof(tensor) <= 64;
    ggml.free(context);
    return fits;
}

bool has_known_buffers() {
    buffer_type * type = ggml.cpu_type();
    if (type->functions.get_name(type) != ggml.name_of(type) || type->functions.get_alignment(type) != ggml.alignment_of(type) ||
        type->functions.is_host == nullptr || !type->functions.is_host(type) || type->device != ggml.device_of(type)) {
        return false;
    }
    buffer * b = ggml.allocate(type, 96);
    if (b == nullptr) {
        return false;
    }
    const bool fits = b->type == type && b->n_bytes == 96 && b->usage == 0 && b->functions.init_tensor == nullptr &&
                      b->functions.set_tensor != nullptr && b->functions.get_tensor != nullptr &&
                      b->functions.reset == nullptr && b->functions.get_base(b) == ggml.base_of(b);
    ggml.free_buffer(b);
    return fits;
}

// Whether llama.cpp will offer our type to weights: it copies ggml's list once, when a model is loaded first.
bool is_offered() {
    const auto types = reinterpret_cast<buffer_type ** (*) (void *)>(
        ggml.address_in(ggml.registry(), "ggml_backend_dev_get_extra_bufts"));
    if (types == nullptr) {
        return false;
    }
    for (buffer_type ** type = types(packed_type.device); *type != nullptr; type++) {
        if (*type == &packed_type) {
            return true;
        }
    }
    return false;
}

#endif

}  // namespace

int32_t cbatch_packed_open(void * library) noexcept {
#if defined(CBATCH_PACKED)
    static int32_t opened = [&] {
        if (!packed_suits_processor()) {
            return CBATCH_BAD_SIZES;
        }
        if (!find_functions(library) || !has_known_types() || !has_known_tensors() || !has_known_buffers()) {
            return CBATCH_BAD_API;
        }
        packed_type.functions = {name_of, allocate, alignment, nullptr, n_packed_bytes, nullptr};
        packed_type.device = ggml.device_at(ggml.registry(), 0);
        packed_type.context = static_cast<extra_buffer_type *>(&the_buffer);
        std::vector<buffer_type *> & types = ggml.extra_types();
        types.insert(types.begin(), &packed_type);
        return is_offered() ? CBATCH_OK : CBATCH_TOO_LATE;
    }();
    return opened;
#else
    (void) library;
    return CBATCH_BAD_SIZES;
#endif
}

void cbatch_packed_want(int32_t is_loading) noexcept {
    is_wanted = is_loading != 0;
}

bool packed_suits_processor() noexcept {
#if defined(CBATCH_PACKED)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

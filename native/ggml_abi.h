// What cbatch knows of ggml's own types, to put weights into a buffer of its own kind. `cbatch_packed_open` compares them
// with the library that is loaded before anything uses them.
// Source: ggml 0.25.3, include/ggml.h; src/ggml-backend-impl.h; src/ggml-cpu/ggml-cpu-impl.h and traits.h.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace ggml_abi {

#if defined(__linux__)
// Find a function of the library that is loaded; return whether it is there.
template <class function>
bool find(void * library, const char * name, function & to) {
    to = reinterpret_cast<function>(dlsym(library, name));
    return to != nullptr;
}
#endif

constexpr int32_t f32 = 0, f16 = 1, q4_0 = 2, q8_0 = 8, q4_K = 12, q5_K = 13, q6_K = 14;

struct buffer;
struct buffer_type;

struct tensor {
    int32_t type;
    struct buffer * buffer;
    int64_t ne[4];  // numbers of elements
    size_t nb[4];   // strides in bytes
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    tensor * src[10];
    tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
};

struct buffer_type_functions {
    const char * (*get_name)(buffer_type * type);
    buffer * (*alloc_buffer)(buffer_type * type, size_t n_bytes);
    size_t (*get_alignment)(buffer_type * type);
    size_t (*get_max_size)(buffer_type * type);
    size_t (*get_alloc_size)(buffer_type * type, const tensor * t);
    bool (*is_host)(buffer_type * type);
};

struct buffer_type {
    buffer_type_functions functions;
    void * device;
    void * context;  // of an extra type of the CPU: an `extra_buffer_type`
};

struct buffer_functions {
    void (*free_buffer)(buffer * b);
    void * (*get_base)(buffer * b);
    int32_t (*init_tensor)(buffer * b, tensor * t);
    void (*memset_tensor)(buffer * b, tensor * t, uint8_t value, size_t offset, size_t n_bytes);
    void (*set_tensor)(buffer * b, tensor * t, const void * data, size_t offset, size_t n_bytes);
    void (*get_tensor)(buffer * b, const tensor * t, void * data, size_t offset, size_t n_bytes);
    void (*set_tensor_2d)(buffer * b, tensor * t, const void * data, size_t offset, size_t n_bytes, size_t n_copies,
                          size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d)(buffer * b, const tensor * t, void * data, size_t offset, size_t n_bytes, size_t n_copies,
                          size_t stride_tensor, size_t stride_data);
    bool (*copy_tensor)(buffer * b, const tensor * from, tensor * to);
    void (*clear)(buffer * b, uint8_t value);
    void (*reset)(buffer * b);
};

struct buffer {
    buffer_functions functions;
    buffer_type * type;
    void * context;
    size_t n_bytes;
    int32_t usage;
};

struct compute_params {
    int32_t i_thread, n_threads;
    size_t n_work_bytes;
    void * work;
    void * threads;
    bool use_reference;
};

// As ggml calls them: a virtual destructor, then the two functions.
class tensor_traits {
public:
    virtual ~tensor_traits() = default;
    virtual bool work_size(int n_threads, const tensor * op, size_t & n_bytes) = 0;
    virtual bool compute_forward(compute_params * params, tensor * op) = 0;
};

class extra_buffer_type {
public:
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(void * device, const tensor * op) = 0;
    virtual tensor_traits * get_tensor_traits(const tensor * op) = 0;
};

}  // namespace ggml_abi

// Memory of ggml's CPU backend in huge pages, where the system gives them to programs that ask: weights that were read or
// packed, cells, and what a graph computes in. Processors look up where a page lies each time they go on to another one,
// and a step goes through all weights. Weights that are mapped from a file stay as the file's pages are.
#include "cbatch.h"
#include "ggml_abi.h"

#if defined(__linux__)
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

#if defined(__linux__)

using namespace ggml_abi;

constexpr size_t n_least_bytes = size_t{4} << 20;  // a huge page has 2 MiB on most systems: less than two, no gain

buffer * (*allocate_before)(buffer_type * type, size_t n_bytes);
void * (*base_of)(buffer * b);

buffer * allocate(buffer_type * type, size_t n_bytes) {
    buffer * b = allocate_before(type, n_bytes);
    if (b != nullptr && n_bytes >= n_least_bytes) {
        const auto n_page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto start = reinterpret_cast<uintptr_t>(base_of(b));
        const uintptr_t first = (start + n_page - 1) / n_page * n_page, end = (start + n_bytes) / n_page * n_page;
        // where the system refuses, pages stay small
        madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
    }
    return b;
}

#endif

}  // namespace

int32_t cbatch_huge_pages_open(void * library) noexcept {
#if defined(__linux__)
    static const int32_t opened = [&] {
        buffer_type * (*cpu_type)();
        const char * (*name_of)(buffer_type * type);
        size_t (*alignment_of)(buffer_type * type);
        if (!find(library, "ggml_backend_cpu_buffer_type", cpu_type) || !find(library, "ggml_backend_buft_name", name_of) ||
            !find(library, "ggml_backend_buft_get_alignment", alignment_of) ||
            !find(library, "ggml_backend_buffer_get_base", base_of)) {
            return CBATCH_BAD_API;
        }
        buffer_type_functions & functions = cpu_type()->functions;
        if (std::strcmp(functions.get_name(cpu_type()), name_of(cpu_type())) != 0 ||
            functions.get_alignment(cpu_type()) != alignment_of(cpu_type())) {
            return CBATCH_BAD_API;
        }
        allocate_before = functions.alloc_buffer;
        functions.alloc_buffer = allocate;
        return CBATCH_OK;
    }();
    return opened;
#else
    (void) library;
    return CBATCH_BAD_API;
#endif
}

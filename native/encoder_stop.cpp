// Ends a graph of ggml between two of its nodes: an encoder has no other way to be interrupted.
#include "cbatch.h"

#include <atomic>
#include <new>

struct cbatch_graph_stop {
    std::atomic<bool> is_stopped{false};
    int32_t n_asked = 0;
};

namespace {

constexpr int32_t n_stride = 16;  // nodes computed together: each pause costs the threads a barrier

}  // namespace

cbatch_graph_stop * cbatch_graph_stop_init(void) noexcept {
    return new (std::nothrow) cbatch_graph_stop;
}

void cbatch_graph_stop_free(cbatch_graph_stop * stop) noexcept {
    delete stop;
}

void cbatch_graph_stop_set(cbatch_graph_stop * stop) noexcept {
    stop->is_stopped.store(true, std::memory_order_relaxed);
}

bool cbatch_graph_callback(void * node, bool is_asking, void * stop) noexcept {
    (void) node;
    cbatch_graph_stop & s = *static_cast<cbatch_graph_stop *>(stop);
    if (is_asking) {
        s.n_asked = (s.n_asked + 1) % n_stride;
        return s.n_asked == 0;
    }
    return !s.is_stopped.load(std::memory_order_relaxed);
}

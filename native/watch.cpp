// Looks at the computing of a graph between its nodes: ends it behind a node, gives a turn to other work, or breaks it off.
//
// ggml computes nodes up to the next pause together, and each pause costs its threads a barrier. So pauses are only behind
// products and attention, which take nearly all of the time; and ggml computes some pairs of other nodes as one, with
// another rounding, which a pause between them would change.
#include "cbatch.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>

namespace {

using steady = std::chrono::steady_clock;

constexpr int32_t n_stride = 8;                                   // long nodes between pauses where nothing waits
constexpr steady::duration look_again = std::chrono::milliseconds(10);

bool is_long(const char * op) {
    return std::strncmp(op, "MUL_MAT", 7) == 0 || std::strcmp(op, "FLASH_ATTN_EXT") == 0;
}

}  // namespace

struct cbatch_watch {
    cbatch_watch_params params;
    std::atomic<bool> is_stopped{false}, is_hurried{false};
    steady::time_point until{};
    bool is_fine = true;  // whether to pause behind each long node
    int32_t n_asked = 0;

    // Compute for so many seconds before the next turn.
    void go_on(double seconds) {
        is_fine = std::isfinite(seconds);
        const auto time = std::chrono::duration<double>(is_fine ? seconds : 0.0);
        until = steady::now() + (is_fine ? std::chrono::duration_cast<steady::duration>(time) : look_again);
    }
};

cbatch_watch * cbatch_watch_init(const cbatch_watch_params * params) noexcept {
    return new (std::nothrow) cbatch_watch{*params};
}

void cbatch_watch_free(cbatch_watch * watch) noexcept {
    delete watch;
}

void cbatch_watch_stop(cbatch_watch * watch) noexcept {
    watch->is_stopped.store(true, std::memory_order_relaxed);
}

void cbatch_watch_hurry(cbatch_watch * watch) noexcept {
    watch->is_hurried.store(true, std::memory_order_relaxed);
}

bool cbatch_watch_callback(void * node, bool is_asking, void * watch) noexcept {
    cbatch_watch & w = *static_cast<cbatch_watch *>(watch);
    const bool is_last = w.params.last != nullptr && std::strcmp(w.params.get_name(node), w.params.last) == 0;
    if (is_asking) {
        if (is_last) {
            return true;
        }
        if (!is_long(w.params.get_op(node))) {
            return false;
        }
        w.n_asked = (w.n_asked + 1) % n_stride;
        return w.n_asked == 0 || (w.params.turn != nullptr && (w.is_fine || w.is_hurried.load(std::memory_order_relaxed)));
    }
    if (is_last || w.is_stopped.load(std::memory_order_relaxed)) {
        return false;
    }
    if (w.params.turn != nullptr && (w.is_hurried.load(std::memory_order_relaxed) || steady::now() >= w.until)) {
        w.is_hurried.store(false, std::memory_order_relaxed);
        const double seconds = w.params.turn();
        if (!(seconds >= 0.0)) {
            return false;
        }
        w.go_on(seconds);
    }
    return true;
}

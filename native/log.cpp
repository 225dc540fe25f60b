// llama.cpp's log lines, kept where no interpreter lock is needed. Records lie one after another in a ring of bytes.
#include "cbatch.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <new>

namespace {

struct record_head {
    int32_t level;
    int32_t n_text;  // bytes of text that follow
};

constexpr int32_t n_head = sizeof(record_head);

}  // namespace

// bytes[i_first … i_first + n_used), indexes modulo n_bytes, hold whole records, the oldest first.
struct cbatch_log_ring {
    std::mutex mutex;
    std::unique_ptr<char[]> bytes;
    int32_t n_bytes = 0;
    int32_t i_first = 0;
    int32_t n_used = 0;
    int64_t n_dropped = 0;
    bool has_debug = false;
    bool is_kept = true;  // whether the last record was, so that its continuations share its fate
};

namespace {

void ring_read(const cbatch_log_ring & r, int32_t offset, char * out, int32_t n) {
    const int32_t i = (r.i_first + offset) % r.n_bytes;
    const int32_t n_tail = r.n_bytes - i < n ? r.n_bytes - i : n;
    memcpy(out, &r.bytes[i], n_tail);
    memcpy(out + n_tail, &r.bytes[0], n - n_tail);
}

void ring_append(cbatch_log_ring & r, const char * data, int32_t n) {
    const int32_t i = (r.i_first + r.n_used) % r.n_bytes;
    const int32_t n_tail = r.n_bytes - i < n ? r.n_bytes - i : n;
    memcpy(&r.bytes[i], data, n_tail);
    memcpy(&r.bytes[0], data + n_tail, n - n_tail);
    r.n_used += n;
}

int32_t ring_first_size(const cbatch_log_ring & r) {
    record_head head;
    ring_read(r, 0, reinterpret_cast<char *>(&head), n_head);
    return n_head + head.n_text;
}

bool is_wanted(cbatch_log_ring & r, int32_t level) {
    if (level != CBATCH_LOG_CONTINUATION) {
        r.is_kept = r.has_debug || level != CBATCH_LOG_DEBUG;
    }
    return r.is_kept;
}

void ring_drop_first(cbatch_log_ring & r) {
    const int32_t n = ring_first_size(r);
    r.i_first = (r.i_first + n) % r.n_bytes;
    r.n_used -= n;
}

}  // namespace

cbatch_log_ring * cbatch_log_init(int32_t n_bytes) noexcept {
    if (n_bytes < 64) {
        return nullptr;
    }
    try {
        auto ring = std::make_unique<cbatch_log_ring>();
        ring->bytes = std::make_unique<char[]>(n_bytes);
        ring->n_bytes = n_bytes;
        return ring.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void cbatch_log_set_debug(cbatch_log_ring * ring, int32_t has_debug) noexcept {
    const std::lock_guard<std::mutex> lock(ring->mutex);
    ring->has_debug = has_debug != 0;
}

void cbatch_log_callback(int32_t level, const char * text, void * ring) noexcept {
    if (ring == nullptr || text == nullptr) {
        return;
    }
    cbatch_log_ring & r = *static_cast<cbatch_log_ring *>(ring);
    const int32_t n_text = static_cast<int32_t>(strnlen(text, r.n_bytes - n_head));  // a longer text is cut
    const record_head head = {level, n_text};
    const std::lock_guard<std::mutex> lock(r.mutex);
    if (!is_wanted(r, level)) {
        return;
    }
    while (r.n_bytes - r.n_used < n_head + n_text) {
        ring_drop_first(r);
        r.n_dropped++;
    }
    ring_append(r, reinterpret_cast<const char *>(&head), n_head);
    ring_append(r, text, n_text);
}

int32_t cbatch_log_drain(cbatch_log_ring * ring, char * out, int32_t n_out, int64_t * n_dropped) noexcept {
    cbatch_log_ring & r = *ring;
    const std::lock_guard<std::mutex> lock(r.mutex);
    int32_t n_written = 0;
    while (r.n_used > 0) {
        const int32_t n = ring_first_size(r);
        if (n_written + n > n_out) {
            break;
        }
        ring_read(r, 0, out + n_written, n);
        n_written += n;
        ring_drop_first(r);
    }
    *n_dropped = r.n_dropped;
    r.n_dropped = 0;
    return n_written;
}

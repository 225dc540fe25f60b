// What a round of spinning takes, as OpenMP's threads spin: from 1 to 50 ns, by processor.
#include "cbatch.h"

#include <algorithm>
#include <chrono>

namespace {

constexpr int n_rounds = 2000;
constexpr int n_tries = 8;  // the shortest counts: others were interrupted

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__GNUC__)
    __asm__ volatile("" ::: "memory");
#endif
}

}  // namespace

double cbatch_spin_s(void) noexcept {
    volatile int value = 0;
    double best = 1.0;
    for (int i = 0; i < n_tries; ++i) {
        const auto start = std::chrono::steady_clock::now();
        for (int n = 0; n < n_rounds && value == 0; ++n) {
            relax();
        }
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best / n_rounds;
}

#include "draft_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace {

// A slot that misses so many tokens or fewer catches up in the step that guesses.
constexpr int32_t n_near = 8;

// What drafts may gain of a step's time, by which catching up is judged.
constexpr double gain_hoped = 0.3;

// What a step of the model takes of the target's before it is known.
constexpr double usual_share = 0.15;

// Before anything is known most guesses are right: else none would be made.
constexpr float n_hits_before = 3.6f;
constexpr float n_tries_before = 4.0f;

// So much is never missed: the slot has tokens that the model does not have.
constexpr int64_t never_ns = INT64_MIN / 2;

// Guesses that are less likely to be all right are not made.
constexpr float least_chance = 0.3f;

float chance_of(const hit_rate & rate) {
    return (rate.n_hits + n_hits_before) / (rate.n_expected + n_tries_before);
}

int32_t lead_class(float lead) {
    return lead < 0.5f ? 0 : lead < 1.0f ? 1 : lead < 2.0f ? 2 : lead < 3.0f ? 3 : lead < 5.0f ? 4 : 5;
}

}  // namespace

void draft_model::allocate(const cbatch_draft_context & context, int32_t n_slots) {
    n_cells.assign(n_slots, 0);
    missed_ns.assign(n_slots, 0);
    batch.allocate(context.n_batch);
    costs.allocate(n_slots);
    gains.resize(static_cast<size_t>(n_slots) + 1);
    given = context;
}

float draft_model::usual_chance() const noexcept {
    return chance_of(first);
}

int32_t draft_model::choose(int32_t n, int32_t m, int32_t n_each, bool is_even,
                            const width_costs & target) const noexcept {
    const double alone_ns = target.cost(n);
    if (m == 0 || alone_ns <= 0.0) {
        return 0;
    }
    const double own_ns = costs.cost(m) > 0.0 ? costs.cost(m) : usual_share * alone_ns;
    double best = least_gain * n / alone_ns;
    int32_t n_best = 0;
    double n_tokens = n;
    double all_right = 1.0;
    for (int32_t k = 1; k <= n_each; k++) {
        all_right *= usual_chance();
        n_tokens += m * all_right;
        const int32_t n_rows = n + k * (is_even ? n : m);
        if (n_rows >= static_cast<int32_t>(target.expected.size())) {
            break;
        }
        const double rate = n_tokens / (target.cost(n_rows) + k * own_ns);
        if (rate > best && std::find(std::begin(some_each), std::end(some_each), k) != std::end(some_each)) {
            best = rate;
            n_best = k;
        }
    }
    return n_best;
}

bool draft_model::decode(const cbatch_api & api) noexcept {
    try {
        if (api.decode(given.ctx, batch.view()) == 0) {
            return true;
        }
    } catch (...) {
    }
    given.ctx = nullptr;
    return false;
}

// Remove the cells of a slot that are not right, and that of the token before `end`, whose output is wanted. Returns
// whether the model has all tokens up to `end` that have no cell then.
bool draft_model::trim(const cbatch_api & api, int32_t slot, const std::vector<int32_t> & text, int32_t end) noexcept {
    const int32_t start = std::min(n_cells[slot], end - 1);
    if (std::any_of(text.begin() + start, text.begin() + end, [&](int32_t t) { return t >= given.n_vocab; })) {
        return false;
    }
    api.memory_seq_rm(api.get_memory(given.ctx), slot, start, -1);
    n_cells[slot] = start;
    return true;
}

bool draft_model::knows(const cbatch_api & api, int32_t slot, const std::vector<int32_t> & text,
                        double step_ns) noexcept {
    const int32_t n_text = static_cast<int32_t>(text.size());
    if (n_text + n_drafts_each > given.n_window) {
        return false;
    }
    const int32_t n_missing = n_text - n_cells[slot];
    if (n_missing <= n_near) {
        return true;
    }
    missed_ns[slot] += static_cast<int64_t>(gain_hoped * step_ns);
    if (step_ns > 0.0 && missed_ns[slot] < n_missing * token_ns) {
        return false;
    }
    if (missed_ns[slot] < 0) {
        return false;
    }
    const int64_t start_ns = api.clock_ns();
    const int32_t n = std::min(n_missing - 1, given.n_batch);
    const int32_t start = n_cells[slot];
    if (!trim(api, slot, text, start + n)) {
        missed_ns[slot] = never_ns;
        return false;
    }
    batch.n = 0;
    for (int32_t i = start; i < start + n; i++) {
        batch.put(text[i], i, slot, i == start + n - 1);
    }
    n_cells[slot] = start + n;
    if (decode(api)) {
        api.get_logits_ith(given.ctx, n - 1);  // waits for a device
        token_ns = static_cast<double>(api.clock_ns() - start_ns) / n;
    }
    return false;
}

// Take the likeliest token of a row as the next guess.
void draft_model::read_guess(const cbatch_api & api, guesses * g) noexcept {
    const float * logits = api.get_logits_ith(given.ctx, g->i_token);
    g->is_open = false;
    if (logits == nullptr) {
        return;
    }
    int32_t likeliest = 0;
    float second = -INFINITY;
    for (int32_t i = 1; i < given.n_vocab; i++) {
        if (logits[i] > logits[likeliest]) {
            second = logits[likeliest];
            likeliest = i;
        } else if (logits[i] > second) {
            second = logits[i];
        }
    }
    const int32_t its_class = lead_class(logits[likeliest] - second);
    const float before = g->n > 0 ? g->chances[g->n - 1] : 1.0f;
    const float chance = before * chance_of(leads[its_class]);
    if (chance < least_chance || std::binary_search(g->stop->begin(), g->stop->end(), likeliest)) {
        return;
    }
    g->tokens[g->n] = likeliest;
    g->classes[g->n] = its_class;
    g->chances[g->n] = chance;
    g->n++;
    g->is_open = true;
}

// Compute the tokens that were put, and take the next guess of each whose row is among them.
bool draft_model::compute(const cbatch_api & api, std::vector<guesses> * all) noexcept {
    const bool is_done = decode(api);
    for (guesses & g : *all) {
        if (g.i_token >= 0) {
            if (is_done) {
                read_guess(api, &g);
            }
            g.i_token = -1;
        }
    }
    batch.n = 0;
    return is_done;
}

// Put the tokens of `g` from `start` to `end`, behind which it guesses; computes full batches. Returns whether it could.
bool draft_model::feed(const cbatch_api & api, std::vector<guesses> * all, guesses * g, int32_t start,
                       int32_t end) noexcept {
    for (int32_t i = start; i < end; i++) {
        batch.put(i < g->n_text ? (*g->text)[i] : g->tokens[i - g->n_text], i, g->slot, i == end - 1);
        g->i_token = i == end - 1 ? batch.n - 1 : -1;
        if (batch.n == given.n_batch && !compute(api, all)) {
            return false;
        }
    }
    return true;
}

void draft_model::guess(const cbatch_api & api, std::vector<guesses> * all, int32_t k) noexcept {
    for (guesses & g : *all) {
        g.is_open = trim(api, g.slot, *g.text, g.n_text);
    }
    batch.n = 0;
    for (int32_t j = 0; j < k; j++) {
        const int64_t start_ns = api.clock_ns();
        int32_t n_rows = 0;
        int32_t n_tokens = 0;
        for (guesses & g : *all) {
            if (!g.is_open) {
                continue;
            }
            const int32_t end = g.n_text + j;
            const int32_t start = j == 0 ? n_cells[g.slot] : end - 1;
            if (!feed(api, all, &g, start, end)) {
                return;
            }
            n_rows++;
            n_tokens += end - start;
            n_cells[g.slot] = g.n_text;
            g.n_fed = j;
        }
        if (n_rows == 0 || (batch.n > 0 && !compute(api, all))) {
            return;
        }
        if (n_tokens == n_rows) {
            costs.learn(n_rows, api.clock_ns() - start_ns);
        }
    }
}

void draft_model::learn(const guesses & g, int32_t n_checked, int32_t n_right) noexcept {
    for (int32_t j = 0; j < std::min(n_checked, n_right + 1); j++) {
        leads[g.classes[j]].learn(j < n_right, 1.0f, n_tries_of_all);
    }
    if (n_checked > 0) {
        first.learn(n_right > 0, 1.0f, n_tries_of_all);
    }
    n_cells[g.slot] = g.n_fed > 0 || g.n > 0 ? g.n_text + std::min(n_right, g.n_fed) : n_cells[g.slot];
}

void draft_model::keep(int32_t slot, int32_t n_same) noexcept {
    n_cells[slot] = std::min(n_cells[slot], n_same);
    missed_ns[slot] = 0;
}

#include "edit.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

// ---- checking and copying ----

bool are_penalties_sane(const cbatch_sampling & s) {
    return std::isfinite(s.repeat_penalty) && s.repeat_penalty > 0.0f && std::isfinite(1.0f / s.repeat_penalty) &&
           std::isfinite(s.presence_penalty) && std::isfinite(s.frequency_penalty) && s.repeat_last_n >= 0 &&
           s.repeat_last_n <= CBATCH_LAST_N_MAX;
}

bool is_dry_sane(const cbatch_sampling & s) {
    return std::isfinite(s.dry_multiplier) && s.dry_multiplier >= 0.0f && std::isfinite(s.dry_base) &&
           s.dry_allowed_length >= 0 && s.dry_last_n >= 0 && s.dry_last_n <= CBATCH_LAST_N_MAX;
}

bool are_counts_sane(const cbatch_binding & b) {
    return b.n_stop >= 0 && b.n_history >= 0 && b.n_top >= 0 && b.n_top <= CBATCH_TOP_MAX && b.sampling.n_bias >= 0 &&
           b.sampling.n_breakers >= 0;
}

bool are_tokens(const int32_t * tokens, int32_t n, int32_t n_vocab) {
    for (int32_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            return false;
        }
    }
    return true;
}

int32_t copy_bias(const cbatch_sampling & s, int32_t n_vocab, edits * e) {
    for (int32_t i = 0; i < s.n_bias; i++) {
        const cbatch_bias & b = s.bias[i];
        if (!are_tokens(&b.token, 1, n_vocab)) {
            return CBATCH_BAD_TOKEN;
        }
        if (!std::isfinite(b.bias) && b.bias != -INFINITY) {
            return CBATCH_BAD_SAMPLING;
        }
        e->bias.push_back(b);
    }
    return CBATCH_OK;
}

// Source: src/llama-sampler.cpp, llama_sampler_penalties: is_disabled.
void copy_penalties(const cbatch_sampling & s, edits * e) {
    e->repeat_penalty = s.repeat_penalty;
    e->presence_penalty = s.presence_penalty;
    e->frequency_penalty = s.frequency_penalty;
    const bool is_on = s.repeat_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
    e->repeat_last_n = is_on ? s.repeat_last_n : 0;
}

// Find where the groups begin, of which `tails` has the numbers.
bool find_groups(edits * e) {
    const int64_t n = static_cast<int64_t>(e->tails.size());
    for (int64_t i = 0; i < n;) {
        e->groups.push_back(static_cast<int32_t>(i));
        const int32_t n_tails = e->tails[i++];
        for (int32_t j = 0; j < n_tails; j++) {
            if (i >= n || e->tails[i] < 0 || e->tails[i] >= n - i) {
                return false;
            }
            i += e->tails[i] + 1;
        }
    }
    return true;
}

bool copy_breakers(const cbatch_sampling & s, edits * e) {
    const int32_t n_heads = s.n_breakers > 0 ? s.breakers[0] : 0;
    if (n_heads < 0 || n_heads > (s.n_breakers - 1) / 2) {
        return false;
    }
    const int32_t * pairs = s.breakers + 1;
    if (s.n_breakers > 0) {
        e->tails.assign(pairs + 2 * static_cast<int64_t>(n_heads), s.breakers + s.n_breakers);
    }
    if (!find_groups(e)) {
        return false;
    }
    e->heads.reserve(n_heads);
    for (int32_t i = 0; i < n_heads; i++) {
        const dry_head head = {pairs[2 * i], pairs[2 * i + 1]};
        const bool is_next = i == 0 || head.token > e->heads.back().token;
        if (!is_next || head.i_group < 0 || head.i_group >= static_cast<int32_t>(e->groups.size())) {
            return false;
        }
        e->heads.push_back(head);
    }
    return true;
}

// Source: src/llama-sampler.cpp, llama_sampler_init_dry: dry_enabled.
bool copy_dry(const cbatch_sampling & s, edits * e) {
    const bool is_on = s.dry_multiplier > 0.0f && s.dry_base >= 1.0f && s.dry_last_n > 0;
    if (!is_on) {
        return true;
    }
    e->dry_multiplier = s.dry_multiplier;
    e->dry_base = s.dry_base;
    e->dry_allowed_length = s.dry_allowed_length;
    e->dry_last_n = s.dry_last_n;
    return copy_breakers(s, e);
}

// ---- the history ----

void push(edits * e, int32_t token) {
    if (e->n_tokens == 2 * e->n_window) {
        memcpy(e->tokens.get(), e->tokens.get() + e->n_window, e->n_window * sizeof(int32_t));
        e->n_tokens = e->n_window;
    }
    e->tokens[e->n_tokens++] = token;
}

void allocate(edits * e) {
    e->n_window = std::max(e->repeat_last_n, e->dry_last_n);
    e->tokens.reset(new int32_t[2 * static_cast<size_t>(e->n_window)]);
    e->undo.reset(new edit_undo[e->bias.size() + 2 * static_cast<size_t>(e->n_window)]);
    e->repeats.reset(new int32_t[e->dry_last_n]);
}

// ---- changing logits ----

void change(edits * e, float * logits, int32_t token, float logit) {
    e->undo[e->n_undo++] = {token, logits[token]};
    logits[token] = logit;
}

void add_bias(edits * e, float * logits) {
    for (const cbatch_bias & b : e->bias) {
        change(e, logits, b.token, logits[b.token] + b.bias);
    }
}

// Source: src/llama-sampler.cpp, llama_sampler_penalties_apply.
float penalised(const edits & e, float logit, int32_t count) {
    const float repeated = logit <= 0.0f ? logit * e.repeat_penalty : logit / e.repeat_penalty;
    return repeated - (static_cast<float>(count) * e.frequency_penalty + e.presence_penalty);
}

void penalise(edits * e, float * logits, int32_t * counts) {
    const int32_t n = std::min(e->repeat_last_n, e->n_tokens);
    const int32_t * tokens = e->tokens.get() + (e->n_tokens - n);
    for (int32_t i = 0; i < n; i++) {
        counts[tokens[i]]++;
    }
    for (int32_t i = 0; i < n; i++) {
        const int32_t token = tokens[i];
        if (counts[token] > 0) {
            change(e, logits, token, penalised(*e, logits[token], counts[token]));
            counts[token] = 0;
        }
    }
}

// ---- DRY. Source: src/llama-sampler.cpp, llama_sampler_dry_apply, whose steps these are ----

// The newest tokens, counted backwards.
struct backwards {
    const int32_t * end;
    int32_t operator[](int32_t i) const { return *(end - 1 - i); }
};

// Return the tails of the breakers that begin with a token, their number first; NULL where there are none.
const int32_t * tails_of(const edits & e, int32_t token) {
    const auto is_below = [](const dry_head & h, int32_t other) { return h.token < other; };
    const auto found = std::lower_bound(e.heads.begin(), e.heads.end(), token, is_below);
    const bool is_there = found != e.heads.end() && found->token == token;
    return is_there ? e.tails.data() + e.groups[found->i_group] : nullptr;
}

bool has_tail(const int32_t * tail, int32_t n_tail, const backwards & newest, int32_t i_head) {
    for (int32_t i = 0; i < n_tail; i++) {
        if (tail[i] != newest[i_head - 1 - i]) {
            return false;
        }
    }
    return true;
}

// Return the longest repetition that no breaker interrupts.
int32_t repeat_limit(const edits & e, const backwards & newest, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t * tail = tails_of(e, newest[i]);
        const int32_t n_tails = tail != nullptr ? *tail++ : 0;
        int32_t longest = -1;
        for (int32_t j = 0; j < n_tails; j++) {
            const int32_t n_tail = *tail++;
            if (n_tail > longest && n_tail <= i && has_tail(tail, n_tail, newest, i)) {
                longest = n_tail;
            }
            tail += n_tail;
        }
        if (longest >= 0) {
            return i - longest;
        }
    }
    return n;
}

// Write how many of the newest tokens also end at each place before, by the Z-algorithm, at most `limit`.
void find_repeats(edits * e, const backwards & newest, int32_t n, int32_t limit) {
    int32_t * repeats = e->repeats.get();  // by places from the oldest on
    const int32_t last = n - 1;
    repeats[last] = 0;
    int32_t left = 0;
    int32_t right = 0;
    for (int32_t k = 1; k < n; k++) {
        if (k <= right && repeats[last - (k - left)] < right - k + 1) {
            repeats[last - k] = std::min(repeats[last - (k - left)], limit);
            continue;
        }
        int32_t end = k > right ? k : right + 1;
        while (end < n && newest[end] == newest[end - k]) {
            end++;
        }
        repeats[last - k] = std::min(end - k, limit);
        if (k <= right || end > k) {
            left = k;
            right = end - 1;
        }
    }
}

bool is_breaker(const edits & e, int32_t token) {
    const int32_t * tail = tails_of(e, token);
    const int32_t n_tails = tail != nullptr ? *tail++ : 0;
    for (int32_t j = 0; j < n_tails; j++) {
        const int32_t n_tail = *tail++;
        if (n_tail == 0) {
            return true;
        }
        tail += n_tail;
    }
    return false;
}

float dry_penalty(const edits & e, int32_t n_repeated) {
    int32_t exponent_max = 0;
    if (e.dry_base > 1.000001f) {
        exponent_max = static_cast<int32_t>(88.7228391f / std::log(e.dry_base));
    }
    int32_t exponent = n_repeated - e.dry_allowed_length;
    if (exponent_max > 0 && exponent > exponent_max) {
        exponent = exponent_max;
    }
    return static_cast<float>(static_cast<double>(e.dry_multiplier) *
                              std::pow(static_cast<double>(e.dry_base), static_cast<double>(exponent)));
}

// Lower every token that would make a repetition longer.   counts: the longest repetition that a token ends, and 1.
void lower_repeats(edits * e, float * logits, int32_t * counts, const backwards & newest, int32_t n) {
    const int32_t * repeats = e->repeats.get();
    for (int32_t i = 0; i < n - 1; i++) {
        if (repeats[i] >= e->dry_allowed_length) {
            int32_t & longest = counts[newest[n - 2 - i]];
            longest = std::max(longest, repeats[i] + 1);
        }
    }
    for (int32_t i = 0; i < n - 1; i++) {
        const int32_t token = newest[n - 2 - i];
        if (counts[token] > 0) {
            if (!is_breaker(*e, token)) {
                change(e, logits, token, logits[token] - dry_penalty(*e, counts[token] - 1));
            }
            counts[token] = 0;
        }
    }
}

void apply_dry(edits * e, float * logits, int32_t * counts) {
    const int32_t n = std::min(e->dry_last_n, e->n_tokens);
    if (n <= e->dry_allowed_length) {
        return;
    }
    const backwards newest = {e->tokens.get() + e->n_tokens};
    const int32_t limit = repeat_limit(*e, newest, n);
    if (limit < e->dry_allowed_length) {
        return;
    }
    find_repeats(e, newest, n, limit);
    lower_repeats(e, logits, counts, newest, n);
}

}  // namespace

int32_t edits_init(const cbatch_binding & binding, int32_t n_vocab, edits * e) {
    const cbatch_sampling & s = binding.sampling;
    if (!are_counts_sane(binding) || !are_penalties_sane(s) || !is_dry_sane(s)) {
        return CBATCH_BAD_SAMPLING;
    }
    if (!are_tokens(binding.history, binding.n_history, n_vocab)) {
        return CBATCH_BAD_TOKEN;
    }
    const int32_t code = copy_bias(s, n_vocab, e);
    if (code != CBATCH_OK) {
        return code;
    }
    copy_penalties(s, e);
    if (!copy_dry(s, e)) {
        return CBATCH_BAD_SAMPLING;
    }
    allocate(e);
    const int32_t n_kept = std::min(e->n_window, binding.n_history);
    for (int32_t i = 0; i < n_kept; i++) {
        push(e, binding.history[binding.n_history - n_kept + i]);
    }
    return CBATCH_OK;
}

bool edits_any(const edits & e) noexcept {
    return e.n_window > 0 || !e.bias.empty();
}

void edits_feed(edits * e, const cbatch_span & span, const int32_t * tokens) noexcept {
    const int32_t end = span.start + span.n_tokens;
    if (e->n_window == 0) {
        return;
    }
    if (!e->is_placed) {
        e->is_placed = span.has_output != 0 && span.has_output != CBATCH_SILENT_ROW;
        e->end = end;
        return;
    }
    for (int32_t i = std::max(span.start, e->end); i < end; i++) {
        push(e, tokens[i - span.start]);
    }
    e->end = std::max(e->end, end);
}

void edits_apply(edits * e, float * logits, int32_t * counts) noexcept {
    e->n_undo = 0;
    add_bias(e, logits);
    if (e->repeat_last_n > 0) {
        penalise(e, logits, counts);
    }
    if (e->dry_last_n > 0) {
        apply_dry(e, logits, counts);
    }
}

void edits_undo(edits * e, float * logits) noexcept {
    while (e->n_undo > 0) {
        const edit_undo & u = e->undo[--e->n_undo];
        logits[u.token] = u.logit;
    }
}

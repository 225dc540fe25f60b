// The stepper: fills llama_batch, decodes, samples all rows, and feeds the sampled tokens to the next step.
#include "cbatch.h"
#include "batch.h"
#include "draft.h"
#include "draft_model.h"
#include "row.h"
#include "sample.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace {

// Below this estimate of the work in all rows one thread samples them all. The team is ready, as its threads still spin;
// but rows read on another core slow the next decode that writes there. Measured on two cores, 16 rows of 32,000
// logits, default chain: sampling 0.13 → 0.08 ms, decode +0.00 … +0.09 ms by the cores' places; with top_p alone
// sampling 2.2 → 1.1 ms.
constexpr int64_t team_from_ps = 200 * INT64_C(1000000);

// Of one logit of a row that is scored: its exponential, in picoseconds, as sample_cost_ps of a rule.
constexpr int64_t score_cost_ps = 500;

// Source: include/llama.h at llama_decode: below −1 the computation failed.
constexpr int32_t code_threw = -3;

// A step with drafts counts as slow at most so many times as usual: what else the machine does says nothing of drafts.
constexpr double slow_step = 4.0;

// What pad rows compute after their first step: any token does.
constexpr int32_t pad_token = 0;

struct binding {
    bool is_bound = false;
    int32_t output_origin = 0;
    row_binding row;
    int64_t cost_ps = 0;  // of one logit under the rule
    std::vector<int32_t> stop;  // ascending: there may be as many as tokens
    std::unique_ptr<drafts> next;  // NULL where it has no drafts
    bool has_model_drafts = false;
    int32_t last_token = CBATCH_NO_TOKEN;  // sampled last, which has no cell yet
};

// One row to sample in the current step, and those of the drafts behind it.
struct output_row {
    int32_t i_span;
    int32_t i_mask;     // index among the spans with an output, in masks and rows
    int32_t i_token;    // index in the batch
    int32_t i_output;
    float * logits;
    int32_t n_drafts;
    int32_t i_draft;    // of the first one in draft_tokens and draft_rows; each is in the batch behind the one before
    int32_t i_draft_token;  // index of the first draft in the batch
    int32_t n_sampled;
};

// One row of the current step whose next token is given.
struct score_row {
    int32_t i_token;  // index in the batch
    int32_t target;
    int32_t n_top;
    const float * logits;
    cbatch_logprobs * report;
};

int64_t system_clock_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

struct cbatch_stepper {
    cbatch_api api;
    void * ctx;
    cbatch_sizes sizes;
    const sample_code * code;
    int32_t n_threads;  // that sample now

    std::vector<binding> bindings;  // (n_slots)

    token_batch batch;

    // The current step.
    std::vector<cbatch_span> spans;  // (n_slots)
    std::vector<int32_t> fed;          // (n_slots) the tokens sampled last
    std::vector<output_row> rows;      // (n_slots)
    std::vector<score_row> scores;     // (n_scores)
    std::vector<float> chances;        // (n_slots, n_drafts_each) that so many drafts of a span are right
    std::vector<int32_t> n_drafts;    // (n_slots) of each span
    std::vector<int32_t> draft_tokens; // (n_scores) of all spans, one after another
    std::vector<float *> draft_rows;   // (n_scores)
    int32_t n_spans;
    int32_t n_rows;
    int32_t n_scores;
    int32_t n_all_drafts;
    std::vector<guesses> guessed;      // what the draft model made for spans of the step
    std::vector<int32_t> i_guessed;    // (n_slots) of each span, where its drafts are the model's; else −1
    int64_t draft_ns;                  // that the draft model took
    int64_t catch_up_ns;               // of that, not for drafts of this step
    bool may_draft;                    // whether the step may have drafts, and what it takes is learned
    int32_t n_steps;                   // the caller's: also the most tokens of one span
    int32_t n_drafts_most;            // the caller's
    bool is_even;                      // the caller's
    bool has_all;                      // the caller's
    int32_t * out;                     // the caller's
    int32_t * n_out;                   // the caller's
    int32_t * drafted;                 // the caller's, or NULL
    cbatch_logprobs * logprobs;        // the caller's, or NULL
    const uint32_t * const * masks;    // the caller's, or NULL
    float ** given_rows;               // the caller's, or NULL
    void (*await_rows)(void);          // the caller's, or NULL
    const cbatch_scoring * scoring;    // the caller's, or NULL

    std::unique_ptr<char, decltype(&free)> scratch_memory{nullptr, &free};
    std::vector<sample_scratch> scratch;  // (n_threads)
    hit_rate match_rates[n_match_kinds];   // how often drafts were right, by where and how long they matched
    int32_t n_before;                       // tokens of the step before
    bool had_drafts;                        // whether that step had some
    bool had_guesses;                       // whether some of them were the draft model's
    int32_t n_drafting;                     // steps that had drafts, or were to have some
    width_costs costs;                      // of steps in which every span is one token, or one and drafts
    draft_model model;
    std::vector<draft_gain> gains;          // (n_slots + 1) by the number of spans

    std::atomic<int32_t> i_next_row;
    std::atomic<int32_t> i_next_thread;
    std::atomic<bool> is_interrupted;
};

namespace {

// ---- init and bind ----

bool is_usable(const cbatch_api * api) {
    return api != nullptr && api->size == sizeof(cbatch_api) && api->abi == CBATCH_ABI_VERSION &&
           api->decode != nullptr && api->get_logits_ith != nullptr;
}

bool are_positive(const cbatch_sizes & s) {
    return s.n_slots >= 1 && s.n_batch >= 1 && s.n_vocab >= 1 && s.n_threads >= 1 && s.n_scores >= 0;
}

void allocate_scratch(cbatch_stepper * s) {
    const int64_t n_bytes = (sample_scratch_size(s->sizes.n_vocab) + 127) / 64 * 64;  // threads on lines of their own
    // calloc: pages that no row needs are never touched
    s->scratch_memory.reset(static_cast<char *>(calloc(s->sizes.n_threads, n_bytes)));
    if (s->scratch_memory == nullptr) {
        throw std::bad_alloc();
    }
    for (int32_t i = 0; i < s->sizes.n_threads; i++) {
        s->scratch.push_back(sample_scratch_at(s->scratch_memory.get() + i * n_bytes, s->sizes.n_vocab));
    }
}

void allocate(cbatch_stepper * s) {
    s->bindings.resize(s->sizes.n_slots);
    s->spans.resize(s->sizes.n_slots);
    s->fed.resize(s->sizes.n_slots);
    s->rows.resize(s->sizes.n_slots);
    s->scores.resize(s->sizes.n_scores);
    s->chances.resize(static_cast<size_t>(s->sizes.n_slots) * n_drafts_each);
    s->n_drafts.resize(s->sizes.n_slots);
    s->i_guessed.resize(s->sizes.n_slots);
    s->draft_tokens.resize(s->sizes.n_scores);
    s->draft_rows.resize(s->sizes.n_scores);
    s->costs.allocate(s->sizes.n_slots + s->sizes.n_scores);
    s->gains.resize(static_cast<size_t>(s->sizes.n_slots) + 1);
    s->batch.allocate(s->sizes.n_batch);
    s->guessed.reserve(s->sizes.n_slots);
    allocate_scratch(s);
}

bool has_slot(const cbatch_stepper & s, int32_t slot) {
    return slot >= 0 && slot < s.sizes.n_slots;
}

bool is_pad(const cbatch_span & c) {
    return c.has_output == CBATCH_PAD_ROW;
}

bool is_sampled(const cbatch_span & c) {
    return c.has_output != 0 && !is_pad(c) && c.has_output != CBATCH_SILENT_ROW;
}

bool is_stop(const binding & b, int32_t token) {
    return token == CBATCH_BROKEN_ROW || token == CBATCH_EMPTY_ROW ||
           std::binary_search(b.stop.begin(), b.stop.end(), token);
}

// ---- checking a run before anything is done ----

int32_t check_span(const cbatch_stepper & s, const cbatch_span & c, int32_t last_slot, int32_t n_steps) {
    if (!has_slot(s, c.slot) || c.slot <= last_slot) {
        return CBATCH_BAD_SLOT;
    }
    const int64_t end = static_cast<int64_t>(c.start) + c.n_tokens + n_steps;
    if (c.n_tokens < 1 || c.start < 0 || end > INT32_MAX || (is_pad(c) && c.n_tokens > 1)) {
        return CBATCH_BAD_SPAN;
    }
    if (is_pad(c)) {
        return CBATCH_OK;
    }
    if (!is_sampled(c)) {
        return n_steps > 1 ? CBATCH_BAD_STEPS : CBATCH_OK;
    }
    return s.bindings[c.slot].is_bound ? CBATCH_OK : CBATCH_NOT_BOUND;
}

int32_t check_tokens(const cbatch_stepper & s, const int32_t * tokens, int64_t n_tokens) {
    if (n_tokens > s.sizes.n_batch) {
        return CBATCH_BATCH_FULL;
    }
    for (int64_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0 || tokens[i] >= s.sizes.n_vocab) {
            return CBATCH_BAD_TOKEN;
        }
    }
    return CBATCH_OK;
}

// Spans are checked already.
int32_t check_scoring(const cbatch_stepper & s, const cbatch_span * spans, int32_t n_spans,
                      const cbatch_scoring & scoring, int32_t n_steps) {
    int64_t n_all = 0;
    for (int32_t i = 0; i < n_spans; i++) {
        const int32_t n_most = spans[i].n_tokens - is_sampled(spans[i]);
        const int32_t n_top = scoring.n_top[i];
        if (scoring.n_targets[i] < 0 || scoring.n_targets[i] > n_most || n_top < 0 || n_top > CBATCH_TOP_MAX) {
            return CBATCH_BAD_SCORES;
        }
        n_all += scoring.n_targets[i];
    }
    if (n_all > s.sizes.n_scores || n_steps > 1) {
        return CBATCH_BAD_SCORES;
    }
    for (int64_t i = 0; i < n_all; i++) {
        if (scoring.targets[i] < 0 || scoring.targets[i] >= s.sizes.n_vocab) {
            return CBATCH_BAD_SCORES;
        }
    }
    return CBATCH_OK;
}

int32_t check_run(const cbatch_stepper & s, const cbatch_span * spans, int32_t n_spans, const int32_t * tokens,
                  int32_t n_steps, int64_t budget_us, bool is_single) {
    if (n_steps < 1 || budget_us < 0 || (is_single && n_steps > 1)) {
        return CBATCH_BAD_STEPS;
    }
    if (n_spans < 1) {
        return CBATCH_BAD_SPAN;
    }
    int32_t last_slot = -1;
    int64_t n_tokens = 0;
    for (int32_t i = 0; i < n_spans; i++) {
        const int32_t code = check_span(s, spans[i], last_slot, n_steps);
        if (code != CBATCH_OK) {
            return code;
        }
        last_slot = spans[i].slot;
        n_tokens += spans[i].n_tokens;
    }
    return check_tokens(s, tokens, n_tokens);
}

// ---- one step ----

void put_token(cbatch_stepper * s, const cbatch_span & c, int32_t token, int32_t i_in_span) {
    s->batch.put(token, c.start + i_in_span, c.slot, c.has_output && i_in_span == c.n_tokens - 1);
}

int32_t target_count(const cbatch_stepper & s, int32_t i_span) {
    return s.scoring != nullptr ? s.scoring->n_targets[i_span] : 0;
}

// Score the token that was put last, where the span has a target for it.   i_target: of the span's first.
void put_score(cbatch_stepper * s, int32_t i_span, int32_t i_in_span, int32_t i_target) {
    if (i_in_span < target_count(*s, i_span)) {
        const int32_t i = i_target + i_in_span;
        const int32_t i_token = s->batch.n - 1;
        s->batch.logits[i_token] = 1;
        s->scores[s->n_scores++] = {i_token, s->scoring->targets[i], s->scoring->n_top[i_span], nullptr,
                                    s->scoring->out + i};
    }
}

void put_output(cbatch_stepper * s, int32_t i_span, int32_t i_mask) {
    const cbatch_span & c = s->spans[i_span];
    if (is_sampled(c)) {
        const int64_t end = static_cast<int64_t>(c.start) + c.n_tokens;
        const int32_t i_output = static_cast<int32_t>(end - s->bindings[c.slot].output_origin);
        s->rows[s->n_rows++] = {i_span, i_mask, s->batch.n - 1, i_output, nullptr, 0, 0, 0, 0};
    }
}

// Feed the tokens of spans to what their slots know of themselves.
void feed_histories(cbatch_stepper * s, const int32_t * tokens) {
    int32_t offset = 0;
    for (int32_t i = 0; i < s->n_spans; i++) {
        const cbatch_span & c = s->spans[i];
        if (!is_pad(c)) {
            binding & b = s->bindings[c.slot];
            edits_feed(&b.row.changes, c, tokens + offset);
            if (b.next != nullptr) {
                b.next->feed(c.start, tokens + offset, c.n_tokens, is_sampled(c), s->match_rates);
            }
        }
        offset += c.n_tokens;
    }
}

// Whether every span is one token that is sampled: what such steps take is learned, and they may have drafts.
bool is_plain(const cbatch_stepper & s) {
    for (int32_t i = 0; i < s.n_spans; i++) {
        if (s.spans[i].n_tokens > 1 || !is_sampled(s.spans[i])) {
            return false;
        }
    }
    return s.masks == nullptr && s.given_rows == nullptr && s.scoring == nullptr;
}

// Fill the chances of one span's drafts. A stop token is no draft: what is behind it is never sampled.
void estimate_span(const cbatch_stepper & s, int32_t i_span, int32_t n_each, float * chances) {
    const binding & b = s.bindings[s.spans[i_span].slot];
    std::fill(chances, chances + n_each, 0.0f);
    const int32_t n = b.next != nullptr ? b.next->n_drafts(n_each) : 0;
    float all_right = 1.0f;
    int32_t made[n_drafts_each];
    for (int32_t j = 0; j < n; j++) {
        made[j] = b.next->draft(j, made);
        if (is_stop(b, made[j])) {
            return;
        }
        all_right *= b.next->chance(s.match_rates, j);
        chances[j] = all_right;
    }
}

// Return how many drafts each span may have.
int32_t most_drafts(const cbatch_stepper & s) {
    int32_t n_each = std::min(s.n_drafts_most, n_drafts_each);
    for (int32_t i = 0; i < s.n_spans; i++) {
        n_each = std::min(n_each, s.n_steps - s.n_out[i] - 1);
    }
    return n_each;
}

// Have the draft model guess for spans whose own drafts are less likely, and take its chances for them.
void guess_by_model(cbatch_stepper * s, int32_t n_each) {
    draft_model & model = s->model;
    const double step_ns = s->has_all ? 0.0 : s->costs.cost(s->n_spans);
    const auto is_better = [&](int32_t i) {
        const binding & b = s->bindings[s->spans[i].slot];
        const float least = s->has_all ? FLT_MIN : model.usual_chance();
        return b.has_model_drafts && !b.next->is_lost && s->chances[i * n_each] < least;
    };
    int32_t n_better = 0;
    for (int32_t i = 0; i < s->n_spans; i++) {
        n_better += is_better(i);
    }
    const int32_t k = s->has_all ? n_each : model.choose(s->n_spans, n_better, n_each, s->is_even, s->costs);
    if (n_better == 0 || k == 0) {
        return;
    }
    const int64_t start_ns = s->api.clock_ns();
    for (int32_t i = 0; i < s->n_spans; i++) {
        const binding & b = s->bindings[s->spans[i].slot];
        if (model.is_on() && is_better(i) && model.knows(s->api, s->spans[i].slot, b.next->text.tokens, step_ns)) {
            guesses g;
            g.slot = s->spans[i].slot;
            g.text = &b.next->text.tokens;
            g.stop = &b.stop;
            g.n_text = static_cast<int32_t>(b.next->text.tokens.size());
            g.is_open = true;
            s->i_guessed[i] = static_cast<int32_t>(s->guessed.size());
            s->guessed.push_back(g);
        }
    }
    s->catch_up_ns = s->api.clock_ns() - start_ns;
    model.owed_ns += s->catch_up_ns;
    if (model.is_on() && !s->guessed.empty()) {
        model.guess(s->api, &s->guessed, k);
    }
    s->draft_ns = s->api.clock_ns() - start_ns;
    for (int32_t i = 0; i < s->n_spans; i++) {
        if (s->i_guessed[i] >= 0) {
            const guesses & g = s->guessed[s->i_guessed[i]];
            std::fill(&s->chances[i * n_each], &s->chances[i * n_each] + n_each, 0.0f);
            std::copy(g.chances, g.chances + g.n, &s->chances[i * n_each]);
        }
    }
}

// Write down the drafts of a span, as many as were decided on.
void write_drafts(cbatch_stepper * s, int32_t i_span, int32_t n_each) {
    const drafts * next = s->bindings[s->spans[i_span].slot].next.get();
    const int32_t i_guessed = s->i_guessed[i_span];
    int32_t * own = s->draft_tokens.data() + s->n_all_drafts;
    for (int32_t j = 0; j < s->n_drafts[i_span]; j++) {
        const bool is_made = s->chances[i_span * n_each + j] > 0.0f;
        own[j] = !is_made ? pad_token : i_guessed >= 0 ? s->guessed[i_guessed].tokens[j] : next->draft(j, own);
    }
    s->n_all_drafts += s->n_drafts[i_span];
}

// Decide how many drafts stand behind each span, and write them down.
void make_drafts(cbatch_stepper * s) {
    s->n_all_drafts = 0;
    s->draft_ns = 0;
    s->catch_up_ns = 0;
    s->guessed.clear();
    std::fill(s->n_drafts.begin(), s->n_drafts.begin() + s->n_spans, 0);
    std::fill(s->i_guessed.begin(), s->i_guessed.begin() + s->n_spans, -1);
    const bool is_asked = s->may_draft && (s->has_all || s->gains[s->n_spans].allows());
    const int32_t n_each = is_asked ? most_drafts(*s) : 0;
    if (n_each < 1) {
        return;
    }
    for (int32_t i = 0; i < s->n_spans; i++) {
        estimate_span(*s, i, n_each, s->chances.data() + i * n_each);
    }
    if (s->model.is_on() && (s->has_all || s->model.gains[s->n_spans].allows())) {
        guess_by_model(s, n_each);
    }
    const int32_t n_all = std::min(s->sizes.n_scores, s->sizes.n_batch - s->n_spans);
    const draft_limits limits = {n_each, n_all, s->is_even, s->has_all};
    choose_drafts(s->chances.data(), s->n_spans, limits, s->costs, s->n_drafts.data());
    const bool has_any = *std::max_element(s->n_drafts.begin(), s->n_drafts.begin() + s->n_spans) > 0;
    if (has_any && !s->has_all && s->n_drafting++ % n_between_plain >= n_between_plain - n_plain) {
        std::fill(s->n_drafts.begin(), s->n_drafts.begin() + s->n_spans, 0);
    }
    for (int32_t i = 0; i < s->n_spans; i++) {
        write_drafts(s, i, n_each);
    }
}

// Put the drafts behind a row, each with an output of its own.
void put_drafts(cbatch_stepper * s, output_row * row, int32_t i_draft) {
    const cbatch_span & c = s->spans[row->i_span];
    row->n_drafts = s->n_drafts[row->i_span];
    row->i_draft = i_draft;
    row->i_draft_token = s->batch.n;
    for (int32_t j = 0; j < row->n_drafts; j++) {
        s->batch.put(s->draft_tokens[i_draft + j], c.start + 1 + j, c.slot, true);
    }
}

// Fill the batch: first every span's first token, then what remains of the spans, both by ascending slot. llama.cpp
// cuts a batch into runs of consecutive ascending sequences with equally many tokens, so this order keeps the decoding
// rows of one step in one run whatever prompts stand between them.
void fill_batch(cbatch_stepper * s, const int32_t * tokens) {
    s->batch.n = 0;
    s->n_rows = 0;
    s->n_scores = 0;
    int32_t offset = 0;
    int32_t i_mask = 0;
    int32_t i_target = 0;
    for (int32_t i = 0; i < s->n_spans; i++) {
        const cbatch_span & c = s->spans[i];
        put_token(s, c, tokens[offset], 0);
        put_score(s, i, 0, i_target);
        offset += c.n_tokens;
        i_target += target_count(*s, i);
        if (c.n_tokens == 1) {
            put_output(s, i, i_mask);
        }
        i_mask += is_sampled(c);
    }
    offset = 0;
    i_mask = 0;
    i_target = 0;
    for (int32_t i = 0; i < s->n_spans; i++) {
        const cbatch_span & c = s->spans[i];
        for (int32_t j = 1; j < c.n_tokens; j++) {
            put_token(s, c, tokens[offset + j], j);
            put_score(s, i, j, i_target);
        }
        offset += c.n_tokens;
        i_target += target_count(*s, i);
        if (c.n_tokens > 1) {
            put_output(s, i, i_mask);
        }
        i_mask += is_sampled(c);
    }
    int32_t i_draft = 0;
    for (int32_t i = 0; i < s->n_rows && s->n_all_drafts > 0; i++) {
        put_drafts(s, &s->rows[i], i_draft);
        i_draft += s->rows[i].n_drafts;
    }
}

int32_t decode(cbatch_stepper * s) {
    try {
        const int32_t code = s->api.decode(s->ctx, s->batch.view());
        if (code == 0 && s->n_rows + s->n_scores == 0 && s->api.synchronize != nullptr) {
            s->api.synchronize(s->ctx);
        }
        return code;
    } catch (...) {
        return code_threw;
    }
}

// Fetch all rows on this one thread: the first fetch may reorder them.
void fetch_rows(cbatch_stepper * s) {
    for (int32_t i = 0; i < s->n_rows; i++) {
        const output_row & row = s->rows[i];
        s->rows[i].logits = s->api.get_logits_ith(s->ctx, row.i_token);
        for (int32_t j = 0; j < row.n_drafts; j++) {
            s->draft_rows[row.i_draft + j] = s->api.get_logits_ith(s->ctx, row.i_draft_token + j);
        }
    }
    for (int32_t i = 0; i < s->n_scores; i++) {
        s->scores[i].logits = s->api.get_logits_ith(s->ctx, s->scores[i].i_token);
    }
    if (s->given_rows != nullptr) {
        for (int32_t i = 0; i < s->n_rows; i++) {
            s->given_rows[s->rows[i].i_mask] = s->rows[i].logits;
        }
    }
}

// Sample one row of logits of a span: its `i_in_step`-th of this step.
int32_t sample_logits(cbatch_stepper * s, const output_row & row, int32_t i_in_step, float * logits,
                      const sample_scratch & scratch) {
    const int64_t i = static_cast<int64_t>(row.i_span) * s->n_steps + s->n_out[row.i_span] + i_in_step;
    cbatch_logprobs * report = s->logprobs != nullptr ? s->logprobs + i : nullptr;
    int32_t token = CBATCH_BROKEN_ROW;
    if (logits == nullptr && report != nullptr) {
        *report = {};
        report->logprob = NAN;
    }
    if (logits != nullptr) {
        const uint32_t * mask = s->masks != nullptr ? s->masks[row.i_mask] : nullptr;
        float * given = s->given_rows != nullptr ? s->given_rows[row.i_mask] : logits;
        const row_task task = {logits, given, s->sizes.n_vocab, mask, row.i_output + i_in_step, report, nullptr};
        token = row_sample(*s->code, &s->bindings[s->spans[row.i_span].slot].row, task, scratch);
    }
    s->out[i] = token;
    return token;
}

// Sample a row, and those of its drafts as long as they are what was sampled.
void sample_one(cbatch_stepper * s, int32_t i_row, const sample_scratch & scratch) {
    output_row & row = s->rows[i_row];
    binding & b = s->bindings[s->spans[row.i_span].slot];
    int32_t token = sample_logits(s, row, 0, row.logits, scratch);
    row.n_sampled = 1;
    for (int32_t j = 0; j < row.n_drafts; j++) {
        if (token != s->draft_tokens[row.i_draft + j] || is_stop(b, token)) {
            return;
        }
        const cbatch_span fed = {s->spans[row.i_span].slot, s->spans[row.i_span].start + 1 + j, 1, 1};
        edits_feed(&b.row.changes, fed, &token);
        token = sample_logits(s, row, 1 + j, s->draft_rows[row.i_draft + j], scratch);
        row.n_sampled++;
    }
}

void score_one(cbatch_stepper * s, int32_t i_score, const sample_scratch & scratch) {
    const score_row & row = s->scores[i_score];
    row_score(*s->code, row.logits, s->sizes.n_vocab, row.target, row.n_top, scratch, row.report);
}

// What each thread of the team runs: rows are handed out one at a time, those to sample first.
void sample_share(void * data) {
    cbatch_stepper * s = static_cast<cbatch_stepper *>(data);
    const int32_t i_thread = s->i_next_thread.fetch_add(1, std::memory_order_relaxed);
    if (i_thread >= s->n_threads) {
        return;
    }
    for (;;) {
        const int32_t i = s->i_next_row.fetch_add(1, std::memory_order_relaxed);
        if (i >= s->n_rows + s->n_scores) {
            return;
        }
        if (i < s->n_rows) {
            sample_one(s, i, s->scratch[i_thread]);
        } else {
            score_one(s, i - s->n_rows, s->scratch[i_thread]);
        }
    }
}

bool deserves_team(const cbatch_stepper & s) {
    if (s.api.gomp_parallel == nullptr || s.n_threads == 1 || s.n_rows + s.n_scores < 2) {
        return false;
    }
    int64_t work_ps = s.n_scores * score_cost_ps * s.sizes.n_vocab;
    for (int32_t i = 0; i < s.n_rows; i++) {
        const int64_t row_ps = s.sizes.n_vocab * s.bindings[s.spans[s.rows[i].i_span].slot].cost_ps;
        work_ps += row_ps * (1 + s.rows[i].n_drafts);
    }
    return work_ps >= team_from_ps;
}

// The team is the one that just decoded: its threads still spin on their cores.
void sample_rows(cbatch_stepper * s) {
    s->i_next_row.store(0, std::memory_order_relaxed);
    s->i_next_thread.store(0, std::memory_order_relaxed);
    if (deserves_team(*s)) {
        s->api.gomp_parallel(sample_share, s, static_cast<unsigned>(s->n_threads), 0);
    } else {
        sample_share(s);
    }
}

// ---- from step to step ----

// Return the place in a report of where a span's drafts come from.
int32_t source_of(const cbatch_stepper & s, int32_t i_span) {
    const drafts * next = s.bindings[s.spans[i_span].slot].next.get();
    return s.i_guessed[i_span] >= 0 ? 2 : next != nullptr && next->is_of_group ? 1 : 0;
}

void count_drafts(cbatch_stepper * s, const output_row & row, int32_t source, cbatch_report * report) {
    report->n_drafts[source] += row.n_drafts;
    report->n_accepted[source] += row.n_sampled - 1;
    if (s->drafted != nullptr) {
        int32_t * own = s->drafted + static_cast<int64_t>(row.i_span) * 6;
        own[source] += row.n_drafts;
        own[3 + source] += row.n_sampled - 1;
    }
}

// Count what was sampled, and take back the cells of drafts that were wrong; return whether a run ends here.
bool take_sampled(cbatch_stepper * s, cbatch_report * report) {
    bool is_over = false;
    for (int32_t i = 0; i < s->n_rows; i++) {
        const output_row & row = s->rows[i];
        const cbatch_span & c = s->spans[row.i_span];
        binding & b = s->bindings[c.slot];
        const int32_t * sampled = s->out + static_cast<int64_t>(row.i_span) * s->n_steps + s->n_out[row.i_span];
        const int32_t n_accepted = row.n_sampled - 1;
        const int32_t end = c.start + c.n_tokens + n_accepted;
        if (n_accepted < row.n_drafts) {
            s->api.memory_seq_rm(s->api.get_memory(s->ctx), c.slot, end, -1);
        }
        const int32_t source = source_of(*s, row.i_span);
        if (n_accepted > 0 && b.next != nullptr) {  // rows that fill an even step up may be right, too
            b.next->feed(end - n_accepted, sampled, n_accepted, true, s->match_rates);
        }
        b.last_token = sampled[n_accepted];
        const int32_t i_guessed = s->i_guessed[row.i_span];
        if (i_guessed >= 0) {
            const guesses & g = s->guessed[i_guessed];
            s->model.learn(g, std::min(row.n_drafts, g.n), n_accepted);
        }
        if (b.next != nullptr) {
            count_drafts(s, row, source, report);
        }
        s->n_out[row.i_span] += row.n_sampled;
        is_over |= s->n_out[row.i_span] >= s->n_steps || is_stop(b, sampled[n_accepted]);
    }
    return is_over;
}

// Turn each span into the token that it just sampled, or a pad row's, at the next position.
void feed(cbatch_stepper * s) {
    for (int32_t i = 0; i < s->n_spans; i++) {
        cbatch_span & c = s->spans[i];
        c.start += c.n_tokens;
        c.n_tokens = 1;
        s->fed[i] = pad_token;
    }
    for (int32_t i = 0; i < s->n_rows; i++) {
        const output_row & row = s->rows[i];
        s->spans[row.i_span].start += row.n_sampled - 1;
        s->fed[row.i_span] =
            s->out[static_cast<int64_t>(row.i_span) * s->n_steps + s->n_out[row.i_span] - 1];
    }
}

// Do one step and add it to the report; return whether it was done.
bool step(cbatch_stepper * s, const int32_t * tokens, cbatch_report * report) {
    const int64_t start_ns = s->api.clock_ns();
    feed_histories(s, tokens);
    s->may_draft = s->n_drafts_most > 0 && is_plain(*s);
    make_drafts(s);
    fill_batch(s, tokens);
    report->code = decode(s);
    if (report->code == 0) {
        fetch_rows(s);
    }
    const int64_t decoded_ns = s->api.clock_ns();
    report->decode_ns += decoded_ns - start_ns;
    if (report->code != 0) {
        return false;
    }
    if (s->await_rows != nullptr) {
        s->await_rows();
    }
    sample_rows(s);
    report->sample_ns += s->api.clock_ns() - decoded_ns;
    if (report->n_steps++ == 0) {
        report->first_ns = report->decode_ns + report->sample_ns;
    }
    return true;
}

// Learn what drafts brought to a step that took `ns`. One in which the draft model guessed counts for it also where none
// of its guesses was worth checking.
void learn_gain(cbatch_stepper * s, int64_t ns) {
    int32_t n_sampled = 0;
    for (int32_t i = 0; i < s->n_rows; i++) {
        n_sampled += s->rows[i].n_sampled;
    }
    const double gained_ns = s->costs.cost(s->n_rows) * n_sampled / s->n_rows;
    const int64_t guess_ns = s->draft_ns - s->catch_up_ns;
    const double most_ns = slow_step * s->costs.cost(s->batch.n) + guess_ns;
    const double spent_ns = std::min(static_cast<double>(ns - s->catch_up_ns), most_ns);
    if (s->n_all_drafts > 0) {
        s->gains[s->n_rows].learn(gained_ns, spent_ns);
    }
    if (!s->guessed.empty()) {
        s->model.gains[s->n_rows].learn(gained_ns, spent_ns + s->model.owed_ns);
        s->model.owed_ns = 0;
    }
}

// Learn that a step without drafts took `ns` behind one with drafts: what it takes longer, because llama.cpp builds its
// graph anew, those drafts have cost.
void learn_new_graph(cbatch_stepper * s, int64_t ns) {
    const double usual_ns = s->costs.cost(s->n_rows);
    const double more_ns = std::clamp(ns - usual_ns, 0.0, (slow_step - 1.0) * usual_ns);
    s->gains[s->n_rows].spent_ns += more_ns;
    if (s->had_guesses) {
        s->model.gains[s->n_rows].spent_ns += more_ns;
    }
}

// Learn from a step that may have had drafts, which took `ns`. One without drafts counts only behind another of its width,
// whose graph llama.cpp uses again: so do nearly all steps where there are no drafts.
void learn_step(cbatch_stepper * s, int64_t ns) {
    if ((s->n_all_drafts > 0 || !s->guessed.empty()) && s->costs.cost(s->n_rows) > 0.0) {
        learn_gain(s, ns);
    }
    if (s->n_all_drafts > 0 || s->batch.n == s->n_before) {
        s->costs.learn(s->batch.n, ns - s->draft_ns);
    } else if (s->had_drafts) {
        learn_new_graph(s, ns - s->draft_ns);
    }
}

void run(cbatch_stepper * s, const int32_t * tokens, int32_t n_steps, int64_t budget_us, cbatch_report * report) {
    const int64_t start_ns = s->api.clock_ns();
    int64_t step_ns = start_ns;
    while (step(s, tokens, report)) {
        const bool is_over = take_sampled(s, report);
        if (s->may_draft) {
            learn_step(s, s->api.clock_ns() - step_ns);
        }
        s->n_before = s->batch.n;
        s->had_drafts = s->n_all_drafts > 0;
        s->had_guesses = s->had_drafts && !s->guessed.empty();
        const bool is_interrupted = s->is_interrupted.exchange(false);
        const bool is_late = budget_us > 0 && s->api.clock_ns() - start_ns > budget_us * 1000;
        if (report->n_steps == n_steps || is_interrupted || is_late || is_over) {
            return;
        }
        step_ns = s->api.clock_ns();
        feed(s);
        tokens = s->fed.data();
    }
}

// ---- answers of a group ----

// Return the answers of a group, or NULL for group 0. Throws std::bad_alloc.
std::shared_ptr<group_answers> answers_of(const cbatch_stepper & s, int64_t group) {
    if (group == 0) {
        return nullptr;
    }
    for (const binding & b : s.bindings) {
        if (b.next != nullptr && b.next->answers != nullptr && b.next->answers->group == group) {
            return b.next->answers;
        }
    }
    std::shared_ptr<group_answers> made = std::make_shared<group_answers>();
    made->group = group;
    return made;
}

// Return how many first tokens of a slot's sequence are those of another one.
int32_t n_same(const binding & b, const std::vector<int32_t> & others) {
    if (b.next == nullptr) {
        return 0;
    }
    const std::vector<int32_t> & tokens = b.next->text.tokens;
    const size_t n = std::min(tokens.size(), others.size());
    return static_cast<int32_t>(std::mismatch(tokens.begin(), tokens.begin() + n, others.begin()).first - tokens.begin());
}

// Keep what a slot's sequence was answered for the others of its group.
void leave(binding * b) noexcept {
    if (b->next == nullptr || b->next->answers == nullptr || b->next->is_lost) {
        return;
    }
    b->next->answers->add(b->next->text.tokens, b->output_origin, b->last_token);
}

}  // namespace

int32_t cbatch_abi_version(void) noexcept {
    return CBATCH_ABI_VERSION;
}

void cbatch_batch_layout(int32_t * out) noexcept {
    out[0] = sizeof(llama_batch);
    out[1] = offsetof(llama_batch, n_tokens);
    out[2] = offsetof(llama_batch, token);
    out[3] = offsetof(llama_batch, embd);
    out[4] = offsetof(llama_batch, pos);
    out[5] = offsetof(llama_batch, n_seq_id);
    out[6] = offsetof(llama_batch, seq_id);
    out[7] = offsetof(llama_batch, logits);
}

int32_t cbatch_stepper_init(const cbatch_api * api, void * ctx, const cbatch_sizes * sizes,
                            cbatch_stepper ** out) noexcept {
    *out = nullptr;
    if (!is_usable(api)) {
        return CBATCH_BAD_API;
    }
    const sample_code * code = sample_code_for(sizes->isa);
    if (!are_positive(*sizes) || code == nullptr) {
        return CBATCH_BAD_SIZES;
    }
    cbatch_stepper * s = nullptr;
    try {
        s = new cbatch_stepper();
        s->api = *api;
        s->api.clock_ns = api->clock_ns != nullptr ? api->clock_ns : system_clock_ns;
        s->ctx = ctx;
        s->sizes = *sizes;
        s->n_threads = sizes->n_threads;
        s->code = code;
        allocate(s);
    } catch (const std::exception &) {
        delete s;
        return CBATCH_NO_MEMORY;
    }
    *out = s;
    return CBATCH_OK;
}

void cbatch_stepper_free(cbatch_stepper * s) noexcept {
    delete s;
}

void cbatch_stepper_use(cbatch_stepper * s, void * ctx) noexcept {
    s->ctx = ctx;
    s->n_before = 0;
    s->had_drafts = s->had_guesses = false;
}

void cbatch_stepper_set_threads(cbatch_stepper * s, int32_t n_threads) noexcept {
    s->n_threads = std::clamp(n_threads, 1, s->sizes.n_threads);
}

int32_t cbatch_stepper_draft_with(cbatch_stepper * s, const cbatch_draft_context * given) noexcept {
    if (s->api.get_memory == nullptr || s->api.memory_seq_rm == nullptr) {
        return CBATCH_BAD_DRAFTS;
    }
    if (given->ctx == nullptr || given->n_batch < 1 || given->n_window < 1 || given->n_vocab < 1) {
        return CBATCH_BAD_SIZES;
    }
    cbatch_draft_context common = *given;
    common.n_vocab = std::min(given->n_vocab, s->sizes.n_vocab);
    try {
        s->model.allocate(common, s->sizes.n_slots);
    } catch (const std::exception &) {
        return CBATCH_NO_MEMORY;
    }
    for (int32_t slot = 0; slot < s->sizes.n_slots; slot++) {
        s->api.memory_seq_rm(s->api.get_memory(given->ctx), slot, 0, -1);
    }
    return CBATCH_OK;
}

int32_t cbatch_stepper_bind(cbatch_stepper * s, int32_t slot, const cbatch_binding * binding) noexcept {
    if (!has_slot(*s, slot)) {
        return CBATCH_BAD_SLOT;
    }
    try {
        struct binding b;
        const int32_t code = row_binding_init(*binding, s->sizes.n_vocab, &b.row);
        if (code != CBATCH_OK) {
            return code;
        }
        b.stop.assign(binding->stop, binding->stop + binding->n_stop);
        std::sort(b.stop.begin(), b.stop.end());
        b.output_origin = binding->output_origin;
        b.cost_ps = sample_cost_ps(b.row.rule);
        if (binding->has_drafts != 0) {
            b.next = std::make_unique<drafts>();
            b.next->text.tokens.assign(binding->history, binding->history + binding->n_history);
            b.next->is_looked_up = (binding->has_drafts & CBATCH_DRAFTS_AGAIN) != 0;
            b.next->answers = b.next->is_looked_up ? answers_of(*s, binding->draft_group) : nullptr;
            b.has_model_drafts = (binding->has_drafts & CBATCH_DRAFTS_MODEL) != 0;
        }
        b.is_bound = true;
        if (s->model.is_on()) {
            s->model.keep(slot, b.next != nullptr ? n_same(s->bindings[slot], b.next->text.tokens) : 0);
        }
        leave(&s->bindings[slot]);
        s->bindings[slot] = std::move(b);
    } catch (const std::exception &) {
        return CBATCH_NO_MEMORY;
    }
    return CBATCH_OK;
}

int32_t cbatch_stepper_shift(cbatch_stepper * s, int32_t slot, int32_t n_removed) noexcept {
    if (!has_slot(*s, slot)) {
        return CBATCH_BAD_SLOT;
    }
    binding & b = s->bindings[slot];
    b.output_origin -= n_removed;
    b.row.changes.end -= n_removed;
    if (b.next != nullptr) {
        b.next->end -= n_removed;
    }
    return CBATCH_OK;
}

int32_t cbatch_stepper_run(cbatch_stepper * s, const cbatch_span * spans, int32_t n_spans, const int32_t * tokens,
                           int32_t n_steps, int64_t budget_us, int32_t n_drafts, int32_t is_even,
                           int32_t has_all, const uint32_t * const * masks, float ** rows, void (*await_rows)(void),
                           int32_t * out, int32_t * n_out, int32_t * drafted, cbatch_logprobs * logprobs,
                           const cbatch_scoring * scoring, cbatch_report * report) noexcept {
    *report = {};
    int32_t code = check_run(*s, spans, n_spans, tokens, n_steps, budget_us, masks != nullptr || rows != nullptr);
    if (code == CBATCH_OK && scoring != nullptr) {
        code = check_scoring(*s, spans, n_spans, *scoring, n_steps);
    }
    if (n_drafts < 0 || (n_drafts > 0 && (s->api.get_memory == nullptr || s->api.memory_seq_rm == nullptr))) {
        code = CBATCH_BAD_DRAFTS;
    }
    if (code != CBATCH_OK) {
        return code;
    }
    for (int64_t i = 0; i < static_cast<int64_t>(n_steps) * n_spans; i++) {
        out[i] = CBATCH_NO_TOKEN;
    }
    for (int32_t i = 0; i < n_spans; i++) {
        s->spans[i] = spans[i];
        n_out[i] = 0;
    }
    if (drafted != nullptr) {
        std::fill(drafted, drafted + static_cast<int64_t>(n_spans) * 6, 0);
    }
    s->n_spans = n_spans;
    s->n_steps = n_steps;
    s->n_drafts_most = n_drafts;
    s->is_even = is_even != 0;
    s->has_all = has_all != 0;
    s->out = out;
    s->n_out = n_out;
    s->drafted = drafted;
    s->logprobs = logprobs;
    s->masks = masks;
    s->given_rows = rows;
    s->await_rows = await_rows;
    s->scoring = scoring;
    run(s, tokens, n_steps, budget_us, report);
    return CBATCH_OK;
}

void cbatch_stepper_interrupt(cbatch_stepper * s) noexcept {
    s->is_interrupted.store(true);
}

// A smaller model with the same vocabulary, which guesses what comes next in every slot.
#pragma once

#include "batch.h"
#include "cbatch.h"
#include "draft.h"

#include <cstdint>
#include <vector>

// Classes of guesses by how far the likeliest logit is above the next one.
constexpr int32_t n_lead_classes = 6;

// What the model guesses for one span of a step.
struct guesses {
    int32_t slot = 0;
    const std::vector<int32_t> * text = nullptr;  // the slot's tokens
    const std::vector<int32_t> * stop = nullptr;  // tokens that end it, ascending: none is guessed
    int32_t n_text = 0;       // tokens before the first guess
    int32_t n = 0;            // guesses
    int32_t n_fed = 0;        // those that have a cell
    int32_t i_token = -1;     // in the batch, whose logits give the next guess; −1 where it has none
    bool is_open = false;     // whether more are worth making
    int32_t tokens[n_drafts_each];
    int32_t classes[n_drafts_each];
    float chances[n_drafts_each];  // that so many are right
};

// Its context has the slots as sequences; the cells of each are of the slot's first tokens, at positions from 0 on.
struct draft_model {
    cbatch_draft_context given = {};  // without a context where there is none, or it failed
    std::vector<int32_t> n_cells;     // (n_slots) that are right: those behind them are removed before more are computed
    std::vector<int64_t> missed_ns;   // (n_slots) what drafts may have gained while the model did not know the slot
    token_batch batch;
    width_costs costs;      // of its steps of so many rows
    double token_ns = 0.0;  // of a token that it catches up with; 0 where unknown
    hit_rate leads[n_lead_classes];
    hit_rate first;         // of the first guesses
    std::vector<draft_gain> gains;  // (n_slots + 1) by the number of spans: whether it is asked
    int64_t owed_ns = 0;    // that it took to catch up, and that no step was charged for

    // For n_slots slots. Throws std::bad_alloc.
    void allocate(const cbatch_draft_context & context, int32_t n_slots);

    bool is_on() const noexcept { return given.ctx != nullptr; }

    // Return the chance of a guess before it is made.
    float usual_chance() const noexcept;

    // Return how many guesses behind each of m rows of n let expect the most tokens in the time; 0 for none.
    int32_t choose(int32_t n, int32_t m, int32_t n_each, bool is_even, const width_costs & target) const noexcept;

    // Whether it knows a slot's tokens but for a few, or catches up with some of them now; `step_ns`: what a row's step
    // takes. Catching up waits until drafts would have gained as much as it costs, so that short answers do not pay it;
    // it does not wait where that is 0.
    bool knows(const cbatch_api & api, int32_t slot, const std::vector<int32_t> & text, double step_ns) noexcept;

    // Guess up to k tokens for each of those that are open.
    void guess(const cbatch_api & api, std::vector<guesses> * all, int32_t k) noexcept;

    // Learn that the first n_right of n_checked guesses were right, and keep their cells.
    void learn(const guesses & g, int32_t n_checked, int32_t n_right) noexcept;

    // A slot has another sequence now.   n_same: its first tokens that are those of the one before.
    void keep(int32_t slot, int32_t n_same) noexcept;

private:
    bool decode(const cbatch_api & api) noexcept;
    bool trim(const cbatch_api & api, int32_t slot, const std::vector<int32_t> & text, int32_t end) noexcept;
    bool compute(const cbatch_api & api, std::vector<guesses> * all) noexcept;
    bool feed(const cbatch_api & api, std::vector<guesses> * all, guesses * g, int32_t start, int32_t end) noexcept;
    void read_guess(const cbatch_api & api, guesses * g) noexcept;
};

// What may follow the newest tokens of a slot, and how many of such drafts are worth the rows that check them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

// Of so many steps that would have drafts the last n_plain have none, so that what steps without them take is known.
constexpr int32_t n_between_plain = 64;
constexpr int32_t n_plain = 2;

// Most drafts behind one row.
constexpr int32_t n_drafts_each = 15;

// Numbers of drafts behind each row that are weighed against each other. Each width has to be tried.
constexpr int32_t some_each[] = {1, 2, 3, 5, 7, 11, n_drafts_each};

// Drafts are made where they bring this much more: less is noise.
constexpr double least_gain = 1.1;

// After so many tries of all slots the older ones count half.
constexpr float n_tries_of_all = 128.0f;

// Classes of matches by their length, and kinds: the classes in a sequence itself, then those in answers of its group.
constexpr int32_t n_match_classes = 6;
constexpr int32_t n_match_kinds = 2 * n_match_classes;

// How many drafts were right of those that were expected to be; what is old counts less.
struct hit_rate {
    float n_hits = 0.0f;
    float n_expected = 0.0f;

    // Learn from one that was expected to be right with a chance of `expected`; up to `n_most` are remembered.
    void learn(bool is_hit, float expected, float n_most) noexcept;
};

// Where each sequence of `n` tokens of a text ended last. Some are forgotten where many fall on the same places: each
// call takes bounded time, whatever the tokens are.
struct gram_table {
    explicit gram_table(int32_t n) : n(n) {}

    // Note that `n` tokens end at `end`; return where they ended before, 0 where that is unknown. Throws std::bad_alloc.
    int32_t exchange(const std::vector<int32_t> & tokens, int32_t end);

    // Return where the last `n` of other tokens ended last in the text, 0 where that is unknown.
    int32_t find(const std::vector<int32_t> & tokens, const std::vector<int32_t> & others) const noexcept;

    int32_t n;
    int32_t n_used = 0;
    std::vector<int32_t> ends;  // a power of two of places; each the number of tokens up to the end, 0 where free
};

// Tokens in which the newest ones of a sequence are looked up.
struct draft_text {
    std::vector<int32_t> tokens;
    int32_t n_indexed = 0;  // tokens that are in the tables
    gram_table longer{4};
    gram_table shorter{2};

    // Enter up to `n` more tokens into the tables; return where the last ones entered stood before, 0 where that is
    // unknown. Throws std::bad_alloc.
    int32_t index(int32_t n);

    // Return where the newest of other tokens end in this text, 0 where that is unknown.
    int32_t find(const std::vector<int32_t> & others) const noexcept;
};

// Answers of one group of sequences that left their slots.
struct group_answers {
    int64_t group = 0;
    draft_text text;
    int32_t n_cleared = 0;  // times that it was emptied: places in it from before mean nothing

    // Add the tokens of a sequence from `start`, some before it, and `last_token` behind it if it is not below 0. Once it
    // is full it begins anew. Without memory for them they are left out.
    void add(const std::vector<int32_t> & sequence, int32_t start, int32_t last_token) noexcept;
};

// All tokens of one slot, and where its newest tokens stood before.
struct drafts {
    draft_text text;  // a long prompt enters its tables in several steps
    std::shared_ptr<group_answers> answers;  // of its group, or NULL
    int32_t at = 0;       // the token that is drafted to come next; 0: none
    bool is_of_group = false;  // whether `at` is in `answers`
    int32_t n_cleared = 0;     // of `answers` when `at` was found there
    int32_t n_match = 0;  // newest tokens that are the same as those before `at`; more than are told apart are not counted
    hit_rate own;         // by what its matches let expect
    bool is_placed = false;  // as edits.is_placed
    int32_t end = 0;         // positions below it are in `text`
    bool is_lost = false;    // no memory: no drafts any more
    bool is_looked_up = true;  // whether the newest tokens are: else there are no drafts of their own

    // Add a token; `rates`: (n_match_kinds) to learn from it, or NULL. Throws std::bad_alloc.
    void push(int32_t token, hit_rate * rates);

    // Add what is new of tokens at positions from `start`; `has_output` as of their span. Without memory for them there
    // are no drafts any more.
    void feed(int32_t start, const int32_t * fed, int32_t n_fed, bool has_output, hit_rate * rates) noexcept;

    // Return the j-th draft, below n_drafts().   before: those before it.
    int32_t draft(int32_t j, const int32_t * before) const noexcept;

    // Return how many drafts there may be at most: as many as asked for in a text that goes on with itself.
    int32_t n_drafts(int32_t n_most) const noexcept;

    // Return how likely the j-th draft is right if those before it are.
    float chance(const hit_rate * rates, int32_t j) const noexcept;

private:
    const draft_text & source() const noexcept { return is_of_group ? answers->text : text; }
    void look_up(int32_t before);
};

// What decoding steps take by their rows, learned from those that were done.
struct width_costs {
    static constexpr int32_t n_kept = 5;

    struct width {
        int64_t ns[n_kept];
        int32_t n = 0;  // that were seen since it was forgotten
        int64_t median_ns = 0;
        int64_t i_last_step = 0;
    };

    std::vector<width> widths;     // by rows
    std::vector<double> expected;  // of the same size: nanoseconds of a step of so many rows; 0 where none was seen
    int64_t n_steps = 0;

    // For up to `n_most` rows. Throws std::bad_alloc.
    void allocate(int32_t n_most);

    // `n_rows` is at most what was allocated for.
    void learn(int32_t n_rows, int64_t ns) noexcept;

    // Return what a step of so many rows takes, in nanoseconds; 0 where none was seen. A width that was hardly seen
    // takes what those around it let hope, so that it is tried.
    double cost(int32_t n_rows) const noexcept { return expected[n_rows]; }

    // Derive `expected` from what was learned.
    void expect() noexcept;
};

// What drafts brought to steps of so many spans: estimates decide how many there are, this whether there are any.
struct draft_gain {
    double gained_ns = 0.0;  // what the tokens of steps with drafts take without
    double spent_ns = 0.0;   // what those steps took
    int32_t n = 0;           // steps that are summed up
    int32_t n_rest = 0;      // steps to go without drafts
    int32_t n_next_rest = 0; // steps of the next rest, 0 for the least

    // Whether a step is to have drafts; counts it where it is not.
    bool allows() noexcept;

    // Learn from a step with drafts that took `ns` in place of `gained`, both in nanoseconds.
    void learn(double gained, double ns) noexcept;
};

// What drafts a step may have.
struct draft_limits {
    int32_t n_each;     // most behind one row
    int32_t n_all;      // most behind all
    bool is_even;       // the same number behind each, or none
    bool has_all;       // as many as there are, whatever they take
};

// Write to `n_drafts` how many drafts each of n rows has, so that the most tokens are expected in the time.
//   chances: (n, limits.n_each) that so many drafts of a row are right, 0 where it has none.
void choose_drafts(const float * chances, int32_t n, const draft_limits & limits, const width_costs & costs,
                    int32_t * n_drafts) noexcept;

#include "draft.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>

namespace {

// Longest match that is told from a shorter one.
constexpr int32_t match_max = 32;

// As n_tries_of_all, for the expected hits of one slot.
constexpr float n_hits_of_one = 16.0f;

// So many right drafts more than expected double the chance that a slot's drafts are given.
constexpr float n_hits_common = 4.0f;

constexpr float most_likely = 0.98f;

// Places that are looked at for one gram: tokens may be chosen so that all fall on the same ones.
constexpr int32_t n_places_tried = 16;

// Tokens of answers that a group keeps, 6 MiB with its tables, and of one answer: 0.1 to 0.3 us each.
constexpr int32_t n_answer_tokens = 1 << 17;
constexpr size_t n_tokens_each = 1 << 14;

// Tokens before an answer that are kept with it, so that its first ones are found.
constexpr int32_t n_before_answer = 4;

// Tokens of a prompt that enter the tables in one step: 0.1 to 0.3 us each.
constexpr int32_t n_indexed_at_once = 1024;

// What is known of a class before anything is: how often the next token is seen to be the draft is learned without drafts.
constexpr float n_hits_before = 0.5f;
constexpr float n_tries_before = 4.0f;

// Steps after which what a width took is forgotten, so that it is tried again: the machine may do something else by then.
constexpr int64_t n_steps_known = 2048;

// Steps with drafts by which these are judged, and a gain that is none: so much is noise.
constexpr int32_t n_judged = 16;
constexpr double no_gain = 1.05;

// Steps without drafts after those that brought nothing; each time in a row twice as many, up to the most.
constexpr int32_t n_least_rest = 32;
constexpr int32_t n_most_rest = 1024;

// A draft that is less likely is not weighed: even where it cost nothing it would bring no more than noise.
constexpr float least_chance = 0.1f;

// Times that a width is tried before it is judged: the first one has other costs too.
constexpr int32_t n_tried = 2;

// What a row beyond the widest step that is known takes, by a row of that step: so much as lets it be tried where much
// is hoped for.
constexpr double unknown_row = 0.5;

// As some_each, behind all rows together.
constexpr int32_t some_all[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

int32_t match_kind(bool is_of_group, int32_t n_match) {
    const int32_t i_class = n_match <= 2 ? 0 : n_match == 3 ? 1 : n_match <= 5 ? 2 : n_match <= 9 ? 3 : n_match <= 16 ? 4 : 5;
    return i_class + (is_of_group ? n_match_classes : 0);
}

uint32_t hash_of(const int32_t * gram, int32_t n) {
    uint64_t h = 0x9E3779B97F4A7C15u;
    for (int32_t i = 0; i < n; i++) {
        h = (h ^ static_cast<uint32_t>(gram[i])) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    return static_cast<uint32_t>(h);
}

// Return the place of a gram, or the one where it belongs: a free one, or that of another gram.
size_t place_of(const gram_table & table, const std::vector<int32_t> & tokens, const int32_t * gram) {
    const size_t mask = table.ends.size() - 1;
    size_t i = hash_of(gram, table.n) & mask;
    for (int32_t n = 1; n < n_places_tried; n++) {
        if (table.ends[i] == 0 || std::equal(gram, gram + table.n, tokens.data() + table.ends[i] - table.n)) {
            break;
        }
        i = (i + 1) & mask;
    }
    return i;
}

void grow(gram_table * table, const std::vector<int32_t> & tokens) {
    std::vector<int32_t> old(std::max<size_t>(64, 2 * table->ends.size()), 0);
    old.swap(table->ends);
    for (const int32_t end : old) {
        if (end != 0) {
            table->ends[place_of(*table, tokens, tokens.data() + end - table->n)] = end;
        }
    }
}

// Return how many of the newest tokens are those before `at` in a text too.
int32_t match_length(const std::vector<int32_t> & text, int32_t at, const std::vector<int32_t> & newest) {
    const int32_t n = static_cast<int32_t>(newest.size());
    int32_t n_match = 0;
    while (n_match < std::min({match_max, at, n}) && text[at - 1 - n_match] == newest[n - 1 - n_match]) {
        n_match++;
    }
    return n_match;
}

float usual_chance(const hit_rate & rate) {
    return (rate.n_hits + n_hits_before) / (rate.n_expected + n_tries_before);
}

int64_t median(const width_costs::width & w) {
    int64_t sorted[width_costs::n_kept];
    const int32_t n = std::min(w.n, width_costs::n_kept);
    for (int32_t i = 0; i < n; i++) {
        int32_t at = i;
        for (; at > 0 && sorted[at - 1] > w.ns[i]; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = w.ns[i];
    }
    return sorted[(n - 1) / 2];
}

}  // namespace

void hit_rate::learn(bool is_hit, float expected, float n_most) noexcept {
    n_hits += is_hit ? 1.0f : 0.0f;
    n_expected += expected;
    if (n_expected > n_most) {
        n_hits *= 0.5f;
        n_expected *= 0.5f;
    }
}

int32_t gram_table::exchange(const std::vector<int32_t> & tokens, int32_t end) {
    if (end < n) {
        return 0;
    }
    if (2 * (static_cast<size_t>(n_used) + 1) > ends.size()) {
        grow(this, tokens);
    }
    const int32_t * gram = tokens.data() + end - n;
    int32_t & place = ends[place_of(*this, tokens, gram)];
    const int32_t before = place;
    n_used += before == 0;
    place = end;
    const bool is_same = before != 0 && std::equal(gram, gram + n, tokens.data() + before - n);
    return is_same ? before : 0;
}

int32_t gram_table::find(const std::vector<int32_t> & tokens, const std::vector<int32_t> & others) const noexcept {
    if (ends.empty() || others.size() < static_cast<size_t>(n)) {
        return 0;
    }
    const int32_t * gram = others.data() + others.size() - n;
    const int32_t end = ends[place_of(*this, tokens, gram)];
    return end != 0 && std::equal(gram, gram + n, tokens.data() + end - n) ? end : 0;
}

int32_t draft_text::index(int32_t n) {
    int32_t before = 0;
    for (const int32_t end = std::min(static_cast<int32_t>(tokens.size()), n_indexed + n); n_indexed < end;) {
        n_indexed++;
        const int32_t by_short = shorter.exchange(tokens, n_indexed);
        const int32_t by_long = longer.exchange(tokens, n_indexed);
        before = by_long != 0 ? by_long : by_short;
    }
    return before;
}

int32_t draft_text::find(const std::vector<int32_t> & others) const noexcept {
    const int32_t by_long = longer.find(tokens, others);
    return by_long != 0 ? by_long : shorter.find(tokens, others);
}

void group_answers::add(const std::vector<int32_t> & sequence, int32_t start, int32_t last_token) noexcept {
    const size_t first = static_cast<size_t>(std::max(0, start - n_before_answer));
    if (start >= static_cast<int32_t>(sequence.size())) {
        return;
    }
    try {
        const size_t last = std::min(sequence.size(), first + n_tokens_each);
        if (text.tokens.size() + last - first > n_answer_tokens) {
            text = {};
            n_cleared++;
        }
        text.tokens.insert(text.tokens.end(), sequence.begin() + first, sequence.begin() + last);
        if (last_token >= 0 && last == sequence.size()) {
            text.tokens.push_back(last_token);
        }
        text.index(n_answer_tokens);
    } catch (const std::exception &) {
        return;
    }
}

void drafts::look_up(int32_t before) {
    is_of_group = false;
    at = before;
    n_match = at != 0 ? match_length(text.tokens, at, text.tokens) : 0;
    const int32_t in_group = answers != nullptr && n_match < match_max ? answers->text.find(text.tokens) : 0;
    const int32_t n_in_group = in_group != 0 ? match_length(answers->text.tokens, in_group, text.tokens) : 0;
    if (n_in_group > n_match && in_group < static_cast<int32_t>(answers->text.tokens.size())) {
        at = in_group;
        n_match = n_in_group;
        n_cleared = answers->n_cleared;
        is_of_group = true;
    }
}

void drafts::push(int32_t token, hit_rate * rates) {
    if (is_of_group && (n_cleared != answers->n_cleared || at >= static_cast<int32_t>(answers->text.tokens.size()))) {
        at = 0;
        is_of_group = false;
    }
    const bool is_hit = at > 0 && source().tokens[at] == token;
    if (at > 0 && rates != nullptr) {
        hit_rate & rate = rates[match_kind(is_of_group, n_match)];
        own.learn(is_hit, usual_chance(rate), n_hits_of_one);
        rate.learn(is_hit, 1.0f, n_tries_of_all);
    }
    text.tokens.push_back(token);
    if (!is_looked_up) {
        return;
    }
    const int32_t before = text.index(n_indexed_at_once);
    if (is_hit) {
        at++;
        n_match = std::min(n_match + 1, match_max);
    } else {
        look_up(text.n_indexed == static_cast<int32_t>(text.tokens.size()) ? before : 0);
    }
}

void drafts::feed(int32_t start, const int32_t * fed, int32_t n_fed, bool has_output,
                   hit_rate * rates) noexcept {
    if (!is_placed) {
        is_placed = has_output;
        end = start + n_fed;
        return;
    }
    try {
        for (int32_t i = std::max(start, end); i < start + n_fed && !is_lost; i++) {
            push(fed[i - start], rates);
        }
    } catch (const std::exception &) {
        is_lost = true;
        at = 0;
    }
    end = std::max(end, start + n_fed);
}

int32_t drafts::draft(int32_t j, const int32_t * before) const noexcept {
    const int32_t n_left = static_cast<int32_t>(source().tokens.size()) - at;
    return j < n_left ? source().tokens[at + j] : before[j - n_left];
}

int32_t drafts::n_drafts(int32_t n_most) const noexcept {
    if (at == 0 || (is_of_group && n_cleared != answers->n_cleared)) {
        return 0;
    }
    return is_of_group ? std::min(n_most, static_cast<int32_t>(source().tokens.size()) - at) : n_most;
}

float drafts::chance(const hit_rate * rates, int32_t j) const noexcept {
    const float by_own = (own.n_hits + n_hits_common) / (own.n_expected + n_hits_common);
    return std::min(usual_chance(rates[match_kind(is_of_group, n_match + j)]) * by_own, most_likely);
}

void width_costs::learn(int32_t n_rows, int64_t ns) noexcept {
    n_steps++;
    width & w = widths[n_rows];
    if (n_steps - w.i_last_step > n_steps_known) {
        w.n = 0;
    }
    w.ns[w.n % n_kept] = ns;
    // counts on from where all kept ones are new, so that it does not overflow
    w.n = w.n + 1 < 2 * n_kept ? w.n + 1 : n_kept;
    w.median_ns = median(w);
    w.i_last_step = n_steps;
    expect();
}

void width_costs::allocate(int32_t n_most) {
    widths.resize(static_cast<size_t>(n_most) + 1);
    expected.resize(widths.size());
}

void width_costs::expect() noexcept {
    const int32_t n = static_cast<int32_t>(widths.size());
    int32_t low = 0;
    for (int32_t high = 1; high <= n; high++) {
        if (high < n && (widths[high].n < n_tried || n_steps - widths[high].i_last_step > n_steps_known)) {
            continue;
        }
        const double low_ns = static_cast<double>(widths[low != 0 || high == n ? low : high].median_ns);
        const double row_ns =
            high < n ? std::max(0.0, (static_cast<double>(widths[high].median_ns) - low_ns) / (high - low))
                     : low_ns * unknown_row / std::max(1, low);
        for (int32_t i = low; i < high; i++) {
            expected[i] = low_ns + row_ns * (i - low);
        }
        low = high;
    }
}

bool draft_gain::allows() noexcept {
    if (n_rest > 0) {
        n_rest--;
        return false;
    }
    return true;
}

void draft_gain::learn(double gained, double ns) noexcept {
    gained_ns += gained;
    spent_ns += ns;
    if (++n < n_judged) {
        return;
    }
    if (gained_ns < no_gain * spent_ns) {
        n_rest = std::max(n_next_rest, n_least_rest);
        n_next_rest = std::min(2 * n_rest, n_most_rest);
        *this = {0.0, 0.0, 0, n_rest, n_next_rest};
        return;
    }
    n_next_rest = 0;
    n /= 2;
    gained_ns *= 0.5;
    spent_ns *= 0.5;
}

namespace {

struct choice {
    double rate;  // tokens a nanosecond
    int32_t n;    // drafts behind each row, or behind all
};

void choose_even(const float * chances, int32_t n, const draft_limits & limits, const width_costs & costs,
                 choice * best, int32_t * n_drafts) {
    const int32_t n_most = std::min(limits.n_each, limits.n_all / n);
    double n_before = n;
    for (const int32_t k : some_each) {
        if (k > n_most) {
            break;
        }
        double n_tokens = n;
        for (int32_t i = 0; i < n; i++) {
            n_tokens += std::accumulate(chances + i * limits.n_each, chances + i * limits.n_each + k, 0.0);
        }
        if (n_tokens <= n_before) {
            break;  // no more are expected, even if noise makes a wider step the cheaper one
        }
        n_before = n_tokens;
        const double rate = n_tokens / costs.cost(n * (1 + k));
        if (rate > best->rate) {
            *best = {rate, k};
        }
    }
    std::fill(n_drafts, n_drafts + n, best->n);
}

// The likeliest draft is added as long as the rate rises; each behind a row is less likely than that before it.
void choose_ragged(const float * chances, int32_t n, const draft_limits & limits, const width_costs & costs,
                   choice * best, int32_t * n_drafts) {
    const auto add_likeliest = [&]() {
        int32_t i_likeliest = 0;
        float highest = 0.0f;
        for (int32_t i = 0; i < n; i++) {
            const int32_t j = n_drafts[i];
            if (j < limits.n_each && chances[i * limits.n_each + j] > highest) {
                highest = chances[i * limits.n_each + j];
                i_likeliest = i;
            }
        }
        n_drafts[i_likeliest] += highest >= least_chance;
        return highest;
    };
    double n_tokens = n;
    for (int32_t m = 1; m <= limits.n_all; m++) {
        const float chance = add_likeliest();
        if (chance < least_chance) {
            break;
        }
        n_tokens += chance;
        if (std::find(std::begin(some_all), std::end(some_all), m) == std::end(some_all)) {
            continue;
        }
        const double rate = n_tokens / costs.cost(n + m);
        if (rate > best->rate) {
            *best = {rate, m};
        }
    }
    std::fill(n_drafts, n_drafts + n, 0);
    for (int32_t m = 0; m < best->n; m++) {
        add_likeliest();
    }
}

}  // namespace

namespace {

void take_all(const float * chances, int32_t n, const draft_limits & limits, int32_t * n_drafts) {
    int32_t n_left = limits.n_all;
    for (int32_t i = 0; i < n; i++) {
        const float * own = chances + i * limits.n_each;
        const auto n_own = static_cast<int32_t>(std::find(own, own + limits.n_each, 0.0f) - own);
        n_drafts[i] = std::min(n_own, n_left);
        n_left -= n_drafts[i];
    }
    if (limits.is_even) {
        std::fill(n_drafts, n_drafts + n, std::min(*std::max_element(n_drafts, n_drafts + n), limits.n_all / n));
    }
}

}  // namespace

void choose_drafts(const float * chances, int32_t n, const draft_limits & limits, const width_costs & costs,
                   int32_t * n_drafts) noexcept {
    std::fill(n_drafts, n_drafts + n, 0);
    if (limits.has_all) {
        take_all(chances, n, limits, n_drafts);
        return;
    }
    const double alone_ns = costs.cost(n);
    if (alone_ns <= 0.0 || limits.n_each < 1) {
        return;
    }
    choice best = {least_gain * n / alone_ns, 0};
    if (limits.is_even) {
        choose_even(chances, n, limits, costs, &best, n_drafts);
    } else {
        choose_ragged(chances, n, limits, costs, &best, n_drafts);
    }
}

#include "row.h"

#include <cmath>
#include <cstdlib>
#include <exception>

namespace {

int32_t choose(const sample_code & code, row_binding * b, const row_task & task, const sample_scratch & scratch) {
    float * logits = task.logits;
    if (task.mask != nullptr) {
        code.mask(logits, task.n_vocab, task.mask, scratch);
        logits = scratch.masked;
    }
    const bool has_edits = edits_any(b->changes);
    if (has_edits) {
        edits_apply(&b->changes, logits, scratch.counts);
    }
    const sample_bits bits = sample_random(b->rule, task.i_output);
    const int32_t token = code.row(logits, task.n_vocab, b->rule, bits, scratch, task.kept);
    if (has_edits) {
        edits_undo(&b->changes, logits);
    }
    return token;
}

}  // namespace

int32_t row_binding_init(const cbatch_binding & binding, int32_t n_vocab, row_binding * b) {
    if (!sample_rule_init(binding.sampling, &b->rule)) {
        return CBATCH_BAD_SAMPLING;
    }
    b->has_logprobs = binding.has_logprobs != 0;
    b->n_top = binding.n_top;
    return edits_init(binding, n_vocab, &b->changes);
}

int32_t row_sample(const sample_code & code, row_binding * b, const row_task & task,
                   const sample_scratch & scratch) noexcept {
    cbatch_logprobs * report = b->has_logprobs ? task.report : nullptr;
    double log_total = NAN;
    if (report != nullptr) {
        log_total = code.report(task.model, task.n_vocab, b->n_top, scratch, report);
    }
    const int32_t token = choose(code, b, task, scratch);
    if (report != nullptr) {
        const double logit = token >= 0 ? static_cast<double>(task.model[token]) : NAN;
        report->logprob = static_cast<float>(logit - log_total);
        report->n_top = token >= 0 ? report->n_top : 0;
    }
    return token;
}

void row_score(const sample_code & code, const float * logits, int32_t n_vocab, int32_t target, int32_t n_top,
               const sample_scratch & scratch, cbatch_logprobs * report) noexcept {
    *report = {};
    report->logprob = NAN;
    if (logits != nullptr) {
        const double log_total = code.report(logits, n_vocab, n_top, scratch, report);
        report->logprob = static_cast<float>(static_cast<double>(logits[target]) - log_total);
    }
}

int32_t cbatch_sample_row(float * logits, int32_t n_vocab, const cbatch_binding * binding, const uint32_t * mask,
                          int32_t i_output, int32_t isa, cbatch_logprobs * logprobs, uint64_t * kept) noexcept {
    const sample_code * code = sample_code_for(isa);
    if (n_vocab < 1 || code == nullptr) {
        return CBATCH_NO_TOKEN;
    }
    row_binding b;
    try {
        if (row_binding_init(*binding, n_vocab, &b) != CBATCH_OK) {
            return CBATCH_NO_TOKEN;
        }
    } catch (const std::exception &) {
        return CBATCH_NO_TOKEN;
    }
    char * memory = static_cast<char *>(calloc(sample_scratch_size(n_vocab), 1));
    if (memory == nullptr) {
        return CBATCH_NO_TOKEN;
    }
    const row_task task = {logits, logits, n_vocab, mask, i_output, logprobs, kept};
    const int32_t token = row_sample(*code, &b, task, sample_scratch_at(memory, n_vocab));
    free(memory);
    return token;
}

int32_t cbatch_weights(const float * logits, int32_t n, double temperature, int32_t isa, uint64_t * out) noexcept {
    const sample_code * code = sample_code_for(isa);
    cbatch_sampling sampling = {};
    sampling.temperature = temperature;
    sample_rule rule;
    if (n < 1 || code == nullptr || temperature == 0.0 || !sample_rule_init(sampling, &rule)) {
        return CBATCH_BAD_SAMPLING;
    }
    float max = logits[0];
    for (int32_t i = 1; i < n; i++) {
        max = logits[i] > max ? logits[i] : max;
    }
    code->weights(logits, n, max, rule.scale, out);
    return CBATCH_OK;
}

// The whole surface of cbatch's native library: plain C, no llama.cpp header, nothing linked.
// llama.cpp is reached through the addresses in `cbatch_api`. No function throws or exits the process.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#if defined(_WIN32)
#define CBATCH_EXPORT __declspec(dllexport)
#else
#define CBATCH_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
#define CBATCH_NOEXCEPT noexcept
extern "C" {
#else
#define CBATCH_NOEXCEPT
#endif

// Number of this surface; raised by every change that an older caller would misread.
#define CBATCH_ABI_VERSION 17

// Numbers that stand for a token in `out` of `cbatch_stepper_run`.
#define CBATCH_BROKEN_ROW (-1)  // the row held a NaN or +∞, or llama.cpp gave no row
#define CBATCH_NO_TOKEN (-2)    // nothing sampled: a span without output, or a step not done
#define CBATCH_EMPTY_ROW (-3)   // every logit was −∞ after mask and edits: no token was left

// `has_output` of a span that is a pad row: one token, computed with its logits to give the step its shape, and nothing
// sampled. Each further step of a run computes one more, at the next position. Its slot need not be bound.
#define CBATCH_PAD_ROW 2

// `has_output` of a span whose last token's logits are computed to give the step its shape; nothing is sampled.
#define CBATCH_SILENT_ROW 3

// Return codes. Anything but CBATCH_OK means that nothing was done.
#define CBATCH_OK 0
#define CBATCH_BAD_API 1        // table of another size or surface number, or without a needed address
#define CBATCH_BAD_SIZES 2      // a size below 1, or an instruction set that this machine or build has not
#define CBATCH_NO_MEMORY 3      // allocation failed
#define CBATCH_BAD_SLOT 4       // slot out of range; in a run also: not ascending, or one slot twice
#define CBATCH_BAD_SAMPLING 5   // a sampling value out of its range, or a negative count
#define CBATCH_BAD_SPAN 6       // no span, a span without tokens, a start below 0 or too high, a pad row of several tokens
#define CBATCH_BAD_TOKEN 7      // a token id outside [0, n_vocab): to compute, in a history, with a bias
#define CBATCH_BATCH_FULL 8     // more tokens than n_batch
#define CBATCH_BAD_STEPS 9      // n_steps below 1, or above 1 with masks, rows or a span without output; a budget below 0
#define CBATCH_NOT_BOUND 10     // a span with output in a slot that was never bound
#define CBATCH_TOO_LATE 13      // the process loaded a model before
#define CBATCH_BAD_DRAFTS 12   // n_drafts below 0, or above 0 where memory cannot be cut
#define CBATCH_BAD_SCORES 11    // targets: more than n_scores or than the span has tokens to score, a token id outside
                                // [0, n_vocab), alternatives out of range, or n_steps above 1

// Instruction sets that the sampling code is built for. All give the same tokens, bit for bit.
#define CBATCH_ISA_BEST (-1)    // the best that both the build and the machine have
#define CBATCH_ISA_BASE 0
#define CBATCH_ISA_AVX2 1
#define CBATCH_ISA_AVX512 2

struct llama_batch;  // mirrored in llama_abi.h

// Addresses of the functions that a stepper calls. Copied by cbatch_stepper_init.
typedef struct cbatch_api {
    uint32_t size;  // sizeof(cbatch_api); another size is refused
    uint32_t abi;   // CBATCH_ABI_VERSION; another number is refused
    int32_t (*decode)(void * ctx, struct llama_batch batch);        // llama_decode
    float * (*get_logits_ith)(void * ctx, int32_t i_token);         // llama_get_logits_ith
    // GOMP_parallel of the OpenMP runtime that ggml runs on, or NULL: rows are then sampled one after another.
    void (*gomp_parallel)(void (*fn)(void *), void * data, unsigned n_threads, unsigned flags);
    // llama_synchronize, or NULL. Called after a step without a row to fetch, which a device may still be computing: else
    // the step after it would seem to take the time of both.
    void (*synchronize)(void * ctx);
    // llama_get_memory and llama_memory_seq_rm, or NULL: then no run may have drafts.
    void * (*get_memory)(const void * ctx);
    bool (*memory_seq_rm)(void * memory, int32_t seq, int32_t start, int32_t end);
    // Nanoseconds of a clock that never goes back, or NULL for the system's.
    int64_t (*clock_ns)(void);
} cbatch_api;

// Sizes of a stepper, fixed from init on. All at least 1, except for n_scores.
typedef struct cbatch_sizes {
    int32_t n_slots;    // slots 0 … n_slots − 1, which are llama.cpp's sequence ids
    int32_t n_batch;    // most tokens in one step
    int32_t n_vocab;    // floats in one row of logits
    int32_t n_threads;  // most threads that sample; give what decoding uses
    int32_t isa;        // CBATCH_ISA_*
    int32_t n_scores;   // ≥ 0; most targets, or drafts, in one step: the context must allow n_slots + n_scores outputs
} cbatch_sizes;

// What is added to the logit of a token.
typedef struct cbatch_bias {
    int32_t token;  // in [0, n_vocab)
    float bias;     // finite, or −∞ for a ban
} cbatch_bias;

// How the next token of a slot is chosen. The definition is in sample.h; defaults that change nothing in brackets.
typedef struct cbatch_sampling {
    double temperature;        // 0 = greedy, whatever the filters say; finite, ≥ 0
    double top_p;              // [0, 1]; 1 keeps all
    double min_p;              // [0, 1]; 0 keeps all
    double typical_p;          // [0, 1]; 1 keeps all
    double top_n_sigma;        // finite; ≤ 0 keeps all
    double xtc_probability;    // [0, 1]; 0 = off
    double xtc_threshold;      // [0, 1]; above 0.5 = off
    uint64_t seed;             // key of the generator
    int32_t top_k;             // ≥ 0; 0 keeps all
    int32_t i_choice;          // ≥ 0; second word of the generator's counter
    float repeat_penalty;      // above 0, it and its inverse finite [1]
    float presence_penalty;    // finite [0]
    float frequency_penalty;   // finite [0]
    int32_t repeat_last_n;     // 0 … CBATCH_LAST_N_MAX newest tokens that the penalties see; 0 = off
    float dry_multiplier;      // finite, ≥ 0; 0 = off
    float dry_base;            // finite; below 1 = off
    int32_t dry_allowed_length;  // ≥ 0
    int32_t dry_last_n;        // 0 … CBATCH_LAST_N_MAX newest tokens that DRY sees; 0 = off
    const cbatch_bias * bias;  // (n_bias) or NULL
    // (n_breakers) or NULL: of DRY's sequences. The number of heads; for each head, ascending, its token id and the index
    // of its group; then the groups, each the number of its tails, each of these its length and so many token ids. A head
    // and a tail of its group are a sequence.
    const int32_t * breakers;
    int32_t n_bias;
    int32_t n_breakers;        // numbers in `breakers`
} cbatch_sampling;

// Most newest tokens that penalties and DRY can see, and most alternatives that are reported of a token.
#define CBATCH_LAST_N_MAX 1048576
#define CBATCH_TOP_MAX 20

// Where the drafts of a slot come from: what followed its newest tokens before, and the draft model.
#define CBATCH_DRAFTS_AGAIN 1
#define CBATCH_DRAFTS_MODEL 2

// What a slot needs to know of its sequence. Everything is copied.
typedef struct cbatch_binding {
    cbatch_sampling sampling;
    const int32_t * stop;     // (n_stop) token ids that end a run, or NULL
    const int32_t * history;  // (n_history) the tokens so far, prompt and output, those in no cell included; or NULL
    int32_t n_stop;
    int32_t n_history;
    // The position of the first output: the generator's counter is the sampled token's position minus this. Below 0 where
    // more tokens were taken out of the window than the prompt had.
    int32_t output_origin;
    int32_t has_logprobs;  // not 0: report log-probabilities
    int32_t n_top;         // 0 … CBATCH_TOP_MAX alternatives to report with them
    int32_t has_drafts;   // CBATCH_DRAFTS_* together: what may be computed ahead; if not 0, `history` is all of it
    // With CBATCH_DRAFTS_AGAIN, not 0: what followed them in answers of slots that were bound with the same number, too;
    // these are kept as long as one is.
    int64_t draft_group;
} cbatch_binding;

// Log-probabilities of one token by the model's own logits: before any changed row, mask, bias, penalty, filter or temperature.
typedef struct cbatch_logprobs {
    float logprob;                      // of the token; NaN for a broken row
    int32_t n_top;                      // alternatives that follow: as many as asked for, or all with a finite logit
    int32_t token[CBATCH_TOP_MAX];      // the likeliest first, the lower id first among equals
    float top_logprob[CBATCH_TOP_MAX];  // theirs
} cbatch_logprobs;

// The part of one sequence in a step; its tokens follow those of the span before in `tokens`.
typedef struct cbatch_span {
    int32_t slot;        // ascending from span to span
    int32_t start;       // position of the first token, ≥ 0
    int32_t n_tokens;    // ≥ 1
    int32_t has_output;  // 1: the last token's logits are sampled; 0: they are not computed; or CBATCH_PAD_ROW, CBATCH_SILENT_ROW
} cbatch_span;

// Tokens that are not sampled but given, whose log-probabilities are to be reported: after the span's first token the first
// target comes, after its second the second, and so on.
typedef struct cbatch_scoring {
    const int32_t * n_targets;  // (n_spans) of each span: 0 … its tokens, without the last one where it has an output
    const int32_t * n_top;      // (n_spans) alternatives to report with each: 0 … CBATCH_TOP_MAX
    const int32_t * targets;    // token ids, those of all spans one after another
    cbatch_logprobs * out;      // one for each target
} cbatch_scoring;

// What a run did.
typedef struct cbatch_report {
    int32_t n_steps;    // steps done in full
    int32_t code;       // what the last llama_decode returned; not 0: the step after n_steps failed
    int64_t decode_ns;  // time in llama_decode and in fetching rows, all steps, nanoseconds
    int64_t sample_ns;  // time in sampling and scoring, all steps, nanoseconds
    int64_t first_ns;   // decode_ns and sample_ns of the first step alone; 0 where it failed
    // Drafts that were checked, and those of them that were sampled too: of what the slot's tokens repeat, of what answers
    // of its group said, of the draft model.
    int32_t n_drafts[3];
    int32_t n_accepted[3];
} cbatch_report;

typedef struct cbatch_stepper cbatch_stepper;    // runs steps in one llama context
typedef struct cbatch_log_ring cbatch_log_ring;  // the newest log records, in a fixed number of bytes
typedef struct cbatch_watch cbatch_watch;        // looks at the computing of graphs, one at a time

// Return CBATCH_ABI_VERSION as compiled.
CBATCH_EXPORT int32_t cbatch_abi_version(void) CBATCH_NOEXCEPT;

// Write the layout of llama_batch as compiled to out[0 … 7]: sizeof, then the offsets in bytes of n_tokens, token,
// embd, pos, n_seq_id, seq_id, logits.
CBATCH_EXPORT void cbatch_batch_layout(int32_t * out) CBATCH_NOEXCEPT;

// Return the best CBATCH_ISA_* that both this build and this machine have; every one from 0 up to it can be used.
CBATCH_EXPORT int32_t cbatch_isa_best(void) CBATCH_NOEXCEPT;

// Make a stepper and write it to *out. All buffers but those of cbatch_stepper_bind are allocated here.
//   ctx: passed on to the functions of `api`; must outlive the stepper.
// Returns CBATCH_OK, _BAD_API, _BAD_SIZES or _NO_MEMORY; *out is NULL unless CBATCH_OK.
CBATCH_EXPORT int32_t cbatch_stepper_init(const cbatch_api * api, void * ctx, const cbatch_sizes * sizes,
                                          cbatch_stepper ** out) CBATCH_NOEXCEPT;

// Free a stepper; NULL is harmless. Not while a run is in flight.
CBATCH_EXPORT void cbatch_stepper_free(cbatch_stepper * s) CBATCH_NOEXCEPT;

// Compute in another context from now on, which has the same model and room for the same sizes; what is bound stays. Not
// while a run is in flight.
CBATCH_EXPORT void cbatch_stepper_use(cbatch_stepper * s, void * ctx) CBATCH_NOEXCEPT;

// Sample with a team of n_threads from now on: 1 … those of `cbatch_sizes`. Not while a run is in flight.
CBATCH_EXPORT void cbatch_stepper_set_threads(cbatch_stepper * s, int32_t n_threads) CBATCH_NOEXCEPT;

// The context of a smaller model that has the same tokens, and the slots as its sequences. Its memory can be cut.
typedef struct cbatch_draft_context {
    void * ctx;         // the stepper's alone, and outlives it
    int32_t n_batch;    // ≥ 1; most tokens of one call
    int32_t n_window;   // ≥ 1; cells of each slot
    int32_t n_vocab;    // ≥ 1; floats in one row of its logits: what the stepper has no tokens for is not drafted
} cbatch_draft_context;

// Draft with a smaller model too, from now on. Its cells are emptied.
// Returns CBATCH_OK, _BAD_DRAFTS without memory_seq_rm, _BAD_SIZES or _NO_MEMORY.
CBATCH_EXPORT int32_t cbatch_stepper_draft_with(cbatch_stepper * s,
                                                const cbatch_draft_context * given) CBATCH_NOEXCEPT;

// Say how `slot` is sampled from now on. Everything is copied; where penalties or DRY are on, tokens that are fed to the
// slot afterwards join its history.
// Returns CBATCH_OK, _BAD_SLOT, _BAD_SAMPLING, _BAD_TOKEN or _NO_MEMORY; the slot stays as it was unless CBATCH_OK.
CBATCH_EXPORT int32_t cbatch_stepper_bind(cbatch_stepper * s, int32_t slot,
                                          const cbatch_binding * binding) CBATCH_NOEXCEPT;

// Note that n_removed tokens of `slot` have left its window: the later ones are so many positions earlier. They stay in
// its history.
// Returns CBATCH_OK or _BAD_SLOT.
CBATCH_EXPORT int32_t cbatch_stepper_shift(cbatch_stepper * s, int32_t slot, int32_t n_removed) CBATCH_NOEXCEPT;

// Do up to n_steps steps: decode the spans, sample their outputs, feed each sampled token to the next step.
// With drafts a step computes tokens behind a span's as well: those that followed its newest tokens before. As long as
// what is sampled is the draft, the row of the draft is sampled too, in the same step; the cells of the others are removed.
// So many drafts are made, or none, as let expect the most tokens in the time, by what steps took and how many were right.
// Ends early after a step in which a row sampled a stop token of its slot or was broken, or a span has n_steps tokens,
// after an interrupt, when more than budget_us have passed, and when llama_decode returned anything but 0.
//   spans: n_spans, ascending slots.   tokens: the tokens of all spans, one after another.
//   budget_us: microseconds, 0 = no limit.
//   masks: NULL, or one pointer for each span with an output, NULL or to (n_vocab + 31) / 32 words: a token is allowed
//     where bit token % 32 of word token / 32 is set. Not with n_steps above 1.
//   rows: NULL, or (outputs) pointers, written after decoding: the logits of each output, NULL where llama.cpp gave none.
//     await_rows may replace a pointer: the row at it is sampled, log-probabilities are those of the model's row. Not with
//     n_steps above 1.
//   await_rows: NULL, or called once after decoding, before masks and rows are read. It returns when they are written, so
//     that masks can be made while a device decodes.
//   n_drafts: most drafts behind one token; 0 for none. Not above 0 without memory_seq_rm.
//   is_even: not 0: as many behind each token, or none, where memory is apart for each slot.
//   has_all: not 0: n_drafts wherever there are as many, whatever they let expect.
//   out: (n_spans, n_steps) int32, filled entirely: token ids, CBATCH_BROKEN_ROW, _EMPTY_ROW or _NO_TOKEN.
//   n_out: (n_spans) how many tokens were sampled of each span, broken and empty rows included.
//   drafted: (n_spans, 6), or NULL: how many drafts of each span were checked, by source as in the report, and then how
//     many were sampled too.
//   logprobs: (n_spans, n_steps), written where a token was sampled in a slot bound with has_logprobs; NULL: none are.
//   scoring: NULL, or targets whose log-probabilities are to be reported; written where the step was done. Not with n_steps above 1.
// Sampling may change a row of logits while it runs; afterwards the row is as before.
// Returns CBATCH_OK, also when llama_decode failed (see report->code), or CBATCH_BAD_* / _BATCH_FULL / _NOT_BOUND.
CBATCH_EXPORT int32_t cbatch_stepper_run(cbatch_stepper * s, const cbatch_span * spans, int32_t n_spans,
                                         const int32_t * tokens, int32_t n_steps, int64_t budget_us,
                                         int32_t n_drafts, int32_t is_even, int32_t has_all,
                                         const uint32_t * const * masks, float ** rows, void (*await_rows)(void),
                                         int32_t * out, int32_t * n_out, int32_t * drafted,
                                         cbatch_logprobs * logprobs, const cbatch_scoring * scoring,
                                         cbatch_report * report) CBATCH_NOEXCEPT;

// Ask the run in flight, or else the next one, to end after its current step. From any thread.
CBATCH_EXPORT void cbatch_stepper_interrupt(cbatch_stepper * s) CBATCH_NOEXCEPT;

// Sample one row of n_vocab floats by itself, as a stepper would. For tests and probes: allocates its scratch.
//   logits: changed while it runs, as before afterwards.   mask: (n_vocab + 31) / 32 words, or NULL.
//   logprobs: written where the binding asks; may be NULL.
//   kept: (n_vocab), or NULL: the weight with which each token could have been drawn; a greedy row has one, of 2^32.
// Returns a token id, CBATCH_BROKEN_ROW or _EMPTY_ROW; on bad sizes, a bad binding or no memory CBATCH_NO_TOKEN.
CBATCH_EXPORT int32_t cbatch_sample_row(float * logits, int32_t n_vocab, const cbatch_binding * binding,
                                        const uint32_t * mask, int32_t i_output, int32_t isa,
                                        cbatch_logprobs * logprobs, uint64_t * kept) CBATCH_NOEXCEPT;

// Write the weights of n logits, without NaN or +∞, at a temperature above 0 to out: (n) uint64. For tests.
// Returns CBATCH_OK or CBATCH_BAD_SAMPLING.
CBATCH_EXPORT int32_t cbatch_weights(const float * logits, int32_t n, double temperature, int32_t isa,
                                     uint64_t * out) CBATCH_NOEXCEPT;

// Write the four words of Philox4x32-10 for a counter of four words and a key of two. For known-answer tests.
CBATCH_EXPORT void cbatch_philox(const uint32_t * counter, const uint32_t * key, uint32_t * out) CBATCH_NOEXCEPT;

// Return the seconds of a round in which GNU's OpenMP has a thread spin on this processor: a load and a pause. Takes a
// fraction of a millisecond. Source: libgomp/config/linux/wait.h, do_spin.
CBATCH_EXPORT double cbatch_spin_s(void) CBATCH_NOEXCEPT;

// Put the buffer type of packed weights into the list of ggml's CPU backend, once a process.
//   library: a handle of libllama as of dlopen; ggml is found among what it needs.
// Returns CBATCH_OK, CBATCH_BAD_SIZES (this processor or build has no products of packed weights), CBATCH_BAD_API (ggml's
// types are not those of native/ggml_abi.h) or CBATCH_TOO_LATE (a model was loaded before).
CBATCH_EXPORT int32_t cbatch_packed_open(void * library) CBATCH_NOEXCEPT;

// Have models that this thread loads from now on keep their weights packed (is_loading not 0), or not, as at first.
CBATCH_EXPORT void cbatch_packed_want(int32_t is_loading) CBATCH_NOEXCEPT;

// Have ggml's CPU backend ask for huge pages for its memory from now on, once a process; the system may refuse.
//   library: as above.
// Returns CBATCH_OK, or CBATCH_BAD_API (ggml's types are not those of native/ggml_abi.h, or the system is not Linux).
CBATCH_EXPORT int32_t cbatch_huge_pages_open(void * library) CBATCH_NOEXCEPT;

// llama.cpp's log levels. Source: ggml/include/ggml.h, enum ggml_log_level.
#define CBATCH_LOG_DEBUG 1
#define CBATCH_LOG_CONTINUATION 5  // goes on with the record before, whatever its level

// Make a ring of n_bytes (at least 64), which is never freed, or return NULL. When it is full the oldest records are
// dropped and counted.
CBATCH_EXPORT cbatch_log_ring * cbatch_log_init(int32_t n_bytes) CBATCH_NOEXCEPT;

// Keep records of CBATCH_LOG_DEBUG too (has_debug not 0), or leave them out, as a new ring does: they are many.
CBATCH_EXPORT void cbatch_log_set_debug(cbatch_log_ring * ring, int32_t has_debug) CBATCH_NOEXCEPT;

// Keep one record. Has the type that llama_log_set wants; `ring` is its user data. From any thread.
CBATCH_EXPORT void cbatch_log_callback(int32_t level, const char * text, void * ring) CBATCH_NOEXCEPT;

// Take the oldest whole records that fit in n_out bytes, and the number dropped since the last drain.
// A record is int32 level, int32 length, then `length` bytes of text without a zero byte.
// With n_out ≥ the ring's n_bytes everything fits. Returns the bytes written.
CBATCH_EXPORT int32_t cbatch_log_drain(cbatch_log_ring * ring, char * out, int32_t n_out,
                                       int64_t * n_dropped) CBATCH_NOEXCEPT;

// What a watch asks and calls.
typedef struct cbatch_watch_params {
    const char * (*get_name)(const void * node);  // ggml_get_name
    const char * (*get_op)(const void * node);    // ggml_op_desc
    const char * last;                            // name of the node behind which graphs end, or NULL; has to outlive the watch
    // Called between two nodes of a graph, in the thread that computes it; or NULL. Return for how many seconds to go on
    // before the next call: infinity while nothing waits, which is asked again after 10 ms; less than 0 breaks the graph off.
    double (*turn)(void);
} cbatch_watch_params;

// Make a watch of the graphs of one context, or return NULL; free it once nothing computes with it.
CBATCH_EXPORT cbatch_watch * cbatch_watch_init(const cbatch_watch_params * params) CBATCH_NOEXCEPT;
CBATCH_EXPORT void cbatch_watch_free(cbatch_watch * watch) CBATCH_NOEXCEPT;

// Break off the graph under way behind some of its nodes, and every later one behind its first ones. From any thread.
CBATCH_EXPORT void cbatch_watch_stop(cbatch_watch * watch) CBATCH_NOEXCEPT;

// Have `turn` called at the next pause. From any thread.
CBATCH_EXPORT void cbatch_watch_hurry(cbatch_watch * watch) CBATCH_NOEXCEPT;

// Has the type ggml_backend_sched_eval_callback; `watch` is its user data. Source: ggml/include/ggml-backend.h.
CBATCH_EXPORT bool cbatch_watch_callback(void * node, bool is_asking, void * watch) CBATCH_NOEXCEPT;

#ifdef __cplusplus
}
#endif

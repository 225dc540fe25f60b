// The one mirror of a llama.cpp type. The handshake compares it with llama-cpp-python's own before anything runs.
// Source: llama.cpp include/llama.h, struct llama_batch; fields unchanged since 2024-10-22.
#pragma once

#include <cstddef>
#include <cstdint>

struct llama_batch {
    int32_t n_tokens;
    int32_t * token;     // (n_tokens)
    float * embd;        // NULL: tokens are given, not embeddings
    int32_t * pos;       // (n_tokens)
    int32_t * n_seq_id;  // (n_tokens)
    int32_t ** seq_id;   // (n_tokens) pointers to n_seq_id[i] ids
    int8_t * logits;     // (n_tokens); not 0: this token's logits are wanted
};

static_assert(sizeof(void *) == 8, "cbatch is built for 64-bit machines");
static_assert(offsetof(llama_batch, n_tokens) == 0, "llama_batch.n_tokens");
static_assert(offsetof(llama_batch, token) == 8, "llama_batch.token");
static_assert(offsetof(llama_batch, embd) == 16, "llama_batch.embd");
static_assert(offsetof(llama_batch, pos) == 24, "llama_batch.pos");
static_assert(offsetof(llama_batch, n_seq_id) == 32, "llama_batch.n_seq_id");
static_assert(offsetof(llama_batch, seq_id) == 40, "llama_batch.seq_id");
static_assert(offsetof(llama_batch, logits) == 48, "llama_batch.logits");
static_assert(sizeof(llama_batch) == 56, "llama_batch");

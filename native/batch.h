// The tokens of one call of llama_decode.
#pragma once

#include "llama_abi.h"

#include <cstdint>
#include <vector>

// Each token is of one sequence: seq_id and n_seq_id never change except for the ids, which are in `slot`.
struct token_batch {
    std::vector<int32_t> token;
    std::vector<int32_t> pos;
    std::vector<int32_t> n_seq_id;  // all 1
    std::vector<int32_t> slot;
    std::vector<int32_t *> seq_id;  // each into slot
    std::vector<int8_t> logits;
    int32_t n = 0;

    // For up to `n_most` tokens. Throws std::bad_alloc.
    void allocate(int32_t n_most) {
        token.resize(n_most);
        pos.resize(n_most);
        n_seq_id.assign(n_most, 1);
        slot.resize(n_most);
        seq_id.resize(n_most);
        logits.resize(n_most);
        for (int32_t i = 0; i < n_most; i++) {
            seq_id[i] = &slot[i];
        }
    }

    void put(int32_t its_token, int32_t its_pos, int32_t its_slot, bool has_logits) noexcept {
        token[n] = its_token;
        pos[n] = its_pos;
        slot[n] = its_slot;
        logits[n] = has_logits;
        n++;
    }

    // Return it as llama_decode takes it.
    llama_batch view() noexcept {
        return {n, token.data(), nullptr, pos.data(), n_seq_id.data(), seq_id.data(), logits.data()};
    }
};

"""What llama.cpp has to be told of an architecture before it can make a tiny model of it.

Most keys are said to every architecture, which reads those that it knows.
Source: llama.cpp, tests/test-llama-archs.cpp, get_gguf_ctx; sizes here are smaller.
"""

from __future__ import annotations

from typing import Any

N_VOCAB, N_CTX_TRAIN, N_WINDOW = 192, 1024, 32

_SIZES = {"n_embd": 64, "n_head": 2, "n_ff": 64, "n_layer": 2}
_SIZES_OF: dict[str, dict[str, int]] = {
    "afmoe": {"n_head": 4, "n_head_kv": 2},
    "deepseek4": {"n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_layer": 4},
    "gemma3n": {"n_layer": 22},  # layers from 20 on have no cells of their own
    "gemma4": {"n_layer": 6},
    "hrm_text": {"n_layer": 6},  # six layers in memory, of which two have weights
    "llama4": {"n_layer": 4},
    "nemotron_h": {"n_layer": 3},
    "nemotron_h_moe": {"n_layer": 3},
    "qwen3": {"n_head": 4, "n_head_kv": 1},
}

# A latent of keys and values; a head has a part with and a part without positions.
_N_LATENT, _N_ROPE, _N_NOPE, _N_VALUE = 32, 16, 16, 32
_LATENT = {
    "bailingmoe3", "deepseek2", "deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "kimi-k3", "kimi-linear",
    "mistral4",
}  # fmt: skip

# Layers without attention have no heads.
_HEADS_A_LAYER = {
    "bailingmoe3", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h",
    "nemotron_h_moe", "plamo2",
}  # fmt: skip

# Which layers have a window is said for each; to the others, that every second one has.
_WINDOWS_A_LAYER = {
    "cohere2moe", "dots3note", "gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35",
}  # fmt: skip


def metadata_of(architecture: str, *, has_experts: bool) -> dict[str, Any]:
    """Return the keys and values of one architecture; those without a dot in front stand below its name."""
    sizes = {**_SIZES, **_SIZES_OF.get(architecture, {})}
    n_embd, n_head, n_layer, n_ff = (sizes[k] for k in ("n_embd", "n_head", "n_layer", "n_ff"))
    n_head_kv = 1 if architecture in _LATENT else sizes.get("n_head_kv", n_head)
    n_wide = n_embd // n_head
    said: dict[str, Any] = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX_TRAIN,
        "embedding_length": n_embd,
        "features_length": n_embd,
        "block_count": n_layer,
        "leading_dense_block_count": 1,
        "feed_forward_length": n_ff,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "time_mix_extra_dim": 16,
        "time_decay_extra_dim": 16,
        "full_attention_interval": 2,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.q_lora_rank": 32,
        "attention.kv_lora_rank": _N_LATENT,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": N_WINDOW,
        "attention.sliding_window_pattern": 2,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 131072,
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [n_wide // 4] * 4,
        ".xielu.alpha_n": 1.0,
        ".xielu.alpha_p": 1.0,
        ".xielu.beta": 1.0,
        ".xielu.eps": 1e-7,
        "ssm.inner_size": 2 * n_embd,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.time_step_rank": n_head,
        "ssm.group_count": 2,
        "kda.head_dim": 16,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": n_wide,
        "attention.decay_lora_rank": 16,
        "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 16,
        "attention.gate_lora_rank": 16,
        "shortconv.l_cache": 3,
        "residual_scale": 3.5565588200778455,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }
    if has_experts:
        said |= {
            "expert_feed_forward_length": n_ff // 2,
            "expert_shared_feed_forward_length": n_ff,
            "expert_latent_length": n_ff // 2,
            "interleave_moe_layer_step": 2,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_group_scale": 1.0,
            "experts_per_group": 1,
        }
    if architecture in _LATENT:
        n_rope = 0 if architecture == "glm5-next" else _N_ROPE
        said |= {
            "attention.key_length": _N_LATENT + n_rope,
            "attention.value_length": _N_LATENT,
            "rope.dimension_count": n_rope,
            "attention.key_length_mla": _N_NOPE + n_rope,
            "attention.value_length_mla": _N_VALUE,
        }
    if architecture in _HEADS_A_LAYER:
        heads = [0 if i == 1 else n_head for i in range(n_layer)]
        said["attention.head_count_kv"] = [min(n, n_head_kv) for n in heads]
        if architecture != "glm5-next":
            said["attention.head_count"] = heads
    if architecture in _WINDOWS_A_LAYER:
        said["attention.sliding_window_pattern"] = [1 - i % 2 for i in range(n_layer)]
    return said | _OF.get(architecture, {})


_HYPER = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}
_OF: dict[str, dict[str, Any]] = {
    "bailingmoe3": {
        "rope.dimension_sections": [2, 3, 3, 0],
        "swiglu_clamp_exp": [0.0, 4.0],
        "swiglu_clamp_shexp": [0.0, 5.0],
    },
    "deepseek4": {
        **_HYPER,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
    },
    "gemma4": {
        "embedding_length_per_layer_input": 32,
        "attention.shared_kv_layers": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "rope.freq_base_swa": 10000.0,
    },
    # heads narrower than 64 are read past their end: ggml-cpu/ops.cpp, rwkv_wkv7
    "arwkv7": {"token_shift_count": 1, "wkv.head_size": 64},
    "rwkv7": {"wkv.head_size": 64},
    "rwkv6qwen2": {"token_shift_count": 1},
    "qwen35": {"ssm.inner_size": 32},
    "qwen35moe": {"ssm.inner_size": 32},
    "qwen3next": {"ssm.inner_size": 32},
    "hrm_text": {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    "maple": {"swiglu_clamp_exp": 7.0},
    "minimax-m3": {"rope.dimension_count": 32, "attention.indexer.head_count": 2},
    "nemotron_h": {"feed_forward_length": [0, 0, 64]},
    "nemotron_h_moe": {"feed_forward_length": [0, 0, 64]},
    "plamo2": {"ssm.group_count": 0},
}  # fmt: skip

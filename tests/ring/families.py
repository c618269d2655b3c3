"""Tiny models of many transformers families."""

from __future__ import annotations

from typing import Any

import torch

V = 61
HYBRID = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "dtype": torch.float32},
    "Olmo2": {},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "layer_types": HYBRID, "dtype": torch.float32},
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 6, "layer_types": HYBRID},
    "Cohere2": {"sliding_window": 6, "layer_types": HYBRID},
    "Phi3": {"sliding_window": 5, "pad_token_id": 0},
    "Llama4": {
        "config": "Llama4TextConfig", "attention_chunk_size": 7, "num_local_experts": 2, "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "pad_token_id": 0,
    },
    "GptOss": {
        "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": HYBRID,
        "rope_parameters": ROPE, "dtype": torch.float32,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "head_dim": None, "dtype": torch.float32,
    },
    "Gpt2": {
        "config": "GPT2Config", "model": "GPT2LMHeadModel", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "num_key_value_heads": None, "head_dim": None, "intermediate_size": None,
    },
    "GptNeoX": {"config": "GPTNeoXConfig", "model": "GPTNeoXForCausalLM", "num_key_value_heads": None, "head_dim": None},
    "Opt": {
        "config": "OPTConfig", "model": "OPTForCausalLM", "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0,
        "num_key_value_heads": None, "head_dim": None, "intermediate_size": None,
    },
    "Qwen2VLText": {
        "config": "Qwen2VLTextConfig", "model": "Qwen2VLTextModel", "head_dim": None,
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]},
    },
    "InternVLText": {"config": "Qwen2Config", "model": "Qwen2Model", "head_dim": None},
    "ModernBert": {
        "model": "ModernBertForMaskedLM", "local_attention": 6, "pad_token_id": 0, "head_dim": None,
        "num_key_value_heads": None,
    },
}  # fmt: skip


def build(name: str, **more: Any) -> Any:
    """A model with random weights, fp64 unless its family computes in fp32 anyway."""
    import transformers

    options = {
        "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "use_cache": False,
        "initializer_range": 0.3,
    } | FAMILIES[name] | more  # fmt: skip
    dtype, model = options.pop("dtype", torch.float64), options.pop("model", f"{name}ForCausalLM")
    config = options.pop("config", f"{name}Config")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{n: x for n, x in options.items() if x is not None})
    return getattr(transformers, model)(made).to(dtype).train()

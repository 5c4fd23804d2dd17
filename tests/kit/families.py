"""Tiny random causal LMs of many families, by their model type in Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .models import EOS_ID, PAD_ID, make_tokenizer

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
"""Config settings that nearly all families know. Other families keep them as unused settings."""
HEAD_DIM = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEAD_DIM,
    "granite": {"attention_dropout": 0.1},
    "gpt2": GPT2,
    "openai-gpt": GPT2 | {"summary_type": "cls_index"},
    # Families with dropout by default.
    "seed_oss": HEAD_DIM,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_bigcode": GPT2,
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "biogpt": {},
    # Mixtures of experts.
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS | HEAD_DIM,
    "qwen3_next": EXPERTS
    | HEAD_DIM
    | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mixtral": LOCAL_EXPERTS,
    "deepseek_v3": DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": DEEPSEEK | HEAD_DIM | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "olmoe": EXPERTS | {"num_key_value_heads": 4},
    "granitemoe": LOCAL_EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    # Sliding windows, chunks, soft caps, changing RoPE, recurrent states and other attention variants.
    "mistral": HEAD_DIM,
    "gemma2": HEAD_DIM | {"query_pre_attn_scalar": 8},
    "vaultgemma": HEAD_DIM | {"query_pre_attn_scalar": 8},
    "gemma3_text": HEAD_DIM,
    "gemma4_text": HEAD_DIM | {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "gpt_oss": HEAD_DIM | LOCAL_EXPERTS,
    "cohere2": HEAD_DIM,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "phi3": {},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "recurrent_gemma": {"lru_width": 32, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"]},
    "mamba": {"state_size": 4},
    "doge": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "bert": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "llama4_text": HEAD_DIM | LOCAL_EXPERTS | {"intermediate_size_mlp": 48},
    "gemma3n_text": HEAD_DIM
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [48, 48],
    },
    # Text and images.
    "gemma3": {
        "text_config": COMMON | HEAD_DIM,
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
    },
}
"""Further settings that make the model small, by model type."""


def small_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **COMMON | FAMILIES[model_type] | overrides)


def small_model(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in float32 and evaluation mode, with all weights random. `overrides` go to the config."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(model_type, **overrides)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and biases begin as constants
                weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.1)
    return model


def write_small_model(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes config, tokenizer and safetensors with `save_pretrained`; returns `folder`."""
    small_model(model_type, seed=seed, **overrides).save_pretrained(folder)
    make_tokenizer(VOCAB).save_pretrained(folder)
    return folder

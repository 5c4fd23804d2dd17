"""Tiny but complete Hugging Face model folders with random weights, generated locally without downloads."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
"""Families that every engine must run."""
SPECIAL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"layer_types": ["full_attention"] * 2}),
}
"""Families that some engines run, with further settings that make the model small."""
PAD, EOS, UNKNOWN, USER, ASSISTANT = SPECIALS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
PAD_ID, EOS_ID = 0, 1
ALPHABET = string.digits + string.ascii_lowercase + " +-*/=.,?!:\n" + string.ascii_uppercase
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '--' }}{% endif %}{% endif %}"
)
"""Has an argument like Qwen3's, which closes the thoughts before they begin."""


def make_tokenizer(vocab_size: int = 96, *, chat: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of ALPHABET (byte-level BPE without merges, which every family's
    tokenizer class reads alike). Ids past the alphabet are words `w<id>` that text never encodes to."""
    letters = ALPHABET.replace(" ", "Ġ").replace("\n", "Ċ")
    tokens = [*SPECIALS, *letters][:vocab_size]
    tokens += [f"w{i}" for i in range(len(tokens), vocab_size)]
    vocab = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def make_model(
    folder: Path,
    family: str = "qwen3",
    *,
    vocab_size: int = 96,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 256,
    seed: int = 0,
    tied: bool = False,
    spread: float = 1.0,
    eos: bool = True,
    endless: bool = False,
    chat: bool = True,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes config, generation config, tokenizer and safetensors to `folder`.

    `spread`: approximate standard deviation of the logits, in nats. `eos=False`: no end token, which engines must
    refuse. `endless`: the end token is too unlikely to be ever drawn. `overrides` go to the config.
    """
    config_type, model_type, special = SPECIAL[family] if family in SPECIAL else (*FAMILIES[family], {})
    torch.manual_seed(seed)
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS_ID if eos else None,
        pad_token_id=PAD_ID,
        **({"head_dim": hidden // heads} if family != "qwen2" else {}) | special | overrides,
    )
    model = model_type(config).to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.1)
        # The final norm makes hidden states of about unit size, so logits have this standard deviation.
        model.get_output_embeddings().weight.normal_(0, spread / hidden**0.5)
        if endless:
            _silence_end_token(model)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID if eos else None, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(vocab_size, chat=chat)
    if not eos:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


def _silence_end_token(model: Any) -> None:
    """Makes dimension 0 a positive constant of the residual stream, and the end token's logit a negative multiple."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    head = model.get_output_embeddings().weight
    head[:, 0] = 0
    model.get_input_embeddings().weight[:, 0] = 4
    head[EOS_ID] = 0
    head[EOS_ID, 0] = -40


def use_own_norms(model: torch.nn.Module) -> None:
    """Replaces the norms of Transformers, which always round to float32, by PyTorch's."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)

"""Sequence lengths at which a model's layers change their behaviour, according to its config."""

from __future__ import annotations

import re
from typing import Any

from dvp_rl.contract.errors import ConfigError

EDGE = re.compile("^(?!_).*(window|chunk|block_size|local_attention|index_topk)")
NO_EDGES = {"max_window_layers", "sliding_window_pattern", "chunk_size_feed_forward", "chunk_size_lm_head"}


def text_config(config: Any) -> Any:
    """The text part of a config, which is a separate section in a multimodal model."""
    return config.get_text_config(decoder=True)


def model_context(config: Any) -> int | None:
    """The longest sequence that engines accept for this model; None if its config names none."""
    own: int | None = getattr(text_config(config), "max_position_embeddings", None)
    limit = rope_limit(config)
    return min(own or limit, limit) if limit is not None else own


def edges(config: Any) -> list[int]:
    """Ascending lengths of the windows, chunks and blocks that the config names, whether of sliding, chunked or sparse
    attention or of a scan. They affect only longer sequences."""
    text = text_config(config)
    windows = getattr(text, "use_sliding_window", True) is not False
    found = {
        value
        for name, value in vars(text).items()
        if EDGE.search(name) and name not in NO_EDGES and (windows or name != "sliding_window")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
    return sorted(found)


def rope_limit(config: Any) -> int | None:
    """The longest sequence whose tokens keep their initial rotary angles; None if angles never change.

    The angles of longrope and dynamic NTK depend on the length of the sequence, or of the longest one in the batch.
    Beyond the limit an engine's cached keys have other angles than a trainer computes.
    """
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    limits += [text.max_position_embeddings for kind in kinds if kind.get("rope_type") == "dynamic"]
    return min(limits, default=None)


def caps_attention(config: Any) -> bool:
    """Whether large attention scores are capped (Gemma-2). Only eager attention does so; how much it changes depends on
    the weights."""
    return getattr(text_config(config), "attn_logit_softcapping", None) is not None


def narrow_layers(config: Any, context_length: int) -> list[str]:
    """Kinds of layers that do not attend to the whole context."""
    text = text_config(config)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    wide = {"full_attention"} | ({"sliding_attention"} if window and window >= context_length else set())
    return sorted(set(kinds) - wide)


def check_full_attention(config: Any, context_length: int) -> None:
    """Raises ConfigError unless every layer attends to the whole context."""
    for kind in narrow_layers(config, context_length):
        window = getattr(text_config(config), "sliding_window", None)
        cure = f"set max_context to {window} or less, or " if kind == "sliding_attention" else ""
        raise ConfigError(
            f"model type {config.model_type} has a {kind} layer (window {window}, context {context_length}), but the "
            f"transformers engine supports full attention only; {cure}use the sglang engine"
        )

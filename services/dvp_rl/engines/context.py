"""Where along a sequence a model's layers change what they do, as its config says."""

from __future__ import annotations

import re
from typing import Any

from dvp_rl.contract.errors import ConfigError

EDGE = re.compile("^(?!_).*(window|chunk|block_size|local_attention|index_topk)")
NO_EDGES = {"max_window_layers", "sliding_window_pattern", "chunk_size_feed_forward", "chunk_size_lm_head"}


def text_config(config: Any) -> Any:
    """The part of a config that is about text: of a model that takes pictures, too, it is a section of its own."""
    return config.get_text_config(decoder=True)


def edges(config: Any) -> list[int]:
    """Lengths, ascending, of what the config calls a window, a chunk or a block: of sliding, chunked or chosen
    attention, of a scan. Only a longer sequence shows what they do."""
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
    """The longest sequence whose tokens all have the angles that they had when they came; None if they never change.

    The angles of longrope and of dynamic NTK depend on the length of the sequence, or of the longest one beside it.
    Past the limit an engine's cache holds keys of other angles than a trainer computes.
    """
    text = text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    limits += [text.max_position_embeddings for kind in kinds if kind.get("rope_type") == "dynamic"]
    return min(limits, default=None)


def caps_attention(config: Any) -> bool:
    """Large attention scores are capped, which only the plain formula does (Gemma-2): how much of that shows depends on
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
            f"model type {config.model_type}: a layer is {kind} (window {window}, context {context_length}), the "
            f"transformers engine has full attention only; {cure}use the sglang engine"
        )

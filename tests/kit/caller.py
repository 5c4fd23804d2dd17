"""A model that calls a tool in about half of its turns, and answers in the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

from tests.kit.chat_templates import CHATS, make_chat_tokenizer
from tests.kit.models import make_model

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ARGUMENTS = {"a": 1}
ANSWER = "2"
CALL = f"\n{json.dumps({'name': 'add', 'arguments': ARGUMENTS})}\n"
FOLLOWS = {
    "\n": ("<tool_call>", ANSWER),
    "<tool_call>": (CALL,),
    CALL: ("</tool_call>",),
    "</tool_call>": ("<|im_end|>",),
    ANSWER: ("<|im_end|>",),
}
"""Tokens that nearly always follow one. A prompt ends with a line break."""
BOOST = 20.0
"""Their logit right after that token. All others are random, and what was read before moves all of them a little."""


def make_caller(folder: Path) -> Path:
    """A random model with Qwen2.5's chat template and these weights in its LM head."""
    chat = CHATS["qwen25"]
    tokenizer = make_chat_tokenizer(chat)
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    end = tokenizer.convert_tokens_to_ids(chat.end)
    make_model(folder, vocab_size=len(tokenizer), context=1024)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.03  # so that the hidden state is mostly that of the last token
        token_ids = torch.tensor(tokenizer(list(FOLLOWS))["input_ids"])
        hidden = model.model(token_ids).last_hidden_state[:, 0]
        for text in {text for following in FOLLOWS.values() for text in following}:
            logits = torch.tensor([BOOST * (text in following) for following in FOLLOWS.values()])
            (next_id,) = tokenizer.encode(text)
            row = model.get_output_embeddings().weight[next_id]
            row += hidden.pinverse() @ (logits - hidden @ row)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

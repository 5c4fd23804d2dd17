"""A task of long sequences that costs next to nothing: count on in steps of d, modulo M.

    prompt  <step d> <start a>         completion  a+d  a+2d  a+3d ..  (T tokens, never an end)

The reward is the share of right transitions, y_t = y_{t-1} + d, so that a slip costs what it is worth and no more, and
every sequence has credit to assign over all its tokens. The model is warm-started on a teacher that errs: near misses
inside the safe set, and slips to any token, which are the flat tail that pruning is about.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

END, MODULUS, STEPS = 0, 32, 4
"""Token ids: END, which is never drawn on purpose; 1 to M for the values; then one for each step."""
VOCAB = 64
PROMPT = 2
CONTEXT = 512
TEACHING_ROWS, TEACHING_LENGTH = 32, 32
TEACHING_RATE = 3e-3


class Teacher(NamedTuple):
    """How often it errs at a token, and how."""

    near: float = 0.20
    """One too many or too few."""
    slip: float = 0.10
    """Any token."""


def prompts(count: int, random: torch.Generator) -> Int[Tensor, "count 2"]:
    step = torch.randint(1, STEPS + 1, (count,), generator=random)
    start = torch.randint(MODULUS, (count,), generator=random)
    return torch.stack([MODULUS + step, start + 1], 1)


def rewards(prompt: Int[Tensor, "count 2"], completion: Int[Tensor, "count T"]) -> Float[Tensor, " count"]:
    """Share of right transitions."""
    before = torch.cat([prompt[:, 1:], completion[:, :-1]], 1)
    return (completion == _follow(before, prompt[:, :1] - MODULUS)).double().mean(1)


def teach(folder: Path, steps: int, seed: int = 0) -> None:
    """Saves a warm-started model; the folder appears when it is whole."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TEACHING_RATE, total_steps=steps)
    for _ in range(steps):
        prompt = prompts(TEACHING_ROWS, random)
        ids = torch.cat([prompt, _taught(prompt, Teacher(), random)], 1)
        labels = ids.clone()
        labels[:, :PROMPT] = -100
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    beside = folder.with_name(f".{folder.name}.new")
    model.save_pretrained(beside)
    beside.rename(folder)


def _follow(token_ids: Tensor, step: Tensor) -> Tensor:
    """Of no value nothing right follows."""
    value = token_ids - 1
    known = (value >= 0) & (value < MODULUS)
    return torch.where(known, (value + step) % MODULUS + 1, -1)


def _taught(prompt: Tensor, teacher: Teacher, random: torch.Generator) -> Tensor:
    """[count, TEACHING_LENGTH]; after a slip to no value it counts on from where it was."""
    count, step = len(prompt), prompt[:, 0] - MODULUS
    value, out = prompt[:, 1] - 1, []
    for _ in range(TEACHING_LENGTH):
        value = (value + step) % MODULUS
        draw = torch.rand(count, generator=random)
        sign = torch.randint(2, (count,), generator=random) * 2 - 1
        value = torch.where(draw < teacher.near, (value + sign) % MODULUS, value)
        slip = torch.randint(VOCAB, (count,), generator=random)
        token = torch.where(draw > 1 - teacher.slip, slip, value + 1)
        value = torch.where((token >= 1) & (token <= MODULUS), token - 1, value)
        out.append(token)
    return torch.stack(out, 1)


def _config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
        dtype="float32",
    )

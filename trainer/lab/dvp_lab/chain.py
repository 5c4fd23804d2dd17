"""A cheap task with long sequences: count on in steps of d, modulo M.

    prompt  <step d> <start a>         completion  a+d  a+2d  a+3d ..  (T tokens, no end token)

The reward is the share of correct transitions, y_t = y_{t-1} + d. A slip costs only the transitions that it breaks, and
credit has to be assigned over all tokens of a sequence. The model is warm-started on a teacher that makes mistakes:
near misses, which are inside the safe set, and slips to any token, which form the flat tail that pruning removes.
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
"""Token ids: 0 is END, which is never correct; 1 to MODULUS are the values; the next STEPS are the steps d."""
VOCAB = 64
PROMPT = 2
CONTEXT = 512
TEACHING_ROWS, TEACHING_LENGTH = 32, 32
TEACHING_RATE = 3e-3


class Teacher(NamedTuple):
    """Probabilities of the teacher's errors, per token."""

    near: float = 0.20
    """Off by one, up or down."""
    slip: float = 0.10
    """A token drawn uniformly from the vocabulary."""


def prompts(count: int, random: torch.Generator) -> Int[Tensor, "count 2"]:
    step = torch.randint(1, STEPS + 1, (count,), generator=random)
    start = torch.randint(MODULUS, (count,), generator=random)
    return torch.stack([MODULUS + step, start + 1], 1)


def rewards(prompt: Int[Tensor, "count 2"], completion: Int[Tensor, "count T"]) -> Float[Tensor, " count"]:
    """The share of correct transitions in each completion."""
    before = torch.cat([prompt[:, 1:], completion[:, :-1]], 1)
    return (completion == _follow(before, prompt[:, :1] - MODULUS)).double().mean(1)


def teach(folder: Path, steps: int, seed: int = 0) -> None:
    """Trains the warm-start model and saves it. The folder appears only once it is complete."""
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
    """The only correct next token; -1 if `token_ids` is not a value, as nothing correct follows."""
    value = token_ids - 1
    known = (value >= 0) & (value < MODULUS)
    return torch.where(known, (value + step) % MODULUS + 1, -1)


def _taught(prompt: Tensor, teacher: Teacher, random: torch.Generator) -> Tensor:
    """Taught completions, [count, TEACHING_LENGTH]. A slip to a token that is not a value does not shift the count."""
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

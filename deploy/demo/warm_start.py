"""Small models for the demo: one token per character, warm-started by supervised training on what a teacher says."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = sorted(set(string.printable) - set(string.whitespace) | {" "})


class Task(Protocol):
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> int: ...


class Part(NamedTuple):
    """A piece of a text that the model learns from."""

    text: str
    drawn: bool
    """Whether the model learns to write it; it only reads the rest."""


class Batch(NamedTuple):
    """Right-padded token ids [rows, length]; labels are -100 on what the model only reads and on padding."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def slip(digits: str, rng: random.Random) -> str:
    """The digits with a random one in a random place."""
    wrong = list(digits)
    wrong[rng.randrange(len(wrong))] = rng.choice(string.digits)
    return "".join(wrong)


def make_tokenizer(
    pad: str, end: str, unknown: str, context: int, special: Sequence[str] = (), pieces: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """One token per printable character, special token and piece, no normalisation: encode and decode are exact
    inverses. `end` ends what the model writes; `pieces` are texts of several characters that are one token."""
    vocabulary = {token: i for i, token in enumerate([pad, end, unknown, *special, *pieces, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    network = Qwen3ForCausalLM(config)
    network.generation_config = GenerationConfig(**ids)
    return network


def batches(examples: Iterator[Sequence[Part]], tokenizer: PreTrainedTokenizerFast, size: int) -> Iterator[Batch]:
    """Batches of `size` examples each, for as long as there are any."""
    while chosen := list(islice(examples, size)):
        rows = [[(token, part.drawn) for part in parts for token in tokenizer.encode(part.text)] for parts in chosen]
        shape = len(rows), max(map(len, rows))
        input_ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, -100)
        for at, row in enumerate(rows):
            ids, drawn = (torch.tensor(column) for column in zip(*row, strict=True))
            input_ids[at, : len(row)] = ids
            labels[at, : len(row)] = torch.where(drawn, ids, -100)
        yield Batch(input_ids, labels)


def warm_start(network: Qwen3ForCausalLM, data: Iterator[Batch], steps: int, learning_rate: float) -> float:
    """Trains on `steps` batches: cross-entropy, one-cycle learning rate. Returns the last loss in nats per token."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    loss = torch.tensor(0.0)
    network.train()
    for step, batch in enumerate(data):
        loss = network(input_ids=batch.input_ids, labels=batch.labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            typer.echo(f"  step {step:5d}  loss {loss.item():.3f}")
    network.eval()
    return loss.item()


def save(
    out: Path,
    network: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: Sequence[Task],
    heldout: Sequence[Task],
) -> None:
    """Writes model/, train.jsonl and heldout.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    for name, tasks in (("train", train), ("heldout", heldout)):
        rows = [json.dumps({"prompt": task.prompt, "answer": str(task.answer)}) for task in tasks]
        (out / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    network.save_pretrained(out / "model")
    (out / "model" / "model.safetensors").chmod(0o644)  # containers read it as another user
    tokenizer.save_pretrained(out / "model")

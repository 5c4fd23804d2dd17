"""A small language model for studies, trained on what every Python has: the source of its standard library.

Its vocabulary is 1024 tokens of byte-level BPE. It is almost sure of the next token in some places and has a long tail
in others: a study of tails needs both, and random weights give neither. It is trained once, in a few minutes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB, CONTEXT = 1024, 512
HELDOUT_EVERY = 10
"""Every tenth file is held out of training; prompts come from the held-out files."""
STEPS, ROWS, LENGTH = 1500, 16, 128
LEARNING_RATE = 3e-3
SEED = 0
"""Fixed, so that every study sees the same model."""


class Corpus(NamedTuple):
    train: Tensor
    """[tokens] ids of all training files, concatenated."""
    heldout: Tensor

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerFast) -> Corpus:
        parts: tuple[list[str], list[str]] = ([], [])
        for number, text in enumerate(_sources()):
            parts[number % HELDOUT_EVERY == 0].append(text)
        return cls(*(torch.tensor([i for ids in tokenizer(part).input_ids for i in ids]) for part in parts))

    def prompts(self, count: int, length: int, seed: int) -> Tensor:
        """[count, length] token ids from random places in the held-out files."""
        return _windows(self.heldout, count, length, torch.Generator().manual_seed(seed))


def make(folder: Path, progress: Callable[[int, int, str], None]) -> None:
    """Trains the model and saves it with its tokenizer, and calls `progress(done, total, what)` after every step. The
    folder appears only once it is complete."""
    torch.manual_seed(SEED)
    tokenizer = _train_tokenizer()
    model = _network()
    corpus = Corpus.read(tokenizer)
    for step, loss in enumerate(_train(model, corpus.train), start=1):
        progress(step, STEPS, f"training a language model, loss {loss:.2f}")
    beside = folder.with_name(f".{folder.name}.new")
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(folder)


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8")


def _train_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_sources(), vocab_size=VOCAB, special_tokens=["<eos>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", pad_token="<eos>")


def _network() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def _train(model: Any, tokens: Tensor) -> Iterator[float]:
    """Trains on the next-token cross entropy of random windows. Yields the loss of every step."""
    random = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    model.train()
    for _ in range(STEPS):
        ids = _windows(tokens, ROWS, LENGTH, random)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())


def _windows(tokens: Tensor, count: int, length: int, random: torch.Generator) -> Tensor:
    starts = torch.randint(len(tokens) - length, (count, 1), generator=random)
    return tokens[starts + torch.arange(length)]

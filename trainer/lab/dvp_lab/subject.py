"""The subject of a study: a model and its prompts, in blocks that are decoded together."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from dvp_rl.contract.errors import ConfigError
from dvp_rl.engines.tokenizer import load_tokenizer

from .text_model import Corpus, make

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

ROWS = 16
"""Most prompts per block. The logits of both sides of a block are in memory at once."""
PROMPT_TOKENS = 16

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (done, total, what)."""


class Subject(NamedTuple):
    folder: Path
    prompts: tuple[Int[Tensor, "N P"], ...]
    """Blocks of at most ROWS prompts that are equally long."""
    words: str
    """Description of model and prompts, shown in the study's settings."""

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.prompts))


def text_subject(folder: Path, count: int, seed: int, progress: Progress) -> Subject:
    """The language model of text_model.py and held-out prompts. Trains the model first if the folder has none."""
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder, progress)
    prompts = Corpus.read(load_tokenizer(folder).core).prompts(count, PROMPT_TOKENS, seed)
    words = "a language model trained on Python's standard library; prompts from files that it was not trained on"
    return Subject(folder, torch.split(prompts, ROWS), words)


def file_subject(folder: Path, file: Path, count: int, seed: int) -> Subject:
    """Any model folder and up to `count` random prompts from a JSONL file with a text `prompt` per row."""
    tokenizer = load_tokenizer(folder)
    rows = list(_rows(file))
    chosen = random.Random(seed).sample(rows, min(count, len(rows)))
    encoded = sorted((tokenizer.encode(text) for text in chosen), key=len)
    by_length: dict[int, list[list[int]]] = {}
    for ids in encoded:
        by_length.setdefault(len(ids), []).append(ids)
    blocks = [block for same in by_length.values() for block in torch.split(torch.tensor(same), ROWS)]
    return Subject(folder, tuple(blocks), f"{folder}, prompts from {file}")


def _rows(file: Path) -> Iterator[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"prompts {file}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"prompts {file}: line {number} is not a JSON object with a prompt") from None

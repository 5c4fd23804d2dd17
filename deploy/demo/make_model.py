"""Makes the demo's model folder and its data: `python -m deploy.demo.make_model`.

The model is an ordinary Hugging Face folder: a two-layer Qwen3 with one token per character. It is warm-started by
supervised training on sums with many wrong answers, so that it knows how to add but is right only about one time in
three. Every prompt therefore has right and wrong samples for reinforcement learning to work on. The rare random slips
leave a flat tail at most positions, which a scaled min-p prunes.

The same seed and number of threads make the same files.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .warm_start import Part, batches, make_network, make_tokenizer, save, slip, warm_start

HERE = Path(__file__).parent
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
NUM_TRAIN, NUM_HELDOUT = 4000, 200
CONTEXT = 64


class Sum(NamedTuple):
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> int:
        return self.left + self.right


class Teacher(NamedTuple):
    """Shares of the answers shown during the warm start; the rest are random slips of one digit."""

    right: float = 0.30
    near_miss: float = 0.50
    """Off by 1 or by 10, as carry mistakes are."""

    def answer(self, task: Sum, rng: random.Random) -> str:
        draw = rng.random()
        if draw < self.right:
            return str(task.answer)
        if draw < self.right + self.near_miss:
            return str(task.answer + rng.choice((-10, -1, 1, 10)))
        return slip(str(task.answer), rng)

    def example(self, task: Sum, rng: random.Random) -> list[Part]:
        return [Part(task.prompt, drawn=False), Part(f"{self.answer(task, rng)}{EOS}", drawn=True)]


def split_sums(rng: random.Random) -> tuple[list[Sum], list[Sum]]:
    """(train, held-out). No held-out sum occurs in train, in either order of its terms."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)

    def both_orders(pairs: Sequence[tuple[int, int]]) -> list[Sum]:
        sums = sorted({Sum(a, b) for a, b in pairs} | {Sum(b, a) for a, b in pairs})
        rng.shuffle(sums)
        return sums

    heldout = both_orders(pairs[:NUM_HELDOUT])[:NUM_HELDOUT]
    return both_orders(pairs[NUM_HELDOUT:])[:NUM_TRAIN], heldout


@torch.inference_mode()
def score(
    network: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, sums: Sequence[Sum], *, temperature: float
) -> float:
    """Share of prompts answered correctly by one sample (temperature 0: greedily), without pruning the vocabulary."""
    encoded = tokenizer([task.prompt for task in sums], padding=True, padding_side="left", return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = network.generate(
        input_ids=encoded.input_ids, attention_mask=encoded.attention_mask, max_new_tokens=5, **sampling
    )
    texts = tokenizer.batch_decode(output[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)
    right: int = sum(text == str(task.answer) for text, task in zip(texts, sums, strict=True))
    return right / len(sums)


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets model/, train.jsonl and heldout.jsonl.")] = HERE,
    seed: int = 0,
    steps: Annotated[int, typer.Option(help="Steps of the warm start.")] = 1200,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    threads: int = 1,
) -> None:
    """Makes the demo's model and data."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    train, heldout = split_sums(rng)
    tokenizer = make_tokenizer(PAD, EOS, UNKNOWN, CONTEXT)
    network = make_network(tokenizer)
    size = sum(parameter.numel() for parameter in network.parameters())
    typer.echo(f"{size:,} parameters, vocabulary {len(tokenizer)}, {len(train)} train and {len(heldout)} held-out sums")
    teacher = Teacher()
    examples = (teacher.example(task, rng) for _ in range(steps) for task in rng.choices(train, k=batch_size))
    loss = warm_start(network, batches(examples, tokenizer, batch_size), steps, learning_rate)
    save(out, network, tokenizer, train, heldout)
    sampled, greedy = (score(network, tokenizer, heldout, temperature=t) for t in (1.0, 0.0))
    typer.echo(
        f"loss {loss:.3f}, held-out answers right: {sampled:.1%} sampled, {greedy:.1%} greedy; "
        f"{time.monotonic() - started:.0f} s; written to {out}"
    )


if __name__ == "__main__":
    typer.run(main)

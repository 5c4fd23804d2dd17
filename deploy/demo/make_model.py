"""Makes the demo's model folder and its data: `python -m deploy.demo.make_model`.

The model is an ordinary Hugging Face folder: a two-layer Qwen3 with one token per character. It is warm-started by
supervised training on sums with many wrong answers, so that it knows how to add but is right only about one time in
three. Every prompt therefore has right and wrong samples for reinforcement learning to work on. The rare random slips
leave a flat tail at most positions, which a scaled min-p prunes.

The same seed and number of threads make the same files.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = sorted(set(string.printable) - set(string.whitespace) | {" "})
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
        digits = list(str(task.answer))
        digits[rng.randrange(len(digits))] = rng.choice(string.digits)
        return "".join(digits)


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


def write_rows(path: Path, sums: Sequence[Sum]) -> None:
    rows = [json.dumps({"prompt": task.prompt, "answer": str(task.answer)}) for task in sums]
    path.write_text("\n".join(rows) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, no normalisation: encode and decode are exact inverses."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT,
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
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    network = Qwen3ForCausalLM(config)
    network.generation_config = GenerationConfig(**ids)
    return network


class Batch(NamedTuple):
    """Right-padded token ids [rows, length]; labels are -100 on the prompt and on padding."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def batches(
    sums: Sequence[Sum], teacher: Teacher, tokenizer: PreTrainedTokenizerFast, size: int, rng: random.Random
) -> Iterator[Batch]:
    while True:
        chosen = rng.choices(sums, k=size)
        prompts = [tokenizer.encode(task.prompt) for task in chosen]
        answers = [[*tokenizer.encode(teacher.answer(task, rng)), tokenizer.eos_token_id] for task in chosen]
        length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        input_ids = torch.full((size, length), tokenizer.pad_token_id)
        labels = torch.full((size, length), -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            input_ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield Batch(input_ids, labels)


def warm_start(network: Qwen3ForCausalLM, data: Iterator[Batch], steps: int, learning_rate: float) -> float:
    """Trains with cross-entropy on the answers, one-cycle learning rate. Returns the last loss in nats per token."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=0.05, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    loss = torch.tensor(0.0)
    network.train()
    for step in range(steps):
        batch = next(data)
        loss = network(input_ids=batch.input_ids, labels=batch.labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            typer.echo(f"  step {step:5d}  loss {loss.item():.3f}")
    network.eval()
    return float(loss)


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
    tokenizer = make_tokenizer()
    network = make_network(tokenizer)
    size = sum(parameter.numel() for parameter in network.parameters())
    typer.echo(f"{size:,} parameters, vocabulary {len(tokenizer)}, {len(train)} train and {len(heldout)} held-out sums")
    loss = warm_start(network, batches(train, Teacher(), tokenizer, batch_size, rng), steps, learning_rate)
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "train.jsonl", train)
    write_rows(out / "heldout.jsonl", heldout)
    network.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    sampled, greedy = (score(network, tokenizer, heldout, temperature=t) for t in (1.0, 0.0))
    typer.echo(
        f"loss {loss:.3f}, held-out answers right: {sampled:.1%} sampled, {greedy:.1%} greedy; "
        f"{time.monotonic() - started:.0f} s; written to {out}"
    )


if __name__ == "__main__":
    typer.run(main)

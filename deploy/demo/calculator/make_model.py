"""Makes the model and the data of the demo's second task: `python -m deploy.demo.calculator.make_model`.

The model has a chat template of its own and calls tools as `<call>{"name": ..., "arguments": {...}}</call>`. The pieces
of that JSON that are always the same are one token each. The model is warm-started on episodes of a careless teacher,
who often guesses the result, miscopies a number or calls a tool that does not exist. So it knows how to work with the
calculator, but often answers wrongly.

The same seed and number of threads make the same files.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from deploy.demo.warm_start import Part, batches, make_network, make_tokenizer, save, slip, warm_start

HERE = Path(__file__).parent
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
USER, MODEL, TOOL, CALL, CALLED = "<user>", "<model>", "<tool>", "<call>", "</call>"
JSON = ('{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")
CONTEXT = 192
NUM_TRAIN, NUM_HELDOUT = 4000, 200
TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<model>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</call>' }}
        {%- endfor %}
        {{- '<end>' }}
    {%- else %}
        {{- ('<tool>' if message.role == 'tool' else '<user>') + message.content + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<model>' }}
{%- endif %}
"""


class Task(NamedTuple):
    numbers: tuple[int, ...]
    """To be added, two to four of two digits each; those after the first may be negative."""

    @property
    def prompt(self) -> str:
        first, *others = self.numbers
        return f"{first}{''.join(f'{number:+}' for number in others)}="

    @property
    def answer(self) -> int:
        return sum(self.numbers)


class Teacher(NamedTuple):
    """Shares of the teacher's mistakes."""

    wrong_tool: float = 0.25
    """Of the episodes: begins with a call of a tool that does not exist."""
    guess: float = 0.35
    """Of the turns: does the rest in the head, and is off by 1 or by 10."""
    slip: float = 0.10
    """Of the calls: miscopies a digit."""

    def episode(self, task: Task, rng: random.Random) -> list[Part]:
        """An episode as the chat template renders it."""
        parts = [Part(f"{USER}{task.prompt}{END}{MODEL}", drawn=False)]
        total, *rest = task.numbers
        if rng.random() < self.wrong_tool:
            name = rng.choice(("plus", "sum", "minus", "diff"))
            parts += _call(name, total, abs(rest[0]), f"error: there is no tool {name!r}, only add, sub")
        while rest and rng.random() >= self.guess:
            number = rest.pop(0)
            read = _miscopied(total, rng) if rng.random() < self.slip else total
            total = read + number
            parts += _call("add" if number > 0 else "sub", read, abs(number), str(total))
        if rest:
            total += sum(rest) + rng.choice((-10, -1, 1, 10))
        return [*parts, Part(f"{total}{END}", drawn=True)]


def _call(name: str, a: int, b: int, reply: str) -> list[Part]:
    call = f"{CALL}{JSON[0]}{name}{JSON[1]}{a}{JSON[2]}{b}{JSON[3]}{CALLED}{END}"
    return [Part(call, drawn=True), Part(f"{TOOL}{reply}{END}{MODEL}", drawn=False)]


def _miscopied(number: int, rng: random.Random) -> int:
    wrong = int(slip(str(abs(number)), rng))
    return -wrong if number < 0 else wrong


def make_tasks(count: int, rng: random.Random) -> list[Task]:
    """Different tasks."""
    tasks: dict[Task, None] = {}
    while len(tasks) < count:
        others = (rng.choice((-1, 1)) * rng.randrange(10, 100) for _ in range(rng.choice((1, 2, 3))))
        tasks[Task((rng.randrange(10, 100), *others))] = None
    return list(tasks)


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets model/, train.jsonl and heldout.jsonl.")] = HERE,
    seed: int = 0,
    steps: Annotated[int, typer.Option(help="Steps of the warm start.")] = 600,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    threads: int = 1,
) -> None:
    """Makes the model and the data of the calculator task."""
    started = time.monotonic()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tasks = make_tasks(NUM_HELDOUT + NUM_TRAIN, rng)
    heldout, train = tasks[:NUM_HELDOUT], tasks[NUM_HELDOUT:]
    tokenizer = make_tokenizer(PAD, END, UNKNOWN, CONTEXT, (USER, MODEL, TOOL, CALL, CALLED), JSON)
    tokenizer.chat_template = TEMPLATE
    network = make_network(tokenizer)
    teacher = Teacher()
    examples = (teacher.episode(task, rng) for _ in range(steps) for task in rng.choices(train, k=batch_size))
    loss = warm_start(network, batches(examples, tokenizer, batch_size), steps, learning_rate)
    save(out, network, tokenizer, train, heldout)
    typer.echo(f"loss {loss:.3f}, {time.monotonic() - started:.0f} s; written to {out}")


if __name__ == "__main__":
    typer.run(main)

"""Completions as people see them: text, reward, advantage, what training did with them, and kept mass per token.

They go to out_dir/completions.jsonl, to the terminal, to the report and to W&B. The file has a line per step that
shows them, {"step", "completions": [fields of Completion]}. They hold prompts, so only the owner can read file and
report, and nothing is printed where there is no terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

FILE = "completions.jsonl"
RECORD = re.compile(rb'\{"step": (\d+), "completions": ')
MAX_TOKENS = 1024
"""Most tokens kept of a completion: of a longer one, the first and the last half of that."""
PRUNED = (0.001, 0.01, 0.1)
"""Shares of probability that min-p removed at a token, from which the token is marked: a little, more, much."""
TERMINAL_ROWS = 4
TERMINAL_CHARACTERS = 400
TERMINAL_LINES = 12
WIDE = 80
"""Columns of a terminal from which the table has more than one column."""
CONTROLS = dict.fromkeys({*range(32), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")}, "\ufffd")
"""Replaces control characters: a completion must not steer the terminal."""
COLUMNS = ("row", "prompt", "text", "answer", "reward", "advantage", "fate", "weight", "finish_reason", "num_tokens")
"""Fields of a Completion for a table without tokens."""


class Fate(StrEnum):
    """What training did with a sequence."""

    TRAINED = "trained"
    NO_SIGNAL = "equal rewards"
    """All samples of its group have the same reward: no gradient."""
    OUTSIDE = "veto: outside"
    RATIO = "veto: ratio"
    NAN = "veto: NaN"
    REJECTED = "MIS"
    """Its importance weight is out of bounds."""
    TOO_LONG = "cut off"
    """max_tokens cut it off, and reward.overlong leaves it out."""
    NO_STEP = "no step"
    """The batch made no optimizer step: the gradient was not finite."""
    OWN = "own objective"
    """The user's objective decides, whatever its weight."""


@dataclass(frozen=True)
class Completion:
    row: int
    """Row number in the data set."""
    prompt: str
    """As the model reads it, special tokens included."""
    answer: str | None
    reward: float
    advantage: float
    fate: Fate
    weight: float | None
    """Mean importance weight of its tokens; None if its group did not reach the model."""
    finish_reason: str
    num_tokens: int
    num_skipped: int
    """Number of tokens that the lists below leave out in their middle."""
    tokens: list[str]
    """The text that each token adds; "" for one that ends within a character."""
    kept_mass: list[float]
    """Probability of the replica's safe set, per token."""
    infer_logprobs: list[float | None]
    train_logprobs: list[float | None] | None
    """None if its group did not reach the model. An entry is None where the log-prob is not finite."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.marked())

    def marked(self) -> Iterator[tuple[str, int]]:
        """Pieces of the text, each with the number of PRUNED thresholds that one of its tokens reaches."""
        mark = 0
        for i, (text, mass) in enumerate(zip(self.tokens, self.kept_mass, strict=True)):
            if self.num_skipped and i == MAX_TOKENS // 2:
                yield f" [... {self.num_skipped} tokens left out ...] ", 0
            mark = max(mark, sum(round(1 - mass, 6) >= share for share in PRUNED))
            if text:  # otherwise within a character: the next token completes it
                yield text, mark
                mark = 0


def completion_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and line of each record of a completions file, read one by one; what is no record is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (found := RECORD.match(line)) and line.endswith(b"\n"):
                yield int(found[1]), line


def read_completions(line: bytes) -> list[Completion]:
    """The completions of a line; none if it is damaged, or was written by another version."""
    try:
        return [Completion(**fields) for fields in json.loads(line)["completions"]]
    except (ValueError, TypeError, KeyError):
        return []


def completions_table(step: int, completions: Sequence[Completion], *, width: int, encoding: str = "utf-8") -> Table:
    """For a terminal of `width` columns. Colours show how much probability min-p removed."""
    from rich.table import Table
    from rich.text import Text

    def shown(pieces: Iterable[tuple[str, str]]) -> Text:
        """The beginning of the text, with what the terminal cannot show replaced."""
        text, room = Text(), TERMINAL_CHARACTERS
        for piece, style in pieces:
            clean = piece.translate(CONTROLS).encode(encoding, "replace").decode(encoding)
            text.append(clean[:room], style)
            room -= len(clean)
            if room < 0 or text.plain.count("\n") >= TERMINAL_LINES:
                return text.append(" ...")
        return text

    styles = ("", "yellow", "orange1", "red")
    shares = ", ".join(f"{style} {100 * share:g} %" for style, share in zip(styles[1:], PRUNED, strict=True))
    table = Table(
        title=f"step {step}: best and worst completion of a prompt",
        caption=f"colours: min-p removed at least this much probability: {shares}",
        show_lines=True,
        show_header=width >= WIDE,
        expand=True,
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    if width >= WIDE:
        table.add_column("completion", ratio=3, overflow="fold")
        for name in ("reward", "advantage", "training"):
            table.add_column(name, justify="right")
    for completion in completions[:TERMINAL_ROWS]:
        end = completion.prompt[-TERMINAL_CHARACTERS:].split("\n")[-TERMINAL_LINES:]
        prompt = shown([("\n".join(end), "dim")])
        text = shown((piece, styles[mark]) for piece, mark in completion.marked())
        facts = (f"{completion.reward:.3g}", f"{completion.advantage:.3g}", completion.fate)
        if width >= WIDE:
            table.add_row(prompt, text, *facts)
        else:
            table.add_row(Text("\n").join([prompt, text, Text("reward {}, advantage {}, {}".format(*facts))]))
    return table

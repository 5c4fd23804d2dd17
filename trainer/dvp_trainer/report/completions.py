"""Completions as people see them: text, reward, advantage, what training did with them, and kept mass per token.

They go to out_dir/completions.jsonl, to the terminal, to the report and to W&B. They hold prompts, so the file can be
read only by its owner, and nothing is printed where there is no terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

MAX_TOKENS = 1024
"""Most tokens kept of a completion: of a longer one, the first and the last half of that."""
PRUNED = (0.001, 0.01, 0.1)
"""Shares of probability that min-p removed at a token, from which the token is marked: a little, more, much."""
TERMINAL_ROWS = 4
TERMINAL_CHARACTERS = 400
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
        """Pieces of the text, each with the number of PRUNED thresholds that it reaches."""
        for i, (text, mass) in enumerate(zip(self.tokens, self.kept_mass, strict=True)):
            if self.num_skipped and i == MAX_TOKENS // 2:
                yield f" [... {self.num_skipped} tokens left out ...] ", 0
            yield text, sum(1 - mass >= share for share in PRUNED)


def completions_table(step: int, completions: Sequence[Completion]) -> Table:
    """For a terminal. Colours show how much probability min-p removed."""
    from rich.table import Table
    from rich.text import Text

    styles = ("", "yellow", "orange1", "red")
    shares = ", ".join(f"{style} {100 * share:g} %" for style, share in zip(styles[1:], PRUNED, strict=True))
    table = Table(
        title=f"step {step}: best and worst completion of a prompt",
        caption=f"colours: min-p removed at least this much probability: {shares}",
        show_lines=True,
        expand=True,
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    for name in ("reward", "advantage", "training"):
        table.add_column(name, justify="right")
    for completion in completions[:TERMINAL_ROWS]:
        prompt = completion.prompt.translate(CONTROLS)
        text = Text.assemble(*((piece.translate(CONTROLS), styles[mark]) for piece, mark in completion.marked()))
        text.truncate(TERMINAL_CHARACTERS, overflow="ellipsis")
        table.add_row(
            Text(prompt if len(prompt) <= TERMINAL_CHARACTERS else "…" + prompt[-TERMINAL_CHARACTERS:]),
            text,
            f"{completion.reward:.3g}",
            f"{completion.advantage:.3g}",
            completion.fate,
        )
    return table

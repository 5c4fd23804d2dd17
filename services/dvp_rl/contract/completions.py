"""Completions as people see them: text, reward, advantage, what training did with them, and kept mass per token.

The trainer writes them to out_dir/completions.jsonl: a line per step that shows them, {"step", "completions": [fields
of Completion]}. They hold prompts, so only the owner can read the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

COMPLETIONS = "completions.jsonl"
RECORD = re.compile(rb'\{"step": (\d{1,15}), "completions": ')
MAX_TOKENS = 1024
"""Most tokens kept of a completion: of a longer one, the first and the last half of that."""
PRUNED = (0.001, 0.01, 0.1)
"""Shares of probability that min-p removed at a token, from which the token is marked: a little, more, much."""
ENVIRONMENT = -1
"""The mark of a token that the model did not draw."""


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
    kept_mass: list[float | None]
    """Probability of the replica's safe set, per token; None where the environment's token is."""
    infer_logprobs: list[float | None]
    """As kept_mass, and None where the log-prob is not finite."""
    train_logprobs: list[float | None] | None
    """As infer_logprobs. None if its group did not reach the model."""
    num_environment: int = 0
    """Number of the tokens that the environment gave."""
    num_forks: int = 0
    """Number of earlier samples of its episode, whose history was then rewritten. They share reward and weight."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.marked())

    def pieces(self) -> Iterator[tuple[str, int]]:
        """As `marked`, with neighbours of equal marks joined."""
        for mark, run in groupby(self.marked(), lambda marked: marked[1]):
            yield "".join(text for text, _ in run), mark

    def marked(self) -> Iterator[tuple[str, int]]:
        """Pieces of the text, each with the number of PRUNED thresholds that one of its tokens reaches, or with
        ENVIRONMENT."""
        mark = 0
        for i, (text, mass) in enumerate(zip(self.tokens, self.kept_mass, strict=True)):
            if self.num_skipped and i == MAX_TOKENS // 2:
                yield f" [... {self.num_skipped} tokens left out ...] ", 0
            mark = ENVIRONMENT if mass is None else max(mark, sum(round(1 - mass, 6) >= share for share in PRUNED))
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
    except (ValueError, TypeError, KeyError, RecursionError):
        return []

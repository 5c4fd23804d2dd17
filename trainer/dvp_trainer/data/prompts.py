"""The prompts of a run, in an order that is a pure function of (seed, position).

The data cursor is one integer, so a resumed run continues exactly where it stopped. Layouts are recognised by their
column names: plain (prompt, answer), chat lists (messages), DAPO-math (a chat list in `prompt`, the answer in
`reward_model.ground_truth`) and AIME (problem or Problem, answer or Answer).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from dvp_rl.contract.errors import ConfigError
from dvp_rl.contract.http import Message
from dvp_rl.contract.record import describe

from .sources import Records, open_records

log = logging.getLogger(__name__)

TEMPLATE_TOKENS = 1024
"""Tokens that special tokens, roles and turns may add to a prompt."""
PROMPT_COLUMNS = ("prompt", "messages", "problem", "Problem", "question", "Question")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "Answer", "ground_truth")

Prompt: TypeAlias = str | tuple[Message, ...]


class Order(StrEnum):
    SHUFFLED = "shuffled"
    """A different permutation in every epoch."""
    SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class Row:
    """One prompt of the data set."""

    index: int
    """Row number in the source, from 0."""
    prompt: Prompt
    """Plain text, or chat messages for the model's chat template."""
    answer: str | None = None
    """Answer that the reward compares with. Numbers are converted to text, other values to JSON."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns but the prompt's, with their original values."""
    answer_column: str | None = None
    prompt_column: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """All columns but prompt and answer."""
        return {name: value for name, value in self.columns.items() if name != self.answer_column}

    @property
    def text(self) -> str:
        """The prompt as a reward function sees it: for a chat, the contents joined by blank lines."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(m.content for m in self.prompt)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the prompt's messages; () for plain text."""
        return () if isinstance(self.prompt, str) else tuple(message.role for message in self.prompt)

    @property
    def key(self) -> int:
        """Hash by which this process tells prompts apart."""
        return hash((self.roles, self.text))


class Layout(NamedTuple):
    """How a record is read."""

    prompt: str | None = None
    """Name of the prompt's column; None: recognised. A dot selects a nested column."""
    answer: str | None = None
    """Likewise of the answer's column."""
    as_chat: bool = False
    """Plain text becomes the user's message of a chat."""
    system_prompt: str | None = None
    """First message of every prompt, plain text included."""


RECOGNISED = Layout()


class Prompts:
    """An endless sequence of rows, epoch after epoch, addressed by position."""

    def __init__(
        self,
        source: str,
        records: Records,
        kept: NDArray[np.int64],
        keys: NDArray[np.int64],
        fingerprint: str,
        *,
        layout: Layout,
        order: Order,
        seed: int,
    ) -> None:
        self.source, self.fingerprint = source, fingerprint
        """`fingerprint`: hash of the rows and their order, 16 hex digits. A cursor is valid only under its own."""
        self.keys = keys
        """[D] `Row.key` of the D different prompts, ascending."""
        self._records, self._kept, self._layout = records, kept, layout
        self._order, self._seed = order, seed

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Row]:
        """One epoch in source order, as held-out sets are read."""
        return (self._row(int(index)) for index in self._kept)

    def first(self, count: int) -> list[Row]:
        """The first `count` rows in order of positions, or one epoch if it has fewer."""
        return [self.row_at(position) for position in range(min(count, len(self)))]

    def row_at(self, position: int) -> Row:
        """The row at `position` >= 0; a pure function of the data set, the order and the seed."""
        epoch, offset = divmod(position, len(self))
        if self._order is Order.SHUFFLED:
            offset = int(permutation(len(self), self._seed, epoch)[offset])
        return self._row(int(self._kept[offset]))

    def _row(self, index: int) -> Row:
        return parse_row(self._records[index], index, self.source, self._layout)


def load_prompts(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    layout: Layout = RECOGNISED,
    needs_answer: bool = False,
    order: Order = Order.SHUFFLED,
    seed: int = 0,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    context: int | None = None,
    count_tokens: Callable[[Row], int] = lambda row: 0,
    rendering: str = "",
    setting: str = "data.train",
) -> Prompts:
    """Opens a source (see sources.py) and reads every row once, so that a bad row stops the run before it starts.

    `limit` takes the first rows of the source; of these, prompts of more than `max_prompt_tokens` tokens by
    `count_tokens` are left out, and those that leave no room for a token in a `context` of so many tokens. `rendering`
    is what decides, besides rows and model, how prompts become tokens; it goes into the fingerprint. Raises ConfigError
    as `open_records`, `parse_row` and `count_tokens` do, if `needs_answer` is set and a row has no answer, and if no
    row is left.
    """
    records = open_records(source, split=split, subset=subset, setting=setting)
    kept: list[int] = []
    prompts: set[int] = set()
    num_long = num_beyond = num_unanswered = 0
    unanswered = ""
    added_tokens = TEMPLATE_TOKENS
    digest = hashlib.sha256(f"{order} {seed}{rendering}".encode())
    for index, record in zip(range(len(records) if limit is None else limit), records, strict=False):
        row = parse_row(record, index, source, layout)
        if needs_answer and row.answer is None:
            raise ConfigError(_missing("answer", record, index, source, layout.answer, ANSWER_COLUMNS))
        if added_tokens == TEMPLATE_TOKENS and not isinstance(row.prompt, str):
            added_tokens += count_tokens(row)  # a whole prompt, hence no less than what the template adds to it
        if max_prompt_tokens is not None or (context is not None and most_tokens(row, added_tokens) >= context):
            num_tokens = count_tokens(row)
            too_long = max_prompt_tokens is not None and num_tokens > max_prompt_tokens
            beyond = context is not None and num_tokens >= context
            num_long += too_long
            num_beyond += beyond and not too_long
            if too_long or beyond:
                continue
        kept.append(index)
        if row.answer is None:
            num_unanswered += 1
            unanswered = unanswered or _missing("answer", record, index, source, layout.answer, ANSWER_COLUMNS)
        prompts.add(row.key)
        prompt = row.text if isinstance(row.prompt, str) or not rendering else [[m.role, m.content] for m in row.prompt]
        digest.update(json.dumps([index, prompt, row.answer]).encode())
    if not kept:
        raise ConfigError(
            f"{source}: no prompt is left: {num_long} are longer than data.max_prompt_tokens = {max_prompt_tokens}, "
            f"and {num_beyond} fill the model's context of {context} tokens"
        )
    long = "" if max_prompt_tokens is None else f", {num_long} left out as longer than {max_prompt_tokens} tokens"
    log.info("%s: %d rows, %d different prompts%s", source, len(kept), len(prompts), long)
    if num_beyond:
        log.warning(
            "%s: %d of %d prompts are left out: they fill the model's context of %s tokens, so no replica could answer",
            *(source, num_beyond, len(kept) + num_long + num_beyond, context),
        )
    if num_unanswered:
        log.warning("%s. The reward gets None there, as in %d of %d rows", unanswered, num_unanswered, len(kept))
    fingerprint = digest.hexdigest()[:16]
    rows, keys = np.array(kept, np.int64), np.sort(np.fromiter(prompts, np.int64, len(prompts)))
    return Prompts(source, records, rows, keys, fingerprint, layout=layout, order=order, seed=seed)


def most_tokens(row: Row, added_tokens: int) -> int:
    """A bound on the prompt's tokens without counting them, which takes long for large data: one per byte, and those
    that special tokens and chat template add."""
    return len(row.text.encode(errors="replace")) + added_tokens


def parse_row(record: dict[str, Any], index: int, source: str, layout: Layout = RECOGNISED) -> Row:
    """The parsed row. Raises ConfigError if it has no usable prompt, with an error that names source, row and column;
    if no column holds a prompt, it names the row's columns and those looked for."""
    if not isinstance(record, dict):
        raise ConfigError(f"{source}: row {index} is of type {type(record).__name__}, expected a dict of columns")
    prompt_name, prompt = _find(record, (layout.prompt,) if layout.prompt else PROMPT_COLUMNS)
    if prompt_name is None or prompt in ("", []):
        raise ConfigError(_missing("prompt", record, index, source, layout.prompt, PROMPT_COLUMNS))
    answer_name, answer = _find(record, (layout.answer,) if layout.answer else ANSWER_COLUMNS)
    parsed = _parse_prompt(prompt, f"{source}: row {index}, {prompt_name}", layout)
    others = {name: value for name, value in record.items() if name != prompt_name}
    return Row(index, parsed, _as_text(answer), others, answer_name, prompt_name)


def _find(record: dict[str, Any], names: tuple[str, ...]) -> tuple[str | None, Any]:
    """The first of `names` for which the record has a value, and that value; (None, None) if there is none."""
    for name in names:
        value: Any = record
        for part in (name,) if name in record else name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return name, value
    return None, None


def _parse_prompt(prompt: Any, where: str, layout: Layout) -> Prompt:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: not Unicode text ({error.reason} at character {error.start})") from None
        if not layout.as_chat and layout.system_prompt is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise ConfigError(f"{where}: expected text or a list of chat messages, got {type(prompt).__name__}")
    fields = ({name: message.get(name) for name in ("role", "content")} for message in prompt)
    try:
        messages = tuple(Message.model_validate(message) for message in fields)
    except ValidationError as error:
        raise ConfigError(describe(where, error)) from None
    if messages[-1].role == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's, so there is nothing to answer; remove it")
    if layout.system_prompt is None:
        return messages
    if any(message.role == "system" for message in messages):
        raise ConfigError(f"{where}: has a system message, and data.system_prompt is set; use one of them")
    return (Message(role="system", content=layout.system_prompt), *messages)


def _as_text(answer: Any) -> str | None:
    answer = plain(answer)
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return json.dumps(answer, ensure_ascii=False, default=as_json)


def plain(value: Any) -> Any:
    """A number or array of NumPy or PyTorch as Python's; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_json(value: Any) -> Any:
    """What stands for a value that JSON lacks: Python's numbers for NumPy's, and text for all else."""
    converted = plain(value)
    return str(value) if converted is value else converted


def _missing(
    what: str, record: dict[str, Any], index: int, source: str, named: str | None, candidates: tuple[str, ...]
) -> str:
    looked_for = [named] if named else list(candidates)
    return (
        f"{source}: row {index} has no {what}. Its columns are {sorted(record)}, looked for {looked_for}. "
        f"Complete the row, or name its column with data.{what}_column"
    )


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """[size] row order of an epoch: rows sorted by the SplitMix64 hash of (seed, epoch, row).

    Implemented here because checkpoints outlive NumPy releases, across which random streams may change.
    """
    with np.errstate(over="ignore"):
        key = _splitmix64(_splitmix64(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
        order = np.argsort(_splitmix64(np.arange(size, dtype=np.uint64) + key), kind="stable")
    order.flags.writeable = False
    return order


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea & Flood 2014): the output function after one increment."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed

"""The rows decoded together: one row per sample, with state in tensors and no Python code per token and row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dvp_rl.contract.group import FinishReason, Sample, VersionSpan
from dvp_rl.contract.job import Job
from dvp_rl.dvp.sampler import sample

from .commands import Submission
from .seeds import UniformStream, sample_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 64
"""Uniform draws buffered per row."""
NO_TOKEN = -1


@dataclass(eq=False)
class Row:
    """One unfinished sample."""

    submission: Submission
    index: int
    """Index of the sample among the job's n."""
    limit: int
    """Maximum number of new tokens."""
    spans: list[tuple[str, int]]
    """(version, index of its first token) for every weight version that this sample was drawn under."""
    seed: int = field(init=False)
    uniforms: UniformStream = field(init=False)

    def __post_init__(self) -> None:
        self.seed = sample_seed(self.job, self.index)
        self.uniforms = UniformStream(self.seed)

    @property
    def job(self) -> Job:
        return self.submission.job

    def finish(self, record: NDArray[np.float32], reason: FinishReason) -> Sample:
        starts = [start for _, start in self.spans]
        ends = [*starts[1:], len(record)]
        return Sample(
            token_ids=record[:, 0].astype(np.int32),
            logprobs=record[:, 1].copy(),
            kept_mass=record[:, 2].copy(),
            kept_count=record[:, 3].astype(np.int32),
            finish_reason=reason,
            versions=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(self.spans, ends, strict=True)
                if start < end
            ),
            seed=self.seed,
        )


@dataclass
class Columns:
    """Device tensors with one entry per row; a row that moves takes its entries along. C is the capacity."""

    tokens: Tensor
    """[C] last token drawn, the input of the next forward."""
    log_min_p: Tensor
    """[C] float64."""
    temperature: Tensor
    """[C] float64; 0 is greedy."""
    stops: Tensor
    """[C, S] token ids that end the sample, padded with NO_TOKEN."""
    uniforms: Tensor
    """[C, CHUNK] float64."""
    record: Tensor
    """[C, T, 4] float32: token id, log-prob, kept mass, kept count. Integers are exact in it below 2**24."""

    @classmethod
    def allocate(cls, device: torch.device) -> Columns:
        reals = torch.zeros(0, dtype=torch.float64, device=device)
        ids = torch.zeros(0, dtype=torch.long, device=device)
        return cls(
            tokens=ids,
            log_min_p=reals,
            temperature=reals,
            stops=ids.view(0, 1),
            uniforms=reals.view(0, CHUNK),
            record=torch.zeros(0, 0, 4, dtype=torch.float32, device=device),
        )

    def reserve(self, rows: int, tokens: int, stops: int) -> None:
        """Makes room for `rows` rows of `tokens` tokens with `stops` end tokens each; keeps contents.

        Rows and tokens grow geometrically.
        """
        have_rows, have_tokens, have_stops = len(self.tokens), self.record.shape[1], self.stops.shape[1]
        if rows <= have_rows and tokens <= have_tokens and stops <= have_stops:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        tokens = have_tokens if tokens <= have_tokens else max(tokens, 2 * have_tokens)
        stops = max(stops, have_stops)
        self.tokens = _grown(self.tokens, (rows,))
        self.log_min_p = _grown(self.log_min_p, (rows,))
        self.temperature = _grown(self.temperature, (rows,))
        self.stops = _grown(self.stops, (rows, stops), NO_TOKEN)
        self.uniforms = _grown(self.uniforms, (rows, CHUNK))
        self.record = _grown(self.record, (rows, tokens, 4))

    def write(self, start: int, step: Tensor, drawn: Tensor) -> None:
        """Stores drawn[i], of drawn [rows, 4], as token step[i] of row start + i."""
        rows = torch.arange(start, start + len(step), device=step.device)
        self.record.view(-1, 4).index_copy_(0, rows * self.record.shape[1] + step, drawn)

    def move(self, source: Tensor, target: Tensor, tokens: int) -> None:
        for column in (self.tokens, self.log_min_p, self.temperature, self.stops, self.uniforms):
            column[target] = column[source]
        self.record[target, :tokens] = self.record[source, :tokens]


class Batch:
    """Rows 0..n-1 are the unfinished samples. Lengths live on the host, so a step waits for the device only once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[Row] = []
        self.generated = np.zeros(0, np.int64)
        """[n] tokens drawn so far."""
        self.prompts = np.zeros(0, np.int64)
        """[n] prompt lengths."""
        self.watched = np.zeros(0, np.bool_)
        """[n] rows with stop strings."""
        self._limits = np.zeros(0, np.int64)
        self._columns = Columns.allocate(device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] cached positions: all tokens except the newest, which is the input of the next forward."""
        return self.prompts + np.maximum(self.generated - 1, 0)

    @property
    def inputs(self) -> Tensor:
        """[n, 1] newest token of each row."""
        return self._columns.tokens[: len(self), None]

    def add(self, rows: list[Row], eos_ids: frozenset[int]) -> None:
        """Appends rows that have drawn nothing yet."""
        start = len(self)
        stops = [sorted(eos_ids | set(row.job.sampling.stop_token_ids)) for row in rows]
        self.rows += rows
        self.generated = np.append(self.generated, np.zeros(len(rows), np.int64))
        self.prompts = np.append(self.prompts, [len(row.job.prompt_ids) for row in rows])
        self.watched = np.append(self.watched, [bool(row.job.sampling.stop) for row in rows])
        self._limits = np.append(self._limits, [row.limit for row in rows])
        columns = self._columns
        columns.reserve(len(self), 1, max(map(len, stops)))
        new = slice(start, len(self))
        columns.log_min_p[new] = self._float64([row.job.sampling.log_min_p for row in rows])
        columns.temperature[new] = self._float64([row.job.sampling.temperature for row in rows])
        width = columns.stops.shape[1]
        padded = [ids + [NO_TOKEN] * (width - len(ids)) for ids in stops]
        columns.stops[new] = torch.tensor(padded, device=self.device)

    def draw(self, logits: Tensor, start: int = 0) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Draws one token for each row from `start` on, from logits [n - start, V].

        Returns two flags per drawn row: ended by a stop token, and log-prob not finite (the token is then meaningless).
        """
        rows = slice(start, len(self))
        columns, generated = self._columns, self.generated[rows]
        columns.reserve(len(self), int(generated.max()) + 1, 1)
        self._refill(start)
        step = torch.from_numpy(generated).to(self.device)
        uniforms = columns.uniforms[rows].gather(1, (step % CHUNK)[:, None])[:, 0]
        drawn = sample(logits, uniforms, log_min_p=columns.log_min_p[rows], temperature=columns.temperature[rows])
        columns.tokens[rows] = drawn.token_ids
        columns.write(start, step, torch.stack([part.float() for part in drawn], -1))
        self.generated[rows] += 1
        stopped = (drawn.token_ids[:, None] == columns.stops[rows]).any(1)
        flags = torch.stack((stopped, ~drawn.logprobs.isfinite())).cpu().numpy()
        return flags[0], flags[1]

    def at_limit(self, start: int = 0) -> NDArray[np.bool_]:
        return self.generated[start:] >= self._limits[start:]

    def token_ids(self, row: int, last: int | None = None) -> list[int]:
        """The tokens drawn so far, or only the `last` ones."""
        stop = int(self.generated[row])
        first = 0 if last is None else max(0, stop - last)
        ids: list[int] = self._columns.record[row, first:stop, 0].long().tolist()
        return ids

    def history(self, rows: Sequence[int], width: int) -> Tensor:
        """[rows, width] prompt and drawn tokens of each row, cut or zero-padded on the right to `width`."""
        token_ids = torch.zeros(len(rows), width, dtype=torch.long)
        for line, row in zip(token_ids, rows, strict=True):
            known = torch.tensor([*self.rows[row].job.prompt_ids.tolist(), *self.token_ids(row)][:width])
            line[: len(known)] = known
        return token_ids.to(self.device)

    def records(self, rows: list[int]) -> list[NDArray[np.float32]]:
        """The [T, 4] record of each row, on the host."""
        if not rows:
            return []
        longest = int(self.generated[rows].max())
        host = self._columns.record[torch.tensor(rows, device=self.device), :longest].cpu().numpy()
        return [record[: self.generated[row]] for record, row in zip(host, rows, strict=True)]

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drops rows and fills the holes with the last rows. Returns old and new indices of the rows that moved."""
        left = len(self) - len(rows)
        dropped = set(rows)
        holes = sorted(row for row in dropped if row < left)
        movers = [row for row in range(left, len(self)) if row not in dropped]
        if movers:
            source, target = (torch.tensor(ids, device=self.device) for ids in (movers, holes))
            self._columns.move(source, target, int(self.generated[movers].max()))
            for array in (self.generated, self.prompts, self.watched, self._limits):
                array[holes] = array[movers]
            for mover, hole in zip(movers, holes, strict=True):
                self.rows[hole] = self.rows[mover]
        del self.rows[left:]
        self.generated, self.prompts = self.generated[:left], self.prompts[:left]
        self.watched, self._limits = self.watched[:left], self._limits[:left]
        return movers, holes

    def _refill(self, start: int) -> None:
        due = np.flatnonzero(self.generated[start:] % CHUNK == 0) + start
        if len(due):
            chunk = np.stack([self.rows[row].uniforms.next(CHUNK) for row in due])
            target = torch.from_numpy(due).to(self.device)
            self._columns.uniforms[target] = torch.from_numpy(chunk).to(self.device)

    def _float64(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _grown(column: Tensor, shape: tuple[int, ...], fill: int = 0) -> Tensor:
    if column.shape == shape:
        return column
    grown = column.new_full(shape, fill)
    grown[tuple(slice(size) for size in column.shape)] = column
    return grown

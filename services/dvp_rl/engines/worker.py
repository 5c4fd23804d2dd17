"""The thread that owns the model. It handles commands at token boundaries and decodes in between.

    boundary:  commands (submit, cancel, swap, stop) -> admit waiting samples (one prefill per job) -> first tokens
    step:      one forward over all rows -> one token each -> finished rows leave

Only this thread touches model, cache and batch. Results go back through each command's reply.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dvp_rl.contract.errors import EngineError, WeightError
from dvp_rl.contract.group import FinishReason

from .batch import Batch, Row
from .commands import Cancel, Command, Stop, Submission, Swap
from .decoder import Decoder, Placement
from .limits import max_new_tokens
from .model_folder import swap_weights
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

STOP_MARGIN = 8
"""Extra tokens decoded beyond the longest stop string, as some decode to nothing or merge with their neighbours."""


class Worker:
    """`run` is the thread's body; `send` may be called from any thread."""

    def __init__(
        self,
        model: Any,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        version: str,
        max_batch: int,
        context_length: int,
        deterministic: bool,
        threads: int,
    ) -> None:
        self.version = version
        self._model = model
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._context_length = context_length
        self._deterministic = deterministic
        self._threads = threads
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: set[Submission] = set()
        """All submissions that still lack a reply."""
        self._suspects: set[Submission] = set()
        """Submissions in flight when generation failed. While any of them is live, each job is its own batch, so that a
        job that runs out of memory, for example, does not fail the others."""
        self._waiting: deque[Submission] = deque()
        self._swaps: deque[Swap] = deque()
        self._batch = Batch(model.device)
        self._stopping = False

    def send(self, command: Command) -> None:
        self._commands.put(command)

    @property
    def num_running(self) -> int:
        """Number of samples that hold a row."""
        return len(self._batch)

    def run(self) -> None:
        torch.set_num_threads(self._threads)
        while not self._stopping:
            try:
                with torch.inference_mode():
                    self._boundary()
                    if len(self._batch) and not self._stopping:
                        self._draw(self._decoder.step(self._batch), 0)
            except Exception as error:
                log.exception("generation failed; the engine continues")
                self._start_over(EngineError(f"generation failed: {type(error).__name__}: {error}"))
        self._close(EngineError("the engine was closed"))

    # -- boundary ----------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        for command in self._arrived():
            match command:
                case Submission():
                    self._live.add(command)
                    self._enqueue(command)
                case Cancel():
                    self._drop(command.submission)
                case Swap():
                    self._swaps.append(command)
                case Stop():
                    self._stopping = True
        if self._swaps and not (self._deterministic and self._busy):
            self._swap(self._swaps.popleft())
        self._admit()

    def _enqueue(self, submission: Submission) -> None:
        """Puts it last or, if it is urgent, first; one by one, a job that has begun comes before all."""
        begun = self._one_by_one and bool(self._waiting) and self._waiting[0].placed > 0
        self._waiting.insert(int(begun) if submission.urgent else len(self._waiting), submission)

    def _arrived(self) -> Iterator[Command]:
        """The queued commands; waits for a first one if there is nothing else to do."""
        if not (len(self._batch) or self._waiting or self._swaps):
            yield self._commands.get()
        yield from self._left_over()

    @property
    def _busy(self) -> bool:
        """Whether a job has begun and is not finished."""
        return len(self._batch) > 0 or bool(self._waiting and self._waiting[0].placed)

    @property
    def _one_by_one(self) -> bool:
        self._suspects &= self._live
        return self._deterministic or bool(self._suspects)

    def _admit(self) -> None:
        """Gives free rows to waiting samples, first come first served, and draws their first tokens."""
        placements = list(self._placements())
        if not placements:
            return
        start = len(self._batch)
        for submission, count in placements:
            rows = [self._row(submission, submission.placed + i) for i in range(count)]
            self._batch.add(rows, self._tokenizer.eos_ids)
            submission.placed += count
        self._draw(self._decoder.begin(self._batch, placements), start)

    def _placements(self) -> Iterator[Placement]:
        free, one_by_one = self._max_batch - len(self._batch), self._one_by_one
        if one_by_one:
            if self._busy and not (self._waiting and self._waiting[0].placed):
                return
            if not self._busy:
                self._decoder.clear()  # so that the cache's shape also depends on the job alone
        while self._waiting and free > 0:
            submission = self._waiting[0]
            count = min(free, submission.unplaced)
            free -= count
            if count == submission.unplaced:
                self._waiting.popleft()
            yield Placement(submission, count)
            if one_by_one:
                return

    def _row(self, submission: Submission, index: int) -> Row:
        limit = max_new_tokens(submission.job, self._context_length)
        return Row(submission, index, limit, [(self.version, 0)])

    # -- step --------------------------------------------------------------------------------------------------------

    def _draw(self, logits: Tensor, start: int) -> None:
        """Draws one token for each row from `start` on; samples that end leave the batch."""
        stopped, broken = self._batch.draw(logits, start)
        stopped |= self._at_stop_string(start)
        ended = stopped | broken | self._batch.at_limit(start)
        if not ended.any():
            return
        failed = {self._batch.rows[row].submission: row for row in _indices(broken, start)}
        for submission, row in failed.items():
            self._fail_not_finite(submission, row)
        done = [row for row in _indices(ended, start) if self._batch.rows[row].submission not in failed]
        for row, record in zip(done, self._batch.records(done), strict=True):
            self._finish(row, record, FinishReason.STOP if stopped[row - start] else FinishReason.LENGTH)
        self._decoder.finish(self._batch, done)
        self._remove(done + self._rows_of(failed))

    def _at_stop_string(self, start: int) -> NDArray[np.bool_]:
        """Whether the newest token of each row from `start` on completed one of its stop strings."""
        hit = np.zeros(len(self._batch) - start, np.bool_)
        for row in _indices(self._batch.watched[start:], start):
            stops = self._batch.rows[row].job.sampling.stop
            window = max(len(stop.encode()) for stop in stops) + STOP_MARGIN
            tail = self._tokenizer.decode(self._batch.token_ids(row, window), skip_special_tokens=False)
            hit[row - start] = any(stop in tail for stop in stops)
        return hit

    def _finish(self, row: int, record: NDArray[np.float32], reason: FinishReason) -> None:
        own = self._batch.rows[row]
        own.submission.samples[own.index] = own.finish(record, reason)
        if own.submission.reply_if_whole():
            self._live.discard(own.submission)

    def _fail_not_finite(self, submission: Submission, row: int) -> None:
        token = int(self._batch.generated[row]) - 1
        position = int(self._batch.prompts[row]) + token
        submission.reply.error(
            EngineError(
                f"job {submission.job.job_id}: the logits of sample {self._batch.rows[row].index} are not finite at "
                f"position {position} (prompt {position - token} tokens, new token {token}) under {self.version}"
            )
        )
        self._forget(submission)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _drop(self, submission: Submission) -> None:
        """Removes a cancelled job and its rows."""
        self._forget(submission)
        self._remove(self._rows_of({submission}))

    def _forget(self, submission: Submission) -> None:
        self._live.discard(submission)
        with suppress(ValueError):
            self._waiting.remove(submission)

    def _rows_of(self, submissions: Iterable[Submission]) -> list[int]:
        wanted = set(submissions)
        return [i for i, row in enumerate(self._batch.rows) if row.submission in wanted] if wanted else []

    def _remove(self, rows: list[int]) -> None:
        source, target = self._batch.remove(rows)
        if source:
            self._decoder.move(self._batch, source, target)

    def _start_over(self, error: EngineError) -> None:
        """Recovers from a failure. A job that was alone fails with `error`; several jobs are drawn again one by one."""
        begun = [submission for submission in self._live if submission.placed]
        self._batch = Batch(self._model.device)
        self._decoder.clear()
        for submission in begun:
            self._forget(submission)
        if len(begun) == 1:
            begun[0].reply.error(error)
            return
        for submission in begun:
            submission.start_over()
        self._live.update(begun)
        self._suspects = set(begun)
        self._waiting.extendleft(begun)

    def _close(self, error: EngineError) -> None:
        """Answers every pending submission and swap with `error`."""
        for submission in self._live:
            submission.reply.error(error)
        for command in [*self._swaps, *self._left_over()]:
            if isinstance(command, (Submission, Swap)):
                command.reply.error(error)

    def _left_over(self) -> Iterator[Command]:
        with suppress(queue.Empty):
            while True:
                yield self._commands.get_nowait()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _swap(self, swap: Swap) -> None:
        """Copies new weights in place and recomputes the cache of unfinished rows under them."""
        try:
            swap_weights(self._model, swap.weights)
        except Exception as error:
            swap.reply.error(WeightError(f"{swap.version}: copying the weights failed: {error}"))
            raise
        self.version = swap.version
        swap.reply.result(None)
        for submission in self._waiting:
            submission.prefill = None
        for row, generated in zip(self._batch.rows, self._batch.generated, strict=True):
            row.spans.append((swap.version, int(generated)))
        self._decoder.recompute(self._batch)
        log.info("serving %s, %d samples in flight continue under it", swap.version, len(self._batch))


def _indices(flags: NDArray[np.bool_], start: int) -> list[int]:
    """Row numbers of the flags that are set; flags[0] is row `start`."""
    rows: list[int] = (np.flatnonzero(flags) + start).tolist()
    return rows

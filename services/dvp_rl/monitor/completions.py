"""The trainer's completions.jsonl, of which the monitor knows where the record of each step lies."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from dvp_rl.contract.completions import PRUNED, RECORD, read_completions
from dvp_rl.contract.errors import NotFoundError

from .bodies import Completions, CompletionSteps, Shown
from .growing import GrowingFile

MAX_STEPS = 1_000
"""Most steps that the page lists: the newest ones. The others can be asked for."""
MAX_CACHED = 4
"""Answers that are kept, since all viewers ask for the newest step at the same time."""


class CompletionsFile:
    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._offsets: dict[int, int] = {}
        """Where the record of each step begins, in bytes."""
        self._since = 0.0
        self._answer = lru_cache(maxsize=MAX_CACHED)(self._read)

    def look(self) -> CompletionSteps | None:
        """The steps that have a record; None if nothing is new."""
        grown = self._file.look()
        if grown is None:
            return None
        offsets, error = self._offsets.copy(), ""
        while grown is not None:
            if grown.anew:
                offsets, self._since = {}, time.time()
            offset, error = grown.offset, grown.error
            for line in grown.lines:
                if found := RECORD.match(line):
                    offsets[int(found[1])] = offset
                offset += len(line) + 1
            grown = self._file.look()
        self._offsets = offsets
        return CompletionSteps(error=error, since=self._since, steps=tuple(offsets)[-MAX_STEPS:])

    def read(self, step: int | None) -> bytes:
        """The Completions of this step, or of the newest one, in JSON. Raises NotFoundError."""
        offsets = self._offsets
        if not offsets:
            raise NotFoundError(f"{self._file.path}: no completions have been read yet")
        newest = next(reversed(offsets))
        step = newest if step is None else step
        if step not in offsets:
            raise NotFoundError(f"no completions of step {step} have been recorded; the newest are of step {newest}")
        return self._answer(step, offsets[step], self._since)

    def _read(self, step: int, offset: int, _since: float) -> bytes:
        """`_since` only keeps the answers of one file apart from those of the next."""
        try:
            with self._file.open() as file:
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            raise NotFoundError(f"{self._file.path}: {error.strerror}") from None
        found = RECORD.match(line)
        try:
            completions = [Shown.of(each) for each in read_completions(line)] if found and int(found[1]) == step else []
        except (ValueError, TypeError):  # of a record whose fields have other types
            completions = []
        if not completions:
            raise NotFoundError(f"{self._file.path}: the record of step {step} cannot be read")
        answer = Completions(step=step, pruned=PRUNED, completions=tuple(completions))
        return answer.model_dump_json().encode()

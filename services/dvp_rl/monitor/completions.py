"""The trainer's completions.jsonl, of which the monitor knows where the record of each step lies."""

from __future__ import annotations

from pathlib import Path

from dvp_rl.contract.completions import PRUNED, RECORD, read_completions
from dvp_rl.contract.errors import NotFoundError

from .bodies import Completions, CompletionSteps, Shown
from .growing import GrowingFile

MAX_STEPS = 1_000
"""Most steps that the page lists: the newest ones. The others can be asked for."""


class CompletionsFile:
    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._offsets: dict[int, int] = {}
        """Where the record of each step begins, in bytes."""

    def look(self) -> CompletionSteps | None:
        """The steps that have a record; None if nothing is new."""
        grown = self._file.look()
        if grown is None:
            return None
        offsets, offset = {} if grown.anew else self._offsets.copy(), grown.offset
        for line in grown.lines:
            if found := RECORD.match(line):
                offsets[int(found[1])] = offset
            offset += len(line) + 1
        self._offsets = offsets
        return CompletionSteps(error=grown.error, steps=tuple(offsets)[-MAX_STEPS:])

    def read(self, step: int | None) -> Completions:
        """The completions of this step, or of the newest one. Raises NotFoundError."""
        offsets = self._offsets
        if not offsets:
            raise NotFoundError(f"{self._file.path}: no completions have been recorded")
        newest = next(reversed(offsets))
        step = newest if step is None else step
        if step not in offsets:
            raise NotFoundError(f"no completions of step {step} have been recorded; the newest are of step {newest}")
        try:
            with self._file.path.open("rb") as file:
                file.seek(offsets[step])
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
        return Completions(step=step, pruned=PRUNED, completions=tuple(completions))

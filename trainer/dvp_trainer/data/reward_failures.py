"""Failed rewards: counted, shown once, and the end of a run in which they all fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import RewardSection
from dvp_trainer.disk import write_private
from dvp_trainer.options import OnError

from .prompts import Row
from .reward_pool import RewardResult

log = logging.getLogger(__name__)

FILE = "reward_error.txt"


class RewardFailures:
    """Failed rewards of one data set. The one that is reported is also in a file, with the row's texts, which must not
    be in a log."""

    def __init__(self, rules: RewardSection, out_dir: Path, source: str, *, patience: int) -> None:
        """`patience`: number of failures in a row, without a single success, that end the run. One row never does."""
        self._rules, self._file, self.source, self._patience = rules, out_dir / FILE, source, patience
        self._in_a_row, self._rows = 0, set[int]()
        """Completions that failed since the last success, and their rows."""
        self._warned = False
        self.num_timed_out = 0

    def look_at(self, row: Row, completions: Sequence[str], results: Sequence[RewardResult]) -> None:
        """Counts the failures of one row. Raises ConfigError at the first one if reward.on_error is `stop`, otherwise
        once `patience` completions in a row have failed, of two rows or more."""
        for completion, result in zip(completions, results, strict=True):
            if result.value is not None:
                self._in_a_row, self._rows = 0, set()
                continue
            self._in_a_row += 1
            self._rows.add(row.index)
            self.num_timed_out += result.timed_out
            if self._rules.on_error is OnError.STOP:
                raise self.fatal("failed, and reward.on_error is 'stop'", row, completion, result)
            if self._in_a_row >= self._patience and len(self._rows) > 1:
                raise self.fatal(f"failed for all of the last {self._in_a_row} completions", row, completion, result)
            if not self._warned:
                self._warned = True
                self._write(row, completion, result)
                log.warning(
                    "a reward failed and counts as 0 (%s); %s has the whole error, further failures are counted in "
                    "reward/failed",
                    # The rest of the error may contain the prompt.
                    *(": ".join(str(result.error).split(": ")[:2]), self._file),
                )

    def fatal(self, what: str, row: Row, completion: str, result: RewardResult) -> ConfigError:
        """The error that ends a run because of this failure, which is written to the file."""
        self._write(row, completion, result)
        limit = f" (it is {self._rules.timeout_s:g} s)" if result.timed_out else ""
        absent = " (the row has no answer)" if row.answer is None else ""
        return ConfigError(
            f"reward.name {self._rules.name!r} {what}: {self.source}, {result.error}{limit}{absent}. {self._file} has "
            "the traceback, the prompt and the completion. Fix the function (for a completion that is merely wrong, "
            "return a number), then start the same command again"
        )

    def _write(self, row: Row, completion: str, result: RewardResult) -> None:
        parts = {
            "error": f"{self.source}, {result.error}",
            "traceback": result.trace or "none: the function raised nothing",
            "prompt": row.text,
            "completion": completion,
            "answer": str(row.answer),
        }
        write_private(self._file, "\n".join(f"--- {name}\n{text}\n" for name, text in parts.items()))

"""Runs all tests in groups and decides on the change. A failed test is rerun once, alone, in its own process.

A test that passes the rerun counts as flaky: a defect to be fixed next, but no reason to refuse the change. More than
MAX_FLAKY flaky tests refuse it.

    python -m tests.verdict              all groups
    python -m tests.verdict fast e2e     some of them
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

MAX_FLAKY = 3
MAX_RETRIED = 10
"""Most failed tests of one group that are rerun; more are not chance."""
NUM_SLOWEST = 10
BY_FILE = ("--dist", "loadfile")
"""Options for several processes. A test that kills its process fails alone: xdist starts another for the rest."""
SLOW = ("-n", "2", "-m", "slow and not long")
SLOW_BY_FILE = (*SLOW, *BY_FILE, "--no-loadscope-reorder")
SERVERS = tuple(f"tests/integration/{name}" for name in ("engines", "sglang_engine", "sglang_plugin", "vllm_plugin"))
GROUPS = {
    "fast": ("-n", "3", *BY_FILE),
    "slow": (*SLOW_BY_FILE, *(f"--ignore={folder}" for folder in ("tests/e2e", *SERVERS))),
    "servers": (*SLOW_BY_FILE, *SERVERS),
    # Distributed by test instead of by file: chaos, the only test of its file, takes as long as several others.
    "e2e": (*SLOW, "--dist", "worksteal", "tests/e2e"),
}
OK, SOME_FAILED = 0, 1
"""Exit codes of pytest."""


@dataclass
class Outcomes:
    """Outcomes of the tests of one group, or of all groups so far."""

    by_test: dict[str, str] = field(default_factory=dict)
    """Passed, failed or skipped, by node id."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time of set-up, call and teardown together, by node id."""
    broken: list[str] = field(default_factory=list)
    """Failures beyond one test: a module that cannot be imported, a group without tests or with a bad exit code."""
    flaky: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.by_test.items() if outcome == "failed"]

    @property
    def good(self) -> bool:
        return not self.failed and not self.broken and len(self.flaky) <= MAX_FLAKY

    @classmethod
    def read(cls, log: Path) -> Self:
        """Outcomes in a log of pytest-reportlog; none if the file is missing."""
        outcomes = cls()
        for line in log.read_text().splitlines() if log.exists() else ():
            entry = json.loads(line)
            match entry.get("$report_type"):
                case "CollectReport" if entry["outcome"] == "failed":
                    outcomes.broken.append(entry["nodeid"])
                case "TestReport":
                    outcomes._add(entry["nodeid"], entry["when"], entry["outcome"], entry["duration"])
        return outcomes

    def join(self, others: Outcomes) -> None:
        self.by_test |= others.by_test
        self.seconds |= others.seconds
        self.broken += others.broken
        self.flaky += others.flaky

    def _add(self, test: str, when: str, outcome: str, seconds: float) -> None:
        self.seconds[test] += seconds
        if outcome != "passed" or (when == "call" and test not in self.by_test):
            self.by_test[test] = outcome


def pytest(*options: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *options], check=False).returncode


def run_group(options: Sequence[str]) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        code = pytest(*options, f"--report-log={log}")
        outcomes = Outcomes.read(log)
    if code != OK and not (code == SOME_FAILED and outcomes.failed):
        outcomes.broken.append(f"pytest {' '.join(options)}: exit code {code}")
    if len(outcomes.failed) > MAX_RETRIED:
        say(f"{len(outcomes.failed)} tests failed: none is rerun")
        return outcomes
    for test in outcomes.failed:
        say(f"rerun alone: {test}")
        if pytest("-m", "", test) == OK:
            outcomes.by_test[test] = "passed"
            outcomes.flaky.append(test)
    return outcomes


def report(outcomes: Outcomes) -> None:
    say("slowest")
    for test in sorted(outcomes.seconds, key=lambda test: -outcomes.seconds[test])[:NUM_SLOWEST]:
        say(f"{outcomes.seconds[test]:8.1f} s  {test}")
    for title, tests in ("BROKEN", outcomes.broken), ("FAILED", outcomes.failed), ("FLAKY", outcomes.flaky):
        for test in tests:
            say(f"{title} {test}")
    if len(outcomes.flaky) > MAX_FLAKY:
        say(f"more than {MAX_FLAKY} flaky tests: refused")
    counts = Counter(outcomes.by_test.values())
    say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", help=f"any of {', '.join(GROUPS)}")
    names = parser.parse_args().group or list(GROUPS)
    if unknown := set(names) - set(GROUPS):
        parser.error(f"no such group: {', '.join(unknown)}; the groups are {', '.join(GROUPS)}")
    outcomes = Outcomes()
    for name in names:
        begin = time.monotonic()
        outcomes.join(run_group(GROUPS[name]))
        say(f"group {name}: {time.monotonic() - begin:.0f} s")
    report(outcomes)
    sys.exit(not outcomes.good)


if __name__ == "__main__":
    main()

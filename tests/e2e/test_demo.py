"""The demo itself, with every part real and in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dvp_rl.contract.weights import WeightVersion
from tests.kit.wait import WITHIN_S, until

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
EXPORTED = {
    "DVP_ROLLOUT__TOKEN": "what-another-service-needs",
    "DVP_TRAIN__OPTIMIZER__LR": "7",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
}
"""Variables that a user's shell may export and that the demo must ignore."""


class Launcher:
    """One `python -m deploy.demo` in a process group of its own, as a shell would start it."""

    def __init__(self, out: Path, *options: str) -> None:
        self.out, self._log = out, out.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.demo", f"--out={out}", *options],
                cwd=REPOSITORY,
                env=os.environ | EXPORTED,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def trains(self) -> bool:
        assert self.process.poll() is None, self.output
        return "step 2/" in self.output

    def replica(self, name: str) -> psutil.Process:
        (found,) = [p for p in self.processes() if f"--replica-id={name}" in p.cmdline()]
        return found


@contextmanager
def launched(out: Path, *options: str) -> Iterator[Launcher]:
    launcher = Launcher(out, *options)
    try:
        yield launcher
    finally:
        if launcher.process.poll() is None:
            os.kill(launcher.process.pid, signal.SIGTERM)
            launcher.process.wait(WITHIN_S)


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_rises(tmp_path: Path, seed: int) -> None:
    summary = learned(tmp_path / "demo", f"--seed={seed}")
    assert summary["samples_trained"] == summary["steps"] * 64 * 8
    assert summary["versions_published"] == summary["steps"] + 1
    assert summary["turns_first"] is None


@pytest.mark.parametrize("seed", SEEDS)
def test_an_agent_learns_to_use_its_tool(tmp_path: Path, seed: int) -> None:
    summary = learned(tmp_path / "demo", "--task=calculator", f"--seed={seed}")
    assert summary["samples_trained"] == summary["steps"] * 16 * 8
    assert summary["tool_errors_first"] > 0.1 > summary["tool_errors_last"]
    assert summary["turns_last"] > 2.5  # answering at once is one turn, a call per number is three on average
    records = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    drifted = [record["episodes/drifted_mean"] for record in records if "episodes/drifted_mean" in record]
    assert drifted == [0.0] * summary["steps"]


def learned(out: Path, *options: str) -> dict[str, Any]:
    """The summary of a demo that ended well."""
    with launched(out, *options) as launcher:
        assert launcher.process.wait(600) == 0, launcher.output
    summary = launcher.summary
    assert summary["reward_last"] - summary["reward_first"] >= 0.15
    assert summary["heldout_last"] - summary["heldout_first"] >= 0.15
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["pruned_share"] >= 0.05
    last = [WeightVersion.parse(replica["last_version"]).seq for replica in summary["replicas"]]
    assert last == [summary["versions_published"]] * 2
    assert (out / "report.html").read_text().count("<svg") >= 6
    assert "traceback" not in launcher.output.lower()
    return summary


@pytest.mark.parametrize(
    "options",
    [("--steps=12",), pytest.param(("--task=calculator", "--steps=6"), marks=pytest.mark.long)],
    ids=["sums", "calculator"],
)
def test_without_mismatch_every_ratio_is_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    with launched(tmp_path / "demo", "--zero-mismatch", *options) as launcher:
        assert launcher.process.wait(600) == 0, launcher.output
    records = map(json.loads, (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines())
    trained = [record for record in records if "reward/mean" in record]
    ratios = {record[f"mismatch/ratio_{side}"] for record in trained for side in ("min", "max")}
    assert ratios == {1.0}
    assert launcher.summary["largest_log_ratio"] == 0.0


def test_interrupt_ends_everything_and_the_next_run_works(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with launched(tmp_path / "demo") as launcher:
            until(launcher.trains, "it trains")
            everybody = launcher.processes()
            assert len(everybody) >= 5  # trainer, broker, two replicas, monitor
            os.killpg(launcher.process.pid, number)
            assert launcher.process.wait(WITHIN_S) == 128 + number
        assert psutil.wait_procs(everybody, timeout=WITHIN_S)[1] == []
        assert "traceback" not in launcher.output.lower()
    assert (tmp_path / "demo-1" / "metrics.jsonl").exists()

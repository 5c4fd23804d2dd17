"""Observations from outside, independent of the books: peak memory of processes, and tracebacks in their logs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.kit.wait import WITHIN_S

if TYPE_CHECKING:  # it imports torch
    from .system import System

SAMPLE_S = 0.5
MOST_MIB: Mapping[str, int] = dict(replica=1500, trainer=1500, operator=1000, harness=1000, broker=256, gateway=1000)
"""Bounds in MiB by role; at least three times the peaks of short storms. A gateway begins as a forked interpreter."""
TRACEBACK = "Traceback (most recent call last)"
TORCH_WARNING = re.compile(r"W\d{4} .*/site-packages/torch/[^\]]*\] " + re.escape(TRACEBACK))
"""A warning that PyTorch logs about an error that it goes on without, such as a module of its profiler that cannot be
imported while no descriptor is free."""
CONTEXT_LINES = 25


@dataclass
class Memory:
    """Peak memory of any process of each role, in MiB."""

    peaks: dict[str, float] = field(default_factory=dict)

    async def watch(self, system: System) -> None:
        while True:
            pids = [(str(child.role), child.process.pid) for child in system.children]
            for role, pid in [*pids, ("broker", system.broker.pid)]:
                self.peaks[role] = max(self.peaks.get(role, 0.0), peak_mib(pid))
            await asyncio.sleep(SAMPLE_S)

    @property
    def faults(self) -> list[str]:
        too_much = {role: peak for role, peak in self.peaks.items() if peak > MOST_MIB[role]}
        return [f"{role}: {peak:.0f} MiB of memory, {MOST_MIB[role]} expected" for role, peak in too_much.items()]


def peak_mib(pid: int | None) -> float:
    """Peak memory of the process in MiB; 0 if it does not exist. Source: VmHWM of proc_pid_status(5)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def survivors(folder: Path) -> list[str]:
    """One entry for each process of the run in that folder that does not end."""
    deadline = time.monotonic() + WITHIN_S
    while (found := living(folder)) and time.monotonic() < deadline:
        time.sleep(SAMPLE_S)
    return found


def living(folder: Path) -> list[str]:
    """One entry for each process whose environment names a path in that folder, as those of a run and their workers
    do."""
    return [
        f"process {process.pid} is left: {' '.join(process.info['cmdline'] or ())[:200]}"
        for process in psutil.process_iter(["environ", "cmdline"])
        if any(value.startswith(f"{folder}/") for value in (process.info["environ"] or {}).values())
    ]


def tracebacks(folder: Path) -> list[str]:
    """One entry for each log that has tracebacks, with the lines around the first."""
    found = []
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        at = [i for i, line in enumerate(lines) if TRACEBACK in line and not TORCH_WARNING.match(line.strip())]
        if at:
            shown = lines[max(0, at[0] - 2) : at[0] + CONTEXT_LINES]
            found.append(f"{len(at)} tracebacks in {log}:\n  " + "\n  ".join(shown))
    return found

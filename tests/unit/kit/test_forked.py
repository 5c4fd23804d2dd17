"""Forked processes behave like started ones."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.kit.forked import MONITOR, ROLLOUT, TRAINER, Service, none_left, run
from tests.kit.wait import WITHIN_S, until


def test_outputs_and_exit_codes_of_many_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(run, module, "--help") for module in (MONITOR, ROLLOUT, TRAINER) * 4]
        bad = [threads.submit(run, TRAINER, "--stepz=1") for _ in range(12)]
    for done in (future.result() for future in good):
        assert (done.returncode, done.stderr) == (0, "")
        assert "usage" in done.stdout
    for done in (future.result() for future in bad):
        assert (done.returncode, done.stdout) == (2, "")
        assert "dvp-train: error: unknown option --stepz" in done.stderr


def test_a_stopped_one_is_killed_with_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "def main():\n"
        "    subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    )
    with none_left():
        parent = Service("parent", [], tmp_path / "log", PYTHONPATH=str(tmp_path))
        until(lambda: psutil.Process(parent.pid).children(), "its child runs")
        family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
        parent.send_signal(signal.SIGSTOP)
        assert parent.poll() is None
    assert parent.wait() == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=WITHIN_S)[1]

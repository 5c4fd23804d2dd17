"""The launcher's processes and run folder, tested with small real processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from deploy.demo.fleet import Child, Fleet, interruptible
from deploy.demo.run_folder import claim
from dvp_rl.contract.errors import ConfigError, UnavailableError
from tests.kit.wait import WITHIN_S

SLEEP = "import time; print('up', flush=True); time.sleep(300)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"


def start(fleet: Fleet, name: str, code: str) -> Child:
    return fleet.start(name, [sys.executable, "-c", code], cwd=Path.cwd(), env={})


def is_up(child: Child) -> bool:
    return "up" in child.log.read_text()


def test_leaving_ends_every_process_and_its_children(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        children = [start(fleet, "one", SLEEP), start(fleet, "family", PARENT)]
        fleet.wait_until(lambda: all(map(is_up, children)), "both are up", 30)
        everybody = [
            p for c in children for p in (psutil.Process(c.process.pid), *psutil.Process(c.process.pid).children())
        ]
        assert len(everybody) == 3
    gone, alive = psutil.wait_procs(everybody, timeout=WITHIN_S)
    assert (len(gone), alive) == (3, [])


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.demo.fleet.GRACE_S", 0.2)
    with Fleet(tmp_path) as fleet:
        child = start(fleet, "stubborn", STUBBORN)
        fleet.wait_until(lambda: is_up(child), "it is up", 30)
    assert child.process.returncode == -signal.SIGKILL


def test_unexpected_death_shows_the_last_words(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        other = start(fleet, "other", SLEEP)
        start(fleet, "broken", "import sys; print('it hurts', file=sys.stderr); sys.exit(3)")
        with pytest.raises(UnavailableError, match=r"(?s)broken ended with exit code 3.*it hurts"):
            fleet.wait_for(other, 30)
    assert other.process.returncode == -signal.SIGTERM


def test_awaited_child_must_end_well(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.wait_for(start(fleet, "good", "pass"), 30)
        with pytest.raises(UnavailableError, match=r"(?s)killed was killed by SIGKILL.*the end is near"):
            fleet.wait_for(
                start(fleet, "killed", "import os; print('the end is near', flush=True); os.kill(os.getpid(), 9)"), 30
            )


def test_waiting_is_bounded(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        start(fleet, "one", SLEEP)
        with pytest.raises(UnavailableError, match="waiting until pigs fly"):
            fleet.wait_until(lambda: False, "pigs fly", 0.3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_in_order(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interruptible(), Fleet(tmp_path) as fleet:
        child = start(fleet, "one", SLEEP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert child.process.returncode is not None
    assert signal.getsignal(number) is before


def test_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "demo"
    for text in ("first", "second", "third"):
        with claim(out) as run:
            (run.path / "note").write_text(text)
    assert (out / "note").read_text() == "third"
    assert (tmp_path / "runs" / "demo.previous" / "note").read_text() == "second"


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    with (
        claim(tmp_path / "demo"),
        pytest.raises(ConfigError, match="another demo is running"),
        claim(tmp_path / "demo"),
    ):
        pass


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run of the demo"), claim(tmp_path / "thesis"):
        pass
    assert (tmp_path / "thesis" / "chapter-1").exists()


def test_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"), claim(tmp_path / "file" / "demo"):
        pass

"""The processes that a launcher starts, tested with small real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dvp_trainer.up.fleet import Child, Fleet, interruptible
from tests.kit.wait import WITHIN_S, until

SLEEP = "import time; print('up', flush=True); time.sleep(300)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
LAUNCHER = """
import sys, time
from pathlib import Path
from dvp_trainer.up.fleet import Fleet
fleet = Fleet(Path(sys.argv[1]))
print(fleet.start("child", [sys.executable, "-c", sys.argv[2]], {}).process.pid, flush=True)
time.sleep(300)
"""


@contextmanager
def handled(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def start(fleet: Fleet, name: str, code: str, **env: str) -> Child:
    return fleet.start(name, [sys.executable, "-c", code], env)


def await_up(*children: Child, times: int = 1) -> None:
    until(lambda: all(child.log.read_text().count("up") == times for child in children), "they are up")


def test_leaving_ends_every_process_and_its_children(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        children = [start(fleet, "one", SLEEP), start(fleet, "family", PARENT)]
        await_up(*children)
        everybody = [
            p for c in children for p in (psutil.Process(c.process.pid), *psutil.Process(c.process.pid).children())
        ]
        assert len(everybody) == 3
    gone, alive = psutil.wait_procs(everybody, timeout=WITHIN_S)
    assert (len(gone), alive) == (3, [])


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dvp_trainer.up.fleet.GRACE_S", 0.2)
    with Fleet(tmp_path) as fleet:
        child = start(fleet, "stubborn", STUBBORN)
        await_up(child)
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import sys; print('it hurts', file=sys.stderr); sys.exit(3)", "ended with exit code 3"),
        ("import os; print('it hurts', flush=True); os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_obituary_has_the_last_words(tmp_path: Path, code: str, how: str) -> None:
    with Fleet(tmp_path) as fleet:
        child = start(fleet, "broken", code)
        until(child.has_ended, "it ends")
    assert child.obituary() == f"broken {how}. The end of {tmp_path}/broken.log:\n  it hurts"


def test_a_child_that_starts_again_leaves_no_process_behind_and_keeps_its_log(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        first = start(fleet, "family", PARENT)
        await_up(first)
        (orphan,) = psutil.Process(first.process.pid).children()
        first.process.kill()
        second = start(fleet, "family", SLEEP)
        psutil.wait_procs([orphan], timeout=WITHIN_S)
        assert not orphan.is_running()
        await_up(second, times=2)
    assert second.has_ended()


def test_children_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, tmp_path, SLEEP], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        until(lambda: "up" in (tmp_path / "child.log").read_text(), "it is up")
        owner.kill()
    assert psutil.wait_procs([child], timeout=WITHIN_S)[1] == []


def test_children_do_not_take_torchruns_variables_for_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in theirs:
        monkeypatch.setenv(name, "7")
    with Fleet(tmp_path) as fleet:
        child = start(fleet, "one", "import os; print(sorted(os.environ))", MINE="1")
        until(child.has_ended, "it ends")
    names = child.log.read_text()
    assert "'MINE'" in names
    assert not [name for name in theirs if f"'{name}'" in names]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with handled(number, signal.SIG_DFL):  # these tests may run under nohup
        with interruptible(), Fleet(tmp_path) as fleet:
            child = start(fleet, "one", SLEEP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert child.process.returncode is not None
        assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN), interruptible():
        os.kill(os.getpid(), signal.SIGHUP)

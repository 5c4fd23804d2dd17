"""If the broker is unavailable at the start of a run or during it, the trainer logs this, waits and then continues."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.roles import Role
from tests.kit.runs import config, replica, train, trainer_process
from tests.kit.sentinels import Sentinels
from tests.kit.wait import WITHIN_S, until

from .test_resume import num_steps, outcomes

STEPS = 8
TRIES_S = 8.0
"""Longer than the attempts of a caller without patience take, in seconds."""
REPLY_S = 14.0
"""Longer than the reply timeout, in seconds."""


def killed(broker: EmbeddedBroker, seconds: float) -> None:
    broker.kill()
    time.sleep(seconds)
    broker.start()


def frozen(broker: EmbeddedBroker, seconds: float) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(broker.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("kill_s", "freeze_s"),
    [
        pytest.param(TRIES_S, REPLY_S, marks=pytest.mark.slow),
        pytest.param(300.0, 300.0, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_when_its_broker_is_back(
    tmp_path: Path, own_broker: EmbeddedBroker, run_id: str, kill_s: float, freeze_s: float
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    patience = {"broker__stall_timeout_s": "3600"}
    flags = config(tmp_path, run_id, own_broker.url, steps=str(STEPS), checkpoint__interval="100", **patience)
    own_broker.kill()

    def is_past(step: int) -> bool:
        assert trainer.poll() is None, log.read_text()
        return num_steps(out) > step

    with trainer_process(flags, log) as trainer:
        until(lambda: log.exists() and "waiting for it" in log.read_text(), "it says that the broker is away")
        time.sleep(TRIES_S)
        own_broker.start()
        with replica(tmp_path, run_id, own_broker.url):
            until(lambda: is_past(0), "a step")
            killed(own_broker, kill_s)
            step = num_steps(out)
            until(lambda: is_past(step), "a step after it was killed")
            frozen(own_broker, freeze_s)
            assert trainer.wait(WITHIN_S + kill_s + freeze_s) == 0, log.read_text()
    ended = Counter(outcomes(out))
    assert len(ended) >= 4 * STEPS
    assert set(ended.values()) == {1}
    assert log.read_text().count("answers again, after") >= 3


@pytest.mark.slow
def test_a_run_goes_on_with_the_next_master(tmp_path: Path, broker_binary: Path | None, run_id: str) -> None:
    """Sentinels replace a master that is killed, then one that hangs and wakes up still believing it is the master."""
    out, log = tmp_path / "run", tmp_path / "log"
    with Sentinels(tmp_path / "sentinels", broker_binary) as sentinels:

        def flags(steps: int) -> list[str]:
            return config(tmp_path, run_id, sentinels.url_of(Role.TRAINER), steps=str(steps), checkpoint__interval="20")

        def goes_on() -> None:
            step = num_steps(out)
            until(lambda: trainer.poll() is not None or num_steps(out) > step, "a step")
            assert trainer.poll() is None, log.read_text()

        with replica(tmp_path, run_id, sentinels.url_of(Role.ROLLOUT)):
            with trainer_process(flags(10**6), log) as trainer:
                goes_on()
                killed = sentinels.master
                killed.kill()
                goes_on()
                killed.start()
                sentinels.await_copy(killed)
                goes_on()
                frozen = sentinels.master
                assert frozen is not killed
                frozen.signal(signal.SIGSTOP)
                goes_on()
                frozen.signal(signal.SIGCONT)
                sentinels.await_copy(frozen)
                goes_on()
                trainer.send_signal(signal.SIGTERM)
                trainer.wait()
            train(flags(num_steps(out) + 4))
    ended = Counter(outcomes(out))
    assert len(ended) >= 4 * num_steps(out)
    assert set(ended.values()) == {1}
    assert log.read_text().count("answers again, after") >= 2
    assert "Traceback" not in log.read_text() + (tmp_path / f"replica-{run_id}.log").read_text()

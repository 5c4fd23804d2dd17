"""The broker is away, at the start of a run and in its middle: the trainer says so, waits, and goes on by itself."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from services.transport.embedded import EmbeddedBroker
from tests.kit.runs import config, replica, trainer_process
from tests.kit.wait import WITHIN_S, until

from .test_resume import num_steps, outcomes

STEPS = 8
TRIES_S = 8.0
"""Longer than the few attempts of a caller without patience take."""
REPLY_S = 14.0
"""Longer than a reply is waited for."""


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

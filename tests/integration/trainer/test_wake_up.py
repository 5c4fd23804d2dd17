"""A trainer that was stopped and replaced publishes and saves nothing when it wakes up."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import psutil
import pytest

from dvp_rl.transport import failpoints
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_trainer.resume.checkpoint import Checkpoints
from tests.kit.forked import Service
from tests.kit.runs import config, replica, train, trainer_process
from tests.kit.wait import WITHIN_S, until


def is_stopped(child: Service) -> bool:
    assert child.poll() is None, "ended instead of stopping at its fail point"
    return psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def everything(run: Path) -> dict[str, str]:
    """Digests of the run's checkpoints, ledgers and metrics. Weights are left out: unannounced ones are harmless."""
    files = [*run.glob("*.jsonl"), *run.glob("checkpoints/step-*/**/*")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "refusal"),
    [
        ("publish.before:2", "another trainer took over"),
        ("announce.before:2", "another trainer took over"),
        ("submit.before:2", "another trainer took over"),
        ("settle.before:2", "another trainer took over"),
        ("checkpoint.before", "another trainer took over"),
    ],
)
async def test_a_replaced_trainer_wakes_up_to_nothing(
    tmp_path: Path, own_broker: EmbeddedBroker, run_id: str, point: str, refusal: str
) -> None:
    flags = config(tmp_path, run_id, own_broker.url, broker__lease_s="1", steps="4")
    log = tmp_path / "stopped.log"
    with (
        replica(tmp_path, run_id, own_broker.url),
        trainer_process(flags, log, **{failpoints.VARIABLE: f"{point}=stop"}) as stopped,
    ):
        until(lambda: is_stopped(stopped), f"it stops at {point}")
        train(flags)
        async with await Broker.connect(own_broker.url, run_id) as broker:
            published = await broker.redis.xrange(broker.keys.versions)
            files = everything(tmp_path / "run")
            stopped.send_signal(signal.SIGCONT)
            assert stopped.wait(WITHIN_S) == 2
            assert refusal in log.read_text()
            assert await broker.redis.xrange(broker.keys.versions) == published
    assert everything(tmp_path / "run") == files
    assert Checkpoints(tmp_path / "run" / "checkpoints", keep=2).steps() == [2, 4]

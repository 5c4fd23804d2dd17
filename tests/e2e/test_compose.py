"""`docker compose up` for real: the demo model trained by containers that are scaled and killed meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from deploy.demo.run_folder import RunFolder
from deploy.demo.summary import ENDS, reconcile
from services.contract.errors import DvpError
from trainer.reporting import read_metrics

from .stack import BUILD_S, Stack, require_engine, running

TRAINING_S = 1200.0
PROBE = """
import importlib.util, json, os, shutil
tools = [tool for tool in ("gcc", "cc", "make", "git") if shutil.which(tool)]
packages = ("torch", "datasets", "matplotlib", "pytest", "mypy", "trainer")
present = [package for package in packages if importlib.util.find_spec(package)]
print(json.dumps({"uid": os.getuid(), "tools": tools, "packages": present}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + 2 * TRAINING_S)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    require_engine()
    stack = Stack()
    with running(stack):
        yield stack


def test_training_survives_scaling_and_kills(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def after(step: int) -> None:
        stack.wait_until(lambda: stack.step() >= step, f"step {step} is done", TRAINING_S)

    after(3)
    stack.scale(3)
    stack.kill(stack.containers("rollout")[1])
    after(stack.step() + 3)
    stack.kill(*stack.containers("redis"))
    after(stack.step() + 3)
    stack.compose("restart", "--no-deps", "rollout")
    after(max(22, stack.step() + 3))
    stack.kill(*stack.containers("trainer"))
    stack.kill(*stack.containers("gateway"))
    after(stack.step() + 3)
    stack.scale(2)
    (trainer,) = stack.containers("trainer")
    stack.wait_until(lambda: stack.inspect(trainer)["State"]["Status"] == "exited", "the trainer is done", TRAINING_S)

    stack.compose("cp", "trainer:/runs/demo", str(tmp_path))
    folder = RunFolder(tmp_path / "demo")
    progress, metrics = folder.progress(), [record for record in read_metrics(folder.metrics) if record["step"]]
    submitted, consumed = folder.submitted(progress), folder.consumed(progress)
    books = reconcile(submitted, consumed, progress["outstanding"])
    rewards = [record["reward/mean"] for record in metrics]
    accounting = {
        "steps": progress["step"],
        "jobs submitted": len(set(submitted)),
        "jobs consumed": len(consumed),
        "jobs outstanding": len(progress["outstanding"]),
        "lost": len(books.lost),
        "duplicated": len(books.duplicated),
        "reward, first": round(mean(rewards[:ENDS]), 3),
        "reward, last": round(mean(rewards[-ENDS:]), 3),
        "killed and back": ", ".join(stack.killed),
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(accounting, indent=2)}\n")

    assert (accounting["lost"], accounting["duplicated"]) == (0, 0)
    assert rewards[-1] > rewards[0]
    assert stack.inspect(trainer)["State"]["ExitCode"] == 0
    assert [record["step"] for record in metrics] == list(range(1, progress["step"] + 1))
    assert len(stack.containers("rollout")) == 2


def test_gateway_serves_those_with_the_token(stack: Stack) -> None:
    with stack.client() as client:
        assert len(client.rollout(prompt="37+58=", n=2, sampling={"max_tokens": 6}).samples) == 2
        assert client.queue()
    with stack.client(token="wrong") as stranger, pytest.raises(DvpError, match="token"):
        stranger.weights()


def test_only_the_gateway_is_published(stack: Stack) -> None:
    services = ("redis", "rollout", "trainer", "gateway")
    containers = [stack.inspect(container) for service in services for container in stack.containers(service)]
    ports = [port for container in containers for port in container["HostConfig"]["PortBindings"].values()]
    assert ports == [[{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]]


@pytest.mark.parametrize("image", ["rollout", "trainer"])
def test_image_holds_what_it_needs_and_no_more(stack: Stack, image: str) -> None:
    done = stack.docker("run", "--rm", "--read-only", "--entrypoint=python", f"dvp-rl/{image}", "-c", PROBE)
    found = json.loads(done)
    packages = {"rollout": ["torch"], "trainer": ["torch", "datasets", "matplotlib", "trainer"]}
    assert found == {"uid": 10001, "tools": [], "packages": packages[image]}

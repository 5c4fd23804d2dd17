"""`docker compose up` on a real engine: containers train the demo model while they are scaled, killed and replaced."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import pytest

from dvp_rl.contract.errors import ConfigError, DvpError
from dvp_rl.http.api_tokens import Scope
from dvp_rl.monitor.bodies import Completions
from dvp_trainer.report.outcome import ENDS
from tests.kit import web
from tests.kit.tokens import write_token

from .stack import BUILD_S, Stack, clone, require_engine, running

TRAINING_S = 1200.0
ENDLESS = 1_000_000
LAST_STEPS, MIN_STEPS = 30, 150
"""Steps after the last disturbance, and the least number of steps in which the model learns."""
IMAGES = ("rollout", "trainer", "monitor", "gateway")
SERVICES = ("redis", *IMAGES)
PROBE = """
import importlib.util, json, os, shutil
tools = [tool for tool in ("gcc", "cc", "make", "git") if shutil.which(tool)]
packages = ("transformers", "torch", "datasets", "matplotlib", "pytest", "mypy", "dvp_trainer")
present = [package for package in packages if importlib.util.find_spec(package)]
print(json.dumps({"uid": os.getuid(), "tools": tools, "packages": present}))
"""
# What Triton does at the first use of a kernel.
COMPILE = """
import subprocess, sysconfig, tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
folder = Path(tempfile.mkdtemp())
(folder / "launch.c").write_text(
    '#include <Python.h>\\nstatic struct PyModuleDef it = {PyModuleDef_HEAD_INIT, "launch"};'
    'PyMODINIT_FUNC PyInit_launch(void) { return PyModule_Create(&it); }'
)
options = ["-O3", "-shared", "-fPIC", "-I" + sysconfig.get_paths()["include"]]
subprocess.run(["gcc", *options, folder / "launch.c", "-o", folder / "launch.so"], check=True)
print(module_from_spec(spec_from_file_location("launch", folder / "launch.so")).__name__)
"""
# Files that the engine mounts or makes by itself do not belong to the image.
LISTING = """
import hashlib, os, sys
for root in ("/app", "/usr", "/etc", "/runs", "/weights"):
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names):
            if path not in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
                link = os.path.islink(path)
                content = os.readlink(path).encode() if link else open(path, "rb").read()
                status = os.lstat(path)
                print(path, oct(status.st_mode), status.st_uid, hashlib.sha256(content).hexdigest())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + 2 * TRAINING_S)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require_engine()
    stack = Stack(clone(tmp_path_factory.mktemp("clone")))
    stack.set_steps(ENDLESS)
    stack.environment["DVP_COMPLETIONS_FILE"] = "/runs/{run}/completions.jsonl"
    with running(stack, "--scale", "rollout=3"):
        yield stack


def test_training_survives_scaling_kills_and_a_rolling_restart(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def after(steps: int) -> None:
        goal = stack.step() + steps
        stack.wait_until(lambda: stack.step() >= goal, f"step {goal} is done", TRAINING_S)

    assert len(stack.containers("rollout")) == 3
    after(3)
    for replicas in (1, 4, 2):
        stack.scale(replicas)
        after(2)
    for service in SERVICES:
        stack.kill(stack.containers(service)[0])
        after(2)
    before = stack.containers("rollout")
    with calling(stack) as answers:
        stack.run("deploy/docker/roll.sh")
    after(2)
    stack.set_steps(max(stack.step() + LAST_STEPS, MIN_STEPS))
    stack.compose("restart", "trainer")
    metrics, accounting = stack.ended_run("demo", tmp_path, TRAINING_S)
    rewards = [record["reward/mean"] for record in metrics]
    accounting |= {
        "reward, first": round(mean(rewards[:ENDS]), 3),
        "reward, last": round(mean(rewards[-ENDS:]), 3),
        "replicas": "3, then 1, 4, 2, then both replaced one by one",
        "killed and back": ", ".join(stack.killed),
        "HTTP answers while replicas were replaced": dict(answers),
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(accounting, indent=2)}\n")

    assert (accounting["lost"], accounting["trained twice"]) == (0, 0)
    assert mean(rewards[-ENDS:]) > mean(rewards[:ENDS]) + 0.1
    assert [record["step"] for record in metrics] == list(range(1, accounting["steps"] + 1))
    assert accounting["steps"] >= MIN_STEPS
    assert stack.killed == list(SERVICES)
    assert len(stack.containers("rollout")) == 2
    assert not set(before) & set(stack.containers("rollout"))
    assert answers["ok"] > 0
    assert answers.keys() == {"ok"}
    # Each part has its own user of Redis, which was denied nothing.
    assert stack.compose("exec", "-T", "redis", "redis-cli", "acl", "log").strip() == ""


@contextmanager
def calling(stack: Stack) -> Iterator[Counter[str]]:
    """Asks the gateway for rollouts during the block, one after another, and counts the outcomes."""
    done, answers = threading.Event(), Counter[str]()

    def call() -> None:
        with stack.client() as client:
            while not done.is_set():
                try:
                    client.rollout(prompt="37+58=", n=1, sampling={"max_tokens": 6})
                    answers["ok"] += 1
                except DvpError as error:
                    answers[str(error)] += 1

    caller = threading.Thread(target=call)
    caller.start()
    try:
        yield answers
    finally:
        done.set()
        caller.join()


def test_gateway_serves_those_with_the_token(stack: Stack) -> None:
    with stack.client() as client:
        assert len(client.rollout(prompt="37+58=", n=2, sampling={"max_tokens": 6}).samples) == 2
        assert client.queue()
    with stack.client(token="wrong") as stranger, pytest.raises(DvpError, match="token"):
        stranger.weights()


def test_monitor_says_how_the_queue_is_to_those_with_the_token(stack: Stack) -> None:
    with stack.client(port=stack.monitor_port) as client:
        assert client.queue().run_id == "demo"
    with stack.client(port=stack.monitor_port, token="wrong") as stranger, pytest.raises(DvpError, match="token"):
        stranger.queue()


def test_monitor_shows_completions_to_those_with_a_token(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.monitor_port}/v1/completions"
    token = (stack.tokens / "read/prometheus").read_text()
    shown = web.get(url, headers={"Authorization": f"Bearer {token}"})
    assert shown.status_code == 200, shown.text
    assert Completions.model_validate(shown.json()).completions
    assert web.get(url).status_code == 401


def test_clients_cannot_operate(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.monitor_port}/v1/dead/drop"
    for caller, status in (("rollout/client", 403), ("read/prometheus", 403), ("operate/operator", 200)):
        token = (stack.tokens / caller).read_text()
        answer = web.post(url, json={"entry_ids": ["1-1"]}, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status, answer.text


def test_a_token_is_replaced_while_everything_runs(stack: Stack) -> None:
    before = [stack.containers(service) for service in SERVICES]
    old = (stack.tokens / "rollout" / "client").read_text()
    new = write_token(stack.tokens, Scope.ROLLOUT, "client")

    def accepted(token: str) -> list[bool]:
        return [is_let_in(stack, token, port) for port in (stack.port, stack.monitor_port) for _ in range(8)]

    stack.wait_until(lambda: all(accepted(new)), "the new token is accepted everywhere", 60)
    assert not any(accepted(old))
    assert [stack.containers(service) for service in SERVICES] == before


def test_an_operator_has_dvp_queue(stack: Stack) -> None:
    status = json.loads(stack.compose("run", "--rm", "queue", "status", "--json"))
    assert status["run_id"] == "demo"


def test_up_mends_an_outage(stack: Stack) -> None:
    """`up` succeeds although nearly everything is unhealthy at the end of an outage."""
    stack.compose("stop", "redis")
    stack.wait_until(lambda: not any(healths(stack)), "all replicas miss their broker", 120)
    stack.compose("up", "--detach")
    stack.wait_until(lambda: all(healths(stack)), "they have it again", 120)


def healths(stack: Stack) -> list[bool]:
    return [stack.is_healthy(container) for container in stack.containers("rollout")]


def test_a_password_of_the_broker_is_replaced(stack: Stack) -> None:
    """Follows deploy/docker/README.md."""
    before = stack.containers("rollout")
    env = stack.folder / ".env"
    env.write_text(re.sub("^(ROLLOUT_REDIS_PASSWORD=).*$", r"\1", env.read_text(), flags=re.MULTILINE))
    stack.run("deploy/secrets.sh")
    stack.compose("up", "--detach", "--wait", "redis", "rollout", "gateway", "monitor")
    assert not set(before) & set(stack.containers("rollout"))
    with stack.client() as client:
        job = client.submit(prompt="37+58=", n=1, sampling={"max_tokens": 6})
        assert len(client.wait(job).samples) == 1


def is_let_in(stack: Stack, token: str, port: int) -> bool:
    with stack.client(token=token, port=port) as client:
        try:
            client.queue()
        except ConfigError:
            return False
    return True


def test_only_gateway_and_monitor_are_published_and_only_here(stack: Stack) -> None:
    containers = [stack.inspect(container) for service in SERVICES for container in stack.containers(service)]
    ports = [port for container in containers for port in container["HostConfig"]["PortBindings"].values()]
    assert ports == [[{"HostIp": "127.0.0.1", "HostPort": str(port)}] for port in (stack.monitor_port, stack.port)]


@pytest.mark.parametrize("image", ["monitor", "rollout", "trainer"])
def test_image_holds_what_it_needs_and_no_more(stack: Stack, image: str) -> None:
    done = stack.docker("run", "--rm", "--read-only", "--entrypoint=python", f"dvp-rl/{image}", "-c", PROBE)
    found = json.loads(done)
    packages = {
        "monitor": [],
        "rollout": ["transformers", "torch"],
        "trainer": ["transformers", "torch", "datasets", "matplotlib", "dvp_trainer"],
    }
    assert found == {"uid": 10001, "tools": [], "packages": packages[image]}


def test_the_image_of_the_trainer_on_gpus_can_compile(stack: Stack) -> None:
    flags = f"PIP_FLAGS={os.environ.get('PIP_FLAGS', '')}"
    options = ("--file=deploy/docker/Dockerfile", "--target=trainer-gpu", f"--build-arg={flags}")
    image = stack.docker("build", "--quiet", *options, ".").strip()
    try:
        # As docker-compose.yml runs it.
        confined = ("--read-only", "--tmpfs=/tmp:exec", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")
        done = stack.docker("run", "--rm", *confined, "--entrypoint=python", image, "-c", COMPILE)
    finally:
        stack.docker("image", "rm", image)
    assert done == "launch\n"


def test_images_share_their_layers(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the packages of the previous one, so that all together take little more space than the largest."""
    found = {image: json.loads(stack.docker("image", "inspect", f"dvp-rl/{image}"))[0] for image in IMAGES}
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{image:10} {found[image]['Size'] / 1e6:6.0f} MB" for image in IMAGES) + "\n")
    monitor, rollout, trainer = (found[name]["RootFS"]["Layers"] for name in ("monitor", "rollout", "trainer"))
    # The last layer is the code.
    assert rollout[: len(monitor) - 1] == monitor[:-1]
    assert trainer[: len(rollout) - 1] == rollout[:-1]


def test_two_builds_hold_the_same_files(stack: Stack) -> None:
    anew = f"PIP_FLAGS={os.environ.get('PIP_FLAGS', '')} --timeout={secrets.randbelow(1000) + 100}"
    options = ("--file=deploy/docker/Dockerfile", "--target=monitor", f"--build-arg={anew}")
    again = stack.docker("build", "--quiet", *options, ".").strip()
    list_files = ("run", "--rm", "--user=root", "--entrypoint=python")
    try:
        listings = [stack.docker(*list_files, image, "-c", LISTING) for image in ("dvp-rl/monitor", again)]
    finally:
        stack.docker("image", "rm", again)
    first, second = (set(listing.splitlines()) for listing in listings)
    assert len(first) > 1000
    assert first == second

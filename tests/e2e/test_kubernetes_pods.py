"""The manifests' pods without a cluster: Docker runs their containers as the manifests say, and they train the demo.

User, command, environment, volumes, read-only root, order and sidecar are those of the manifests, and the containers of
a pod share one network address. What Kubernetes adds (scheduling, scaling, policies) is not tested here.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dvp_rl.client import Client
from dvp_rl.contract.errors import UnavailableError
from dvp_rl.contract.weights import WeightVersion
from dvp_rl.http.api_tokens import Scope
from tests.kit.manifests import REPOSITORY, Manifest, Rendered
from tests.kit.ports import free_port

from .stack import BUILD_S, COMMAND_S, require_engine

TRAINING_S = 600.0
STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S + TRAINING_S)]


def docker(*arguments: str, timeout: float = COMMAND_S) -> str:
    command = ["docker", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def logs(container: str) -> str:
    command = ["docker", "logs", "--tail=40", container]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S
    ).stdout


def build() -> None:
    for target in ("monitor", "rollout", "trainer", "harness"):
        pip_flags = f"PIP_FLAGS={os.environ.get('PIP_FLAGS', '')}"
        options = (f"--target={target}", f"--build-arg={pip_flags}", f"--tag=dvp-rl/{target}")
        docker("build", "--quiet", "--file=deploy/docker/Dockerfile", *options, ".", timeout=BUILD_S)
    docker("build", "--quiet", "--file=deploy/docker/inputs.Dockerfile", "--tag=dvp-rl/inputs", ".", timeout=BUILD_S)


class Cluster:
    """Stands in for a cluster with a network, volumes and containers of Docker."""

    def __init__(self, rendered: Rendered, secrets: Path) -> None:
        self.rendered = rendered
        self.secrets = secrets
        self.name = f"dvp-pods-{os.getpid()}"
        self.containers: list[str] = []
        self.volumes: list[str] = []
        docker("network", "create", self.name)

    def start(self, pod: str, port: int | None = None, published: int | None = None, **extra: str) -> str:
        """Starts the pod and returns its main container. `port` is reached as `published`; `extra` adds to the
        environment."""
        spec = self.rendered.pods()[pod]
        publish = () if port is None else (f"--publish=127.0.0.1:{published}:{port}",)
        alias = f"--network-alias={pod}"
        sandbox = self._run(
            "redis:7", f"{pod}-sandbox", f"--network={self.name}", alias, *publish, command=["sleep", "inf"]
        )
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            name = self._start(pod, spec, container, sandbox, extra)
            if container in spec.get("initContainers", []) and container.get("restartPolicy") != "Always":
                assert docker("wait", name) == "0", logs(name)
        return name

    def end(self, pod: str) -> None:
        """Removes the pod and its volumes that are not claimed."""
        spec = self.rendered.pods()[pod]
        gone = [name for name in self.containers if name.startswith(f"{self.name}-{pod}-")]
        docker("rm", "--force", *reversed(gone))
        self.containers = [name for name in self.containers if name not in gone]
        unclaimed = {self._volume(pod, volume["name"]) for volume in spec["volumes"] if "emptyDir" in volume}
        docker("volume", "rm", *unclaimed.intersection(self.volumes))
        self.volumes = [name for name in self.volumes if name not in unclaimed]

    def _volume(self, pod: str, name: str) -> str:
        return f"{self.name}-{pod}-{name}"

    def _start(self, pod: str, spec: Manifest, container: Manifest, sandbox: str, extra: dict[str, str]) -> str:
        environment = self.rendered.environment(pod, container["name"])
        self.rendered.mount(pod, container["name"], self.secrets / pod)
        words = [*container.get("command", []), *container.get("args", [])]
        user = spec["securityContext"]
        options = [
            f"--network=container:{sandbox}",
            f"--user={user['runAsUser']}:{user['runAsGroup']}",
            *("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"),
            *(f"--env={name}={value}" for name, value in (environment | extra).items()),
            *(self._mounted(pod, spec, mount) for mount in container["volumeMounts"]),
        ]
        if "workingDir" in container:
            options.append(f"--workdir={container['workingDir']}")
        if "command" in container:
            options.append(f"--entrypoint={words.pop(0)}")
        words = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in words]
        return self._run(container["image"], f"{pod}-{container['name']}", *options, command=words)

    def _run(self, image: str, name: str, *options: str, command: list[str]) -> str:
        name = f"{self.name}-{name}"
        self.containers.append(name)
        docker("run", "--detach", f"--name={name}", *options, image, *command)
        return name

    def _mounted(self, pod: str, spec: Manifest, mount: Manifest) -> str:
        """Option that mounts the pod's volume, made at first use and owned by its user, or files of a manifest."""
        if any(volume["name"] == mount["name"] and self.rendered.files(volume) for volume in spec.get("volumes", ())):
            return f"--volume={self.secrets / pod}{mount['mountPath']}:{mount['mountPath']}:ro"
        name = self._volume(pod, mount["name"])
        if name not in self.volumes:
            self.volumes.append(name)
            owner = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
            docker("run", "--rm", "--user=root", f"--volume={name}:/volume", "redis:7", "chown", owner, "/volume")
        return f"--volume={name}:{mount['mountPath']}:nocopy{',ro' if mount.get('readOnly') else ''}"

    def close(self) -> None:
        docker("rm", "--force", "--volumes", *reversed(self.containers))
        docker("volume", "rm", *self.volumes)
        docker("network", "rm", self.name)


AGENT: Manifest = {
    "run": {
        "id": "calculator",
        "model": "deploy/demo/calculator/model",
        "config": "deploy/demo/calculator/config.toml",
    },
    "harness": {"environment": "deploy.demo.calculator.environment:Calculator", "settings": {"workers": 32}},
}


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    require_engine()
    cluster = Cluster(Rendered("cpu", getattr(request, "param", None)), tmp_path / "secrets")
    try:
        build()
        yield cluster
    finally:
        cluster.close()


def test_pods_train_and_replicas_start_when_the_trainer_is_gone(cluster: Cluster) -> None:
    replica_port, monitor_port = free_port(), free_port()
    redis = cluster.start("redis")
    replica = cluster.start("rollout", 8000, replica_port)
    cluster.start("monitor", 8080, monitor_port)
    trainer = cluster.start("trainer", DVP_TRAIN__STEPS=str(STEPS), DVP_TRAIN__EVALUATE__INTERVAL="0")
    wait_until(lambda: "is not announced yet" in logs(trainer), trainer)
    cluster.start("weights")

    wait_until(lambda: docker("inspect", "--format={{.State.Status}}", trainer) == "exited", trainer)
    assert docker("inspect", "--format={{.State.ExitCode}}", trainer) == "0", logs(trainer)
    token = cluster.rendered.token(Scope.ROLLOUT)
    with Client(f"http://127.0.0.1:{replica_port}", token=token) as client:
        wait_until(lambda: seq(client) > STEPS, replica)
        assert client.rollout(prompt="37+58=", n=1, sampling={"max_tokens": 6}).samples
        trained = client.weights().version
    with Client(f"http://127.0.0.1:{monitor_port}", token=token) as client:
        assert client.queue().run_id == "demo"
    mounts = docker("inspect", "--format={{range .Mounts}}{{.Destination}} {{end}}", replica).split()
    of_tokens = {mount for mount in mounts if mount.startswith(("/tokens/", "/weights-token"))}
    assert set(mounts) - of_tokens == {"/cache", "/inputs", "/tmp"}, "no volume that the trainer writes to"
    assert docker("exec", redis, "redis-cli", "acl", "log") == "", "each pod is a user of its own"

    cluster.end("trainer")
    cluster.end("rollout")
    replica = cluster.start("rollout", 8000, replica_port)
    with Client(f"http://127.0.0.1:{replica_port}", token=token) as client:
        wait_until(lambda: seq(client) > STEPS, replica)
        assert client.weights().version == trained


@pytest.mark.parametrize("cluster", [AGENT], indirect=True)
def test_pods_play_episodes(cluster: Cluster) -> None:
    cluster.start("redis")
    cluster.start("rollout")
    harness = cluster.start("harness")
    trainer = cluster.start("trainer", DVP_TRAIN__STEPS="2", DVP_TRAIN__EVALUATE__INTERVAL="0")
    cluster.start("weights")
    wait_until(lambda: docker("inspect", "--format={{.State.Status}}", trainer) == "exited", trainer)
    assert docker("inspect", "--format={{.State.ExitCode}}", trainer) == "0", logs(trainer)
    docker("stop", harness)
    assert "finished; mean reward" in logs(harness)
    assert "cannot be played" not in logs(harness)


def seq(client: Client) -> int:
    """Sequence number of the weights served; 0 while no replica answers."""
    try:
        return WeightVersion.parse(client.weights().version).seq
    except UnavailableError:
        return 0


def wait_until(condition: Callable[[], bool], container: str) -> None:
    deadline = time.monotonic() + TRAINING_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(logs(container))
        time.sleep(1)

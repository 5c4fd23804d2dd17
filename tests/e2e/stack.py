"""A fresh clone and its compose stack under a unique project name, on the engine that `docker` reaches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deploy.demo.run_folder import RunFolder
from deploy.demo.summary import reconcile
from dvp_rl.client import Client
from dvp_trainer.report.sinks import read_metrics
from tests.kit.ports import free_port

REPOSITORY = Path(__file__).parents[2]
BUILD_S = 1500.0
COMMAND_S = 300.0


def require_compose() -> None:
    """Skips the test with a reason if there is no compose 2; this does not need an engine."""
    if shutil.which("docker") is None:
        pytest.skip("NOT TESTED: no docker command here")
    _require("docker", "compose", "version")


def require_engine() -> None:
    """Skips the test with a reason if there is no engine with compose 2."""
    require_compose()
    _require("docker", "info", "--format={{.ServerVersion}}")


def _require(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        pytest.skip(f"NOT TESTED: {' '.join(command)}: {reason}")


def clone(folder: Path) -> Path:
    """Copies what git would clone if the whole working tree were committed: no environment, no build. Git knows of
    permissions only whether a file is executable."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
            (folder / name).chmod(0o755 if os.access(folder / name, os.X_OK) else 0o644)
    return folder


class EndedRun(NamedTuple):
    metrics: list[dict[str, Any]]
    """Of each step."""
    accounting: dict[str, Any]
    """What became of the jobs, to print and to check."""


class Stack:
    def __init__(self, folder: Path, name: str = "", config: str = "deploy/demo/config.toml") -> None:
        """`name` distinguishes several stacks. `config`: the trainer's configuration, in `folder`."""
        self.folder, self.project = folder, f"dvp-e2e-{os.getpid()}{name}"
        self.config = folder / config
        self.port, self.monitor_port = free_port(), free_port()
        self.killed: list[str] = []
        """Services whose main process was killed and came back."""
        self.environment = {
            "PIP_FLAGS": "",
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            "DVP_PORT": str(self.port),
            "MONITOR_PORT": str(self.monitor_port),
        }

    def compose(self, *arguments: str, timeout: float = COMMAND_S) -> str:
        return self.run("docker", "compose", *arguments, timeout=timeout)

    def docker(self, *arguments: str) -> str:
        return self.run("docker", *arguments)

    def run(self, *command: str, timeout: float = COMMAND_S) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(self.docker("inspect", container))
        return dict(found)

    def scale(self, replicas: int) -> None:
        """Scales the replicas as the README does; returns when all of them are ready."""
        self.compose("up", "--detach", "--wait", "--no-recreate", f"--scale=rollout={replicas}", "rollout")

    def kill(self, container: str) -> None:
        """Kills the main process from outside with SIGKILL, like a crash: after `docker kill` the engine would restart
        nothing. Returns when the container runs again, healthy if it has a health check."""
        before = self.inspect(container)
        pid = str(before["State"]["Pid"])
        self.docker("run", "--rm", "--pid=host", "--user=root", "--entrypoint=sh", "redis:7", "-c", f"kill -9 {pid}")
        self.wait_until(
            lambda: self.inspect(container)["RestartCount"] > before["RestartCount"], f"{container} is restarted", 60
        )
        if "Health" in before["State"]:
            self.wait_until(lambda: self.is_healthy(container), f"{container} is healthy", 120)
        self.killed.append(before["Config"]["Labels"]["com.docker.compose.service"])

    def is_healthy(self, container: str) -> bool:
        return bool(self.inspect(container)["State"]["Health"]["Status"] == "healthy")

    def ended_run(self, run_id: str, folder: Path, timeout_s: float) -> EndedRun:
        """Waits until the trainer has done its last step, and copies its run into `folder`."""
        (trainer,) = self.containers("trainer")
        self.wait_until(lambda: self.inspect(trainer)["State"]["Status"] == "exited", "the trainer is done", timeout_s)
        assert self.inspect(trainer)["State"]["ExitCode"] == 0
        self.compose("cp", f"trainer:/runs/{run_id}", str(folder))
        run = RunFolder(folder / run_id)
        progress, metrics = run.progress(), [record for record in read_metrics(run.metrics) if record["step"]]
        submitted, consumed = run.submitted(progress), run.consumed(progress)
        books = reconcile(submitted, consumed, progress["outstanding"])
        accounting = {
            "steps": progress["step"],
            "jobs submitted": len(set(submitted)),
            "jobs consumed": len(consumed),
            "jobs outstanding": len(progress["outstanding"]),
            "lost": len(books.lost),
            "trained twice": len(books.duplicated),
        }
        return EndedRun(metrics, accounting)

    def set_steps(self, steps: int) -> None:
        """Sets the steps that the run has, from the trainer's next start."""
        text, found = re.subn("^steps = .*", f"steps = {steps}", self.config.read_text(), flags=re.MULTILINE)
        assert found == 1
        self.config.write_text(text)

    def step(self) -> int:
        """Last step that the trainer has logged; 0 before the first one ends."""
        return max(map(int, re.findall(r"step +(\d+)/", self.compose("logs", "--no-log-prefix", "trainer"))), default=0)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(
                    f"timed out after {timeout_s:g} s waiting until {what}\n{self.compose('logs', '--tail=40')}"
                )
            time.sleep(1)

    @property
    def tokens(self) -> Path:
        return self.folder / ".secrets" / "tokens"

    def client(self, *, token: str | None = None, port: int | None = None) -> Client:
        """A client of the gateway, or of the service on `port`; by default with the token for clients."""
        shown = (self.tokens / "rollout" / "client").read_text().strip() if token is None else token
        return Client(f"http://127.0.0.1:{port or self.port}", token=shown)


@contextmanager
def running(stack: Stack, *options: str) -> Iterator[None]:
    """Starts the stack with the README's two commands, and removes it at the end of the block."""
    try:
        stack.run("make", "secrets")
        stack.compose("up", "-d", "--build", "--wait", *options, timeout=BUILD_S)
        yield
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout=5")

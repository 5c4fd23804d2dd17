"""A real `dvp-monitor` for tests: the server's event loop in a thread of this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from dvp_rl.contract.http import ReplicaState
from dvp_rl.monitor.server import serve
from dvp_rl.monitor.settings import MonitorSettings
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry, TrainerBeat
from tests.integration.transport.rig import BLOCK_MS, Rig
from tests.kit import web
from tests.kit.processes import ServerThread
from tests.kit.records import write_at_once
from tests.kit.wait import until

HOSTILE = "<img src=x onerror=alert(1)> [bold]\x1b[31m"


class Monitor:
    """`with Monitor(folder, url, run_id) as monitor:` waits until its port is bound."""

    def __init__(
        self, folder: Path, url: str, run_id: str, *args: str, token: str | None = None, bearer: str | None = None
    ) -> None:
        """`token`: accepted by the monitor. Requests carry `bearer`, or else `token`."""
        self.folder = folder
        self._port_file = folder / "port"
        argv = ["--redis-url", url, "--run-id", run_id, "--port", "0", "--port-file", str(self._port_file)]
        argv += ["--interval-s", "0.1", *args, *(["--token", token] if token else [])]
        self._settings = MonitorSettings.load(argv)
        shown = bearer or token
        self._headers = {"Authorization": f"Bearer {shown}"} if shown else {}
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return web.get(self.url + path, headers=self._headers)

    def post(self, path: str, body: Any) -> httpx.Response:
        return web.post(self.url + path, json=body, headers=self._headers)

    @contextmanager
    def events(self, query: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
        """Yields (kind, content) of each event as it arrives."""
        with web.stream("GET", f"{self.url}/v1/events{query}", headers=self._headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _parse(response.iter_lines())

    def until_ready(self) -> None:
        until(lambda: self.get("/readyz").status_code == 200, "the monitor is ready")

    def __enter__(self) -> Self:
        self._server = ServerThread(partial(serve, self._settings))
        until(lambda: self._port_file.exists() or not self._server.running, "the monitor listens")
        self.port = int(self._port_file.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


def _parse(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


async def bury(rig: Rig, errors: Sequence[str]) -> None:
    """Lets a replica give up one waiting job for each error."""
    replica = rig.replica("replica-0")
    for lease, error in zip(await replica.claim(len(errors), BLOCK_MS), errors, strict=True):
        await replica.fail(lease, error, fatal=True)


async def stage(rig: Rig, *, num_replicas: int = 3, num_dead: int = 3) -> None:
    """Sets up a run in progress: jobs that wait, run, are done and are dead, replicas, a trainer."""
    await rig.submit(num_dead + 8)
    await bury(rig, [f"CUDA error {number}: {HOSTILE}" for number in range(num_dead)])
    replica = rig.replica("replica-0")
    await rig.finish(replica, 2)
    await replica.claim(2, BLOCK_MS)
    registry = ReplicaRegistry(rig.broker)
    for number in range(num_replicas):
        version = f"{rig.run_id}:{7 - number % 2}:ab"
        await registry.beat(ReplicaBeat(f"replica-{number}", ReplicaState.SERVING, version, in_flight=16, capacity=32))
    await registry.beat_trainer(TrainerBeat(step=42, version=f"{rig.run_id}:7:ab"), fence=rig.fence)


def write_metrics(path: Path, steps: int) -> None:
    records = [
        {
            "step": step,
            "time": 1_795_600_000.0 + 30 * step,
            "reward/mean": 0.9 - 0.6 * 0.98**step + 0.02 * (step * 7 % 5),
            "mismatch/kl": 0.001 + 0.0001 * (step % 7),
            "veto/outside": 0.002 * (step % 3),
            "veto/numerical": 0.0,
            "veto/nan": None,
            "mis/fraction": 0.01,
            "kept/mass_mean_train": 0.99 - 0.0001 * step,
            "kept/mass_mean_infer": 0.98 - 0.0001 * step,
            "staleness/mean": step % 2,
            "staleness/max": 1.0,
            "staleness/groups_0": 24.0,
            "length/mean": 20 - step / 50,
            "length/environment_mean": 12.0,
            "episodes/turns_mean": 3 + step % 5 / 10,
            "episodes/tool_calls_mean": 2.0,
            "episodes/tool_errors_mean": 0.98**step,
            "episodes/forks_mean": 0.0,
            "episodes/drifted_mean": 0.0,
            f"episodes/{'distance' * 4}_mean": 100 * 0.99**step,
            **({"staleness/groups_1": 7.0, "staleness/groups_2": 1.0} if step % 2 else {}),
            **({"heldout/score": 0.5 + step / 400} if step % 25 == 0 else {}),
        }
        for step in range(steps)
    ]
    write_at_once(path, "".join(json.dumps(record) + "\n" for record in records))

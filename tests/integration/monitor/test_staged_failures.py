"""API, page, metrics and alerts report the same for every failure of a running system."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from dvp_rl.contract.http import Verdict
from dvp_rl.contract.keys import Keys
from dvp_rl.transport.embedded import EmbeddedBroker
from tests.integration.monitor import prometheus
from tests.kit import browser
from tests.kit.forked import MONITOR, ROLLOUT, Service, service
from tests.kit.ports import free_port
from tests.kit.runs import MODEL, config, trainer_process
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.chromium() is None, reason="no Chromium on this machine (apt-get install chromium)"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="no Prometheus on this machine (apt-get install prometheus)"
    ),
]

RUN_ID = "staged"
DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboards" / "dvp.json"
VERDICT_ON_PAGE = "document.getElementById('verdict-name').textContent.slice(2)"
REASONS_ON_PAGE = "document.getElementById('reasons').textContent"


@dataclass
class System:
    """The processes of one run. `monitor` and `trainer` are ports."""

    broker: EmbeddedBroker
    http: httpx.Client
    monitor: int
    trainer: int
    replicas: dict[int, Service] = field(default_factory=dict)
    """Processes by port."""

    def get(self, port: int, path: str) -> httpx.Response:
        return self.http.get(f"http://127.0.0.1:{port}{path}")

    def is_ready(self, port: int) -> bool:
        try:
            return self.get(port, "/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def on_broker(self, *command: str | bytes) -> object:
        async def send() -> object:
            async with Redis.from_url(self.broker.url) as redis:
                return await redis.execute_command(*command)

        return asyncio.run(send())


@dataclass
class Watchers:
    system: System
    page: browser.Browser
    prometheus: prometheus.Prometheus

    def agree_on(self, verdict: Verdict, asked: list[int]) -> None:
        """Waits until all report the verdict: the APIs of the monitor and of the replicas `asked`, page, metrics,
        alerts."""
        for port in [self.system.monitor, *asked]:
            until(lambda port=port: self._verdict(port) == verdict, f"port {port} says {verdict}")  # type: ignore[misc]
        until(lambda: self.page.evaluate(VERDICT_ON_PAGE) == verdict.replace("_", " "), f"the page says {verdict}")
        until(lambda: f'dvp_queue_verdict{{verdict="{verdict}"}} 1.0' in self._metrics(), f"metrics say {verdict}")
        if verdict in (Verdict.OK, Verdict.IDLE):
            until(lambda: not self.prometheus.firing(), f"no alert fires: {self.prometheus.firing()}")
            return
        until(lambda: verdict in self.prometheus.firing(), f"the alert of {verdict} fires")
        reason = self.system.get(self.system.monitor, "/v1/queue").json()["reasons"][0]
        assert reason["remedy"] in self.page.evaluate(REASONS_ON_PAGE)

    def _verdict(self, port: int) -> str:
        return str(self.system.get(port, "/v1/queue").json()["verdict"])

    def _metrics(self) -> str:
        return self.system.get(self.system.monitor, "/metrics").text


@contextmanager
def running_system(folder: Path, broker: EmbeddedBroker) -> Iterator[System]:
    """Runs a monitor and two replicas with the fake engine. The trainer is only given a port."""
    common = [f"--redis-url={broker.url}", f"--run-id={RUN_ID}", f"--token={TOKEN}"]
    with ExitStack() as stack:
        http = stack.enter_context(
            httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=WITHIN_S, trust_env=False)
        )
        system = System(broker, http, monitor=free_port(), trainer=free_port())
        for number in (1, 2):
            port = free_port()
            flags = [f"--model={MODEL}", "--engine=fake", f"--port={port}", *common]
            flags += ["--fake.service-time-s=0.1", "--fake.num-tokens=6", "--lease-s=5", f"--replica-id=r{number}"]
            system.replicas[port] = stack.enter_context(service(ROLLOUT, flags, folder / f"r{number}.log"))
        metrics_file = folder / "run" / "metrics.jsonl"
        watch = [f"--port={system.monitor}", f"--metrics-file={metrics_file}", "--interval-s=0.5"]
        stack.enter_context(service(MONITOR, [*watch, *common], folder / "monitor.log"))
        until(lambda: all(map(system.is_ready, [*system.replicas, system.monitor])), "replicas and monitor are ready")
        yield system


def test_every_failure_looks_the_same_to_everybody(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    with ExitStack() as stack:
        system = stack.enter_context(running_system(tmp_path, own_broker))
        train = config(tmp_path, RUN_ID, own_broker.url, steps="1000000", sampling__n="2")
        train += [f"--metrics.port={system.trainer}", f"--metrics.token={TOKEN}"]
        trainer = stack.enter_context(trainer_process(train, tmp_path / "trainer.log"))
        ports = {"monitor": [system.monitor], "rollout": list(system.replicas), "trainer": [system.trainer]}
        watching = stack.enter_context(prometheus.running(tmp_path, TOKEN, ports))
        page = stack.enter_context(browser.running(tmp_path))
        page.open(f"http://operator:{TOKEN}@127.0.0.1:{system.monitor}/")
        page.until("document.getElementById('link')?.textContent === 'live'")
        watchers = Watchers(system, page, watching)
        first, second = system.replicas

        watchers.agree_on(Verdict.OK, asked=[first, second])
        until(lambda: watching.scraped() == set(ports), "every process is scraped")
        check_metrics(system, watching)

        poison(system)
        watchers.agree_on(Verdict.DEAD_LETTERS, asked=[first, second])
        drop_dead_letters(system)
        watchers.agree_on(Verdict.OK, asked=[first, second])

        fill(system)
        watchers.agree_on(Verdict.BROKER_MEMORY, asked=[first, second])
        system.on_broker("DEL", "ballast")
        watchers.agree_on(Verdict.OK, asked=[first, second])

        system.replicas[second].send_signal(signal.SIGSTOP)
        watchers.agree_on(Verdict.REPLICAS_LOST, asked=[first])
        system.replicas[second].send_signal(signal.SIGCONT)
        watchers.agree_on(Verdict.OK, asked=[first, second])

        trainer.kill()
        watchers.agree_on(Verdict.NO_TRAINER, asked=[first, second])
        for replica in system.replicas.values():
            replica.kill()
        watchers.agree_on(Verdict.NO_REPLICAS, asked=[])

        own_broker.kill()
        page.until("document.getElementById('verdict-name').textContent.includes('broker does not answer')")
        until(lambda: "DvpBrokerAway" in watching.firing(), "the alert of the broker fires")
        assert page.problems == []


def poison(system: System) -> None:
    system.on_broker("XADD", Keys(RUN_ID).jobs, "*", "data", b"no job", "at", "0")


def drop_dead_letters(system: System) -> None:
    address = f"http://127.0.0.1:{system.monitor}/v1/dead"
    ids = [letter["entry_id"] for letter in system.http.get(address).json()["letters"]]
    assert len(ids) == 1
    assert system.http.post(f"{address}/drop", json={"entry_ids": ids}).status_code == 200


def fill(system: System) -> None:
    """Fills four fifths of the broker's memory."""
    system.on_broker("CONFIG", "SET", "maxmemory", "100mb")
    system.on_broker("SETRANGE", "ballast", "80000000", "x")


def check_metrics(system: System, watching: prometheus.Prometheus) -> None:
    """Checks that promtool reports no problem, and that every metric of the dashboard and the alerts exists."""
    exported: set[str] = set()
    for port in [system.monitor, system.trainer, *system.replicas]:
        text = system.get(port, "/metrics").text
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        for family in text_string_to_metric_families(text):
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            exported |= {family.name + suffix for suffix in suffixes}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for expr in asked:
        assert set(re.findall(r"\bdvp_\w+", expr)) <= exported, expr
        watching.query(expr)
    alerts = (prometheus.DEPLOYED / "alerts.yml").read_text()
    assert set(re.findall(r"\bdvp_queue_\w+(?=[{ ])", alerts)) <= exported

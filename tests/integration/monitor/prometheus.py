"""A real Prometheus that scrapes the processes of a test with the configuration of the deployment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.kit.ports import free_port
from tests.kit.processes import process
from tests.kit.wait import WITHIN_S, until

DEPLOYED = Path(__file__).parents[3] / "deploy" / "prometheus"


class Prometheus:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def firing(self) -> set[str]:
        """Verdicts of the alerts that fire, or their names if they have none."""
        alerts = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        labels = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {label.get("verdict", label["alertname"]) for label in labels}

    def query(self, expr: str) -> list[Any]:
        answer = self._http.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        result: list[Any] = answer["data"]["result"]
        return result

    def scraped(self) -> set[str]:
        """Jobs whose targets all answer."""
        targets = self._http.get("/api/v1/targets").json()["data"]["activeTargets"]
        down = {target["labels"]["job"] for target in targets if target["health"] != "up"}
        return {target["labels"]["job"] for target in targets} - down


@contextmanager
def running(folder: Path, token: str, targets: Mapping[str, list[int]]) -> Iterator[Prometheus]:
    """Runs the deployed configuration, but scrapes every three seconds and lets alerts fire without their `for`.
    `targets`: ports by job."""
    binary = shutil.which("prometheus")
    assert binary is not None
    config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"}
    (folder / "token").write_text(token)
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["authorization"] = {"credentials_file": str(folder / "token")}
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in targets[job["job_name"]]]}]
    rules = yaml.safe_load((DEPLOYED / "alerts.yml").read_text())
    for alert in rules["groups"][0]["rules"]:
        del alert["for"]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (
        process([*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "prometheus.log"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S, trust_env=False) as http,
    ):
        prometheus = Prometheus(http)
        until(prometheus.ready, "Prometheus is ready")
        yield prometheus

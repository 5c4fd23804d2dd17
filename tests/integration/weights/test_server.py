"""dvp-weights serves finished weight folders and nothing else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dvp_rl.weights.folder import folder_name
from tests.integration.weights.conftest import LARGE, RUN_ID, Publish

FOLDER = f"{RUN_ID}/{folder_name(1)}"


@pytest.mark.parametrize(
    "path",
    [
        f"{FOLDER}/missing.json",
        f"{FOLDER}/link.json",
        f"{FOLDER}/.hidden",
        f"{FOLDER}/..%2f..%2f..%2fsecret",
        f"{FOLDER}/%2e%2e",
        f"{FOLDER}//etc/passwd",
        f"{RUN_ID}/..%2f..%2f/secret",
        f"{RUN_ID}/../../secret",
        f"{RUN_ID}/.weights-000002.partial/config.json",
        f"..%2f/{folder_name(1)}/config.json",
        f"{RUN_ID}%00/{folder_name(1)}/config.json",
        FOLDER,
    ],
)
async def test_nothing_else_can_be_read(path: str, publish: Publish, port: int, volume: Path, tmp_path: Path) -> None:
    publish(1, "http://127.0.0.1")
    (tmp_path / "secret").write_text("secret")
    (volume / FOLDER / "link.json").symlink_to(tmp_path / "secret")
    (volume / FOLDER / ".hidden").write_text("secret")
    partial = volume / RUN_ID / ".weights-000002.partial"
    partial.mkdir()
    (partial / "config.json").write_text("secret")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.get(f"/v1/weights/{path}")
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_range_is_served(publish: Publish, port: int, volume: Path) -> None:
    publish(1, "http://127.0.0.1")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answer = await client.get(f"/v1/weights/{FOLDER}/model.safetensors", headers={"Range": "bytes=10-19"})
        probe = await client.get("/healthz")
    assert (answer.status_code, probe.status_code) == (206, 200)
    assert answer.content == (volume / FOLDER / "model.safetensors").read_bytes()[10:20]


async def test_what_was_sent_is_counted(publish: Publish, port: int) -> None:
    publish(1, "http://127.0.0.1")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for file in ("model.safetensors", "missing.json"):
            await client.get(f"/v1/weights/{FOLDER}/{file}")
        text = (await client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("status")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["dvp_weights_requests_total", "200"] == samples["dvp_weights_requests_total", "404"] == 1
    assert LARGE < samples["dvp_weights_sent_bytes_total", None] < LARGE + 10_000

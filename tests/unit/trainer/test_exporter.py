"""The trainer's metrics over a real socket."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import MetricsSection
from dvp_trainer.report.prometheus import exporting
from tests.kit.ports import free_port
from tests.kit.tokens import TOKEN

STEP = {
    "reward/mean": 0.5,
    "veto/outside": 0.25,
    "mismatch/kl": 1e-3,
    "time/wait_s": 2.0,
    "groups/stale": 1.0,
    "optimizer/updates": 1.0,
    "staleness/groups_0": 3.0,
    "staleness/groups_8": 1.0,
    "episodes/tool_errors_mean": 0.5,
    "episodes/luck_mean": 7.0,
}


def _read(text: str) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {".".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


async def test_steps_add_up_to_metrics() -> None:
    port = free_port()
    async with exporting(MetricsSection(port=port)) as sink, httpx.AsyncClient() as client:
        assert sink is not None
        sink.log(7, STEP)
        sink.log(8, STEP | {"reward/mean": 0.75})
        seen = _read((await client.get(f"http://127.0.0.1:{port}/metrics")).text)
        stranger = await client.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": "evil.example"})
    expected = {
        "dvp_trainer_step": 8,
        "dvp_trainer_updates_total": 2,
        "dvp_trainer_reward_mean": 0.75,
        "dvp_trainer_vetoed_ratio.outside": 0.25,
        "dvp_trainer_kl_nats.constrained": 1e-3,
        "dvp_trainer_phase_seconds_total.wait": 4,
        "dvp_trainer_unused_groups_total.stale": 2,
        "dvp_trainer_staleness_steps_bucket.0.0": 6,
        "dvp_trainer_staleness_steps_bucket.7.0": 6,
        "dvp_trainer_staleness_steps_count": 8,
        "dvp_trainer_episode_mean.tool_errors": 0.5,
    }
    assert {name: seen[name] for name in expected} == expected
    assert not any("luck" in name for name in seen), "names that a harness makes up would be series without end"
    assert stranger.status_code == 403


async def test_a_token_protects_the_metrics_and_only_them() -> None:
    port = free_port()
    settings = MetricsSection(port=port, token=(SecretStr(TOKEN[::-1]), SecretStr(TOKEN)))
    async with exporting(settings), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200
        assert (await client.get("/healthz")).status_code == 200


async def test_off_by_default_and_never_open() -> None:
    async with exporting(MetricsSection()) as sink:
        assert sink is None
    with pytest.raises(ValueError, match="DVP_TRAIN__METRICS__TOKEN"):
        MetricsSection(port=9100, host="0.0.0.0")
    taken = free_port()
    async with exporting(MetricsSection(port=taken)):
        with pytest.raises(ConfigError, match=f"port {taken} on 127.0.0.1"):
            async with exporting(MetricsSection(port=taken)):
                pass


async def test_a_free_port_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with exporting(MetricsSection(port=0)), httpx.AsyncClient() as client:
            (line,) = (text for text in caplog.messages if text.startswith("metrics on http://127.0.0.1:"))
            assert (await client.get(line.removeprefix("metrics on "))).status_code == 200

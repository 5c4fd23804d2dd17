"""A session whose turns are drawn under three versions of the weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dvp_rl.contract.job import Job, Sink
from dvp_rl.contract.sampling import Sampling
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.lease import TrainerLease
from tests.integration.engines.oracle import TOLERANCE, Oracle
from tests.integration.rollout.publishing import announce
from tests.integration.rollout.test_sessions import opened
from tests.kit.models import make_model
from tests.kit.replicas import ReplicaProcess
from tests.kit.wait import until_async

PROMPT, ASKED = [22, 26, 14, 24, 27, 32], [14, 24]
MAX_TOKENS = 8


async def check_three_versions(
    replica: ReplicaProcess, broker: Broker, fence: int, models: Mapping[str, Path], folder: Path
) -> None:
    """The replica serves the first of `models`. The log-probs of each turn are those of the weights that drew it, given
    all tokens before, and not those of the others."""
    with opened(replica, sampling={"max_tokens": MAX_TOKENS}) as session, replica.client() as client:

        def draw(token_ids: list[int]) -> list[int]:
            answer = session.post("inference/v1/generate", token_ids=token_ids)
            assert answer.status_code == 200, answer.text
            drawn: list[int] = answer.json()["choices"][0]["token_ids"]
            return [*token_ids, *drawn]

        async def serves(version: str) -> bool:
            return (await asyncio.to_thread(client.weights)).version == version

        first, *others = models
        weights = {client.weights().version: first}
        ids = await asyncio.to_thread(draw, PROMPT)
        for name in others:
            announced = await announce(broker, fence, folder / f"weights-{name}", models[name])
            weights[announced.version] = name
            await until_async(lambda version=announced.version: serves(version))
            ids = await asyncio.to_thread(draw, [*ids, *ASKED])
        body = await asyncio.to_thread(session.finish, 1.0)

    assert (body["turns"], body["branches"], body["drifted"]) == (3, 1, 0)
    (sample,) = body["group"]["samples"]
    assert PROMPT + sample["token_ids"] == ids
    assert [span["version"] for span in sample["versions"]] == [*weights]
    told = np.zeros(len(sample["token_ids"]))
    told[[i for span in sample["versions"] for i in range(span["start"], span["end"])]] = sample["logprobs"]
    job = Job(job_id="a", run_id="a", prompt_ids=PROMPT, sampling=Sampling(max_tokens=MAX_TOKENS), sink=Sink.CLIENT)
    token_ids = np.array(sample["token_ids"], np.int32)
    expected = {name: Oracle(model).expect(job, token_ids).logprobs for name, model in models.items()}
    for span in sample["versions"]:
        turn = slice(span["start"], span["end"])
        for name, logprobs in expected.items():
            is_right = np.allclose(told[turn], logprobs[turn], atol=TOLERANCE, rtol=0)
            assert is_right == (name == weights[span["version"]]), (span, name, logprobs[turn], told[turn])


async def test_each_turn_has_the_log_probs_of_its_version(broker_url: str, tmp_path: Path) -> None:
    run_id = f"versions-{secrets.token_hex(6)}"
    models = {name: make_model(tmp_path / name, seed=seed, endless=True) for seed, name in enumerate("abc")}
    args = ["--model", str(models["a"]), "--redis-url", broker_url, "--run-id", run_id, "--threads", "1"]
    with ReplicaProcess(tmp_path / "replica", *args) as replica:
        async with await Broker.connect(broker_url, run_id) as broker:
            lease = TrainerLease(broker, "test")
            await check_three_versions(replica, broker, await lease.acquire(), models, tmp_path)
            await lease.release()

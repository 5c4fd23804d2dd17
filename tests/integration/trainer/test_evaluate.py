"""Held-out scores: during training, and of a checkpoint afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dvp_lab.recorded import Tokens
from dvp_rl.transport.broker import Broker
from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.report.token_log import read_tokens
from tests.kit.runs import HELDOUT, config, replica, train


@pytest.mark.slow
async def test_a_checkpoint_scores_what_training_said(tmp_path: Path, broker_url: str, run_id: str) -> None:
    flags = config(
        tmp_path,
        run_id,
        broker_url,
        steps="3",
        checkpoint__interval="3",
        data__heldout=str(HELDOUT),
        evaluate__interval="3",
        evaluate__limit="20",
        evaluate__n="2",
        deterministic="true",
        batch__max_staleness="0",
        report__tokens_interval="3",
    )
    with replica(tmp_path, run_id, broker_url, deterministic=True):
        train(flags)
        printed = train(["eval", *flags, "--step=last"])
        best = train(["eval", *flags])
    scores = {record["step"]: record for record in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert set(scores) == {0, 1, 2, 3}
    (tokens,) = read_tokens(tmp_path / "run")
    assert scores[3]["mismatch/kl_unmasked"] == pytest.approx(-float(Tokens.of(tokens).delta.sum() / tokens.mask.sum()))
    assert 0 < scores[3]["heldout/score"] < 1
    assert scores[0]["heldout/pass_at_2"] >= scores[0]["heldout/pass_at_1"]
    values = dict(re.findall(r"^(\S+) (\S+)$", printed, re.MULTILINE))
    assert values["step"] == "3"
    assert float(values["heldout/score"]) == pytest.approx(scores[3]["heldout/score"], abs=1e-4)
    score_of = {step: record["heldout/score"] for step, record in scores.items() if "heldout/score" in record}
    assert f"step {max(score_of, key=lambda step: score_of[step])}\n" in best
    assert f"heldout/score {max(score_of.values()):.4f}" in best
    async with await Broker.connect(broker_url, run_id) as broker:
        assert await broker.redis.xlen(broker.keys.evals) == 0

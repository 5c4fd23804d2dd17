"""No log contains the text of a prompt, in a whole system with every failure that a prompt can cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import web
from tests.kit.forked import MONITOR, service
from tests.kit.replicas import ReplicaProcess
from tests.kit.runs import MODEL, config, trainer_process
from tests.kit.wait import WITHIN_S

SECRET = "Xq7Zw9Kj2Vb4"
REPLICA_CONTEXT = 40
TOO_LONG = SECRET * 4
"""A prompt that exceeds the replica's context, but not the model's; its jobs become dead letters."""
FAR_TOO_LONG = SECRET * 40
"""A prompt that exceeds the model's context, which the trainer leaves out."""
REWARD = """
def broken(completion, answer, *, prompt, extra):
    if extra["case"] == 0:
        raise ValueError(prompt)
    while extra["case"] == 1:
        pass
    return float(len(completion))
"""


@pytest.mark.slow
def test_prompts_are_in_no_log(broker_url: str, run_id: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{SECRET}{i}=", "answer": SECRET, "case": i % 8} for i in range(16)]
    rows += [{"prompt": prompt, "answer": "", "case": 3} for prompt in (TOO_LONG, FAR_TOO_LONG)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": SECRET}) + "\n" + json.dumps({"question": SECRET}) + "\n")
    (tmp_path / "reward_for_logs.py").write_text(REWARD)
    at = [f"--redis-url={broker_url}", f"--run-id={run_id}"]
    rollout = [f"--model={MODEL}", "--threads=1", f"--max-context={REPLICA_CONTEXT}"]
    flags = config(tmp_path, run_id, broker_url, reward__name="reward_for_logs:broken", reward__timeout_s="0.5")
    flags = [flag for flag in flags if not flag.startswith("--data.train")]
    variables = {"PYTHONPATH": str(tmp_path)}
    with (
        ReplicaProcess(tmp_path / "replica", *rollout, *at) as replica,
        service(MONITOR, [*at, "--port=0"], tmp_path / "monitor.log"),
    ):
        for body in (
            {"prompt": SECRET, "sampling": {"max_tokens": 2}},
            {"prompt": SECRET, "sampling": {"min_p": 7}},
            {"prompt": TOO_LONG},
            {"prompt": SECRET, "n": SECRET},
        ):
            web.post(f"{replica.url}/v1/rollouts", json=body)
        web.post(f"{replica.url}/v1/jobs", json={"prompt": TOO_LONG, "job_id": "letter"})
        with trainer_process([*flags, f"--data.train={data}"], tmp_path / "trainer.log", **variables) as trainer:
            assert trainer.wait(WITHIN_S) == 0, (tmp_path / "trainer.log").read_text()
        bad = [*flags, f"--data.train={tmp_path / 'bad.jsonl'}"]
        with trainer_process(bad, tmp_path / "refused.log") as refused:
            assert refused.wait(WITHIN_S) == 2
    logs = {path.name: path.read_text() for path in [*tmp_path.glob("*.log"), tmp_path / "replica" / "log"]}
    assert logs["trainer.log"].count("further failures are counted in reward/failed") == 1
    assert "never retrieved" not in logs["trainer.log"]
    assert "exceed the context" in logs["log"]
    assert "1 of 18 prompts are left out: they fill the model's context" in logs["trainer.log"]
    assert [name for name, text in logs.items() if SECRET in text] == []

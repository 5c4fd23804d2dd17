"""What a run says when it ends, whichever way, and what its words are worth: every command in them is run."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dvp_trainer.report.sinks import read_metrics
from dvp_trainer.report.starts import read_starts
from tests.kit.forked import Service
from tests.kit.runs import HELDOUT, MODEL, config, replica, run_trainer, train, trainer_process
from tests.kit.wait import until

ENDLESS = "100000"


def spoken(output: str, run_id: str) -> dict[str, str]:
    """The lines of the ending by their names; the first is `headline`."""
    _, _, ending = output.rpartition(f"{run_id}: ")
    headline, *lines = ending.splitlines()
    facts = (re.fullmatch(r"  (\w[\w -]*?)  +(.*)", line) for line in lines)
    return {"headline": headline, **{fact[1]: fact[2] for fact in facts if fact}}


def argv_of(command: str) -> list[str]:
    """The arguments of a printed command."""
    program, *arguments = re.split(r"; |, with | \(", command)[0].split()
    assert Path(program).name == "dvp-train"
    return arguments


@contextmanager
def interrupted(flags: list[str], log: Path, step: int) -> Iterator[Service]:
    """A trainer that gets Ctrl-C once it has trained `step` batches."""
    log.touch()
    with trainer_process(flags, log) as trainer:
        until(lambda: f"step {step}/" in log.read_text(), f"step {step}")
        trainer.send_signal(signal.SIGINT)
        assert trainer.wait() == 130
        yield trainer


@pytest.mark.slow
def test_every_way_to_end_says_how_to_go_on(tmp_path: Path, broker_url: str, run_id: str) -> None:
    out, log, secret = tmp_path / "run", tmp_path / "trainer.log", f"--broker.redis-url={broker_url}"
    overrides: dict[str, str | None] = {
        "data__heldout": str(HELDOUT),
        "evaluate__interval": "2",
        "evaluate__limit": "4",
        "report__html": None,
    }
    with replica(tmp_path, run_id, broker_url):
        with interrupted(config(tmp_path, run_id, broker_url, steps=ENDLESS, **overrides), log, step=5):
            pass
        facts = spoken(log.read_text(), run_id)
        trained = len(read_metrics(out / "metrics.jsonl")) - 1
        assert facts["headline"] == f"stopped at step {trained} of {ENDLESS}"
        resume = re.fullmatch(
            r"(\S*dvp-train \S+); it continues after step (\d+) \(set its secrets again: .*\)", facts["resume"]
        )
        assert resume is not None
        assert trained - int(resume[2]) in range(4), "a checkpoint per two steps; the last may have been in the making"
        assert f"<title>{run_id}</title>" in Path(facts["report"]).read_text()
        assert "broker.redis_url: its secret was masked" in run_trainer(argv_of(facts["resume"])).stderr

        steps = trained + 2
        finished = train([*argv_of(facts["resume"]), secret, f"--steps={steps}"])
        facts = spoken(finished, run_id)
        assert facts["headline"] == f"finished, {steps} of {steps} steps"
        first, second = (start.step for start in read_starts(out))
        assert first == 0
        assert second >= int(resume[2])
        assert f"at step {second}" in Path(facts["report"]).read_text()
        assert re.match(r"first \d\.\d{3}, last \d\.\d{3}, over 5 steps each", facts["reward"])
        best = re.match(r"best \d\.\d{3} ± \d\.\d{3} at step (\d+)", facts["held-out"])
        assert best is not None
        assert f"{best[1]} (best)" in facts["checkpoints"]
        weights = Path(facts["weights"].partition(",")[0])
        assert (weights / "model.safetensors").is_file()

        kept = (out / "starts.jsonl").read_bytes(), (out / "settings.toml").read_bytes()
        again = run_trainer([str(out), secret, "--optimizer.lr=1e-9"])
        assert spoken(again.stdout, run_id)["headline"] == f"finished, {steps} of {steps} steps"
        assert "without effect: optimizer.lr = 1e-09 (was " in again.stderr
        assert kept == ((out / "starts.jsonl").read_bytes(), (out / "settings.toml").read_bytes())
        assert len(read_metrics(out / "metrics.jsonl")) == steps + 1
        assert f"step {best[1]}\n" in train([*argv_of(facts["evaluate"]), secret])
        assert f"{run_id} at step {best[1]}" in train(argv_of(facts["export"]))
        assert spoken(train(["report", str(out)]), run_id)["train on"] == facts["train on"]
        assert facts["train on"].split(" (")[0].endswith(f"--steps {2 * steps}")
        train([*argv_of(facts["train on"])[:-1], str(steps + 1), secret])
    assert (out / "model" / "config.json").is_file()
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == steps + 1


@pytest.mark.slow
def test_a_run_that_ends_before_its_first_step_says_so(tmp_path: Path, broker_url: str, run_id: str) -> None:
    """No replica answers the evaluation before the first step."""
    log = tmp_path / "trainer.log"
    flags = config(tmp_path, run_id, broker_url, data__heldout=str(HELDOUT), evaluate__interval="2")
    with trainer_process(flags, log) as trainer:
        until((tmp_path / "run" / "starts.jsonl").exists, "the start is recorded")
        until((tmp_path / "run" / "completions.jsonl").exists, "the evaluation has begun")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait() == 143
    facts = spoken(log.read_text(), run_id)
    assert facts["headline"] == "stopped at step 0 of 6"
    assert "it starts over: there is no checkpoint yet" in facts["resume"]
    assert "export" not in facts


@pytest.mark.slow
def test_a_run_that_fails_says_what_it_reached_before_its_error(tmp_path: Path, broker_url: str, run_id: str) -> None:
    rewards = tmp_path / "fragile.py"
    rewards.write_text(
        "calls = 0\ndef score(completion, answer, *, prompt, extra):\n    global calls\n    calls += 1\n"
        "    if calls > 40:\n        raise ValueError('broken')\n    return float(len(completion) % 2)\n"
    )
    flags = config(tmp_path, run_id, broker_url, steps=ENDLESS, reward__name="fragile:score", checkpoint__interval="1")
    with replica(tmp_path, run_id, broker_url):
        done = run_trainer(flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    facts = spoken(done.stdout, run_id)
    assert facts["headline"] == f"stopped at step {len(read_metrics(tmp_path / 'run' / 'metrics.jsonl'))} of {ENDLESS}"
    assert "broken" in done.stderr
    assert not (tmp_path / "run" / "report.html").exists(), "report.html is off in these tests"


@pytest.mark.slow
def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path, broker_url: str, run_id: str) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    with replica(tmp_path, run_id, broker_url):
        done = run_trainer(config(tmp_path, run_id, broker_url, steps="2", report__html=None))
    assert done.returncode == 0, done.stderr
    assert "report.html could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert "finished, 2 of 2 steps" in done.stdout


@pytest.mark.slow
def test_trackers_get_settings_metrics_and_completions(tmp_path: Path, broker_url: str, run_id: str) -> None:
    flags = config(
        tmp_path, run_id, broker_url, steps="4", report__wandb_project="mine", report__trackio_project="mine"
    )
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    with replica(tmp_path, run_id, broker_url):
        for steps in (2, 4):
            done = run_trainer([*flags, f"--steps={steps}"], **variables)
            assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows(tmp_path / "trackio" / "mine.db", "select config from configs")
    kept = json.loads(row[0])
    assert (kept["optimizer"]["lr"], kept["start"]["step"], kept["start"]["machine"]["ranks"]) == (1e-3, 2, "1")
    logged = [json.loads(row[0]) | {"step": row[1]} for row in rows(tmp_path / "trackio" / "mine.db", METRICS)]
    assert [record["step"] for record in logged if "reward/mean" in record] == [1, 2, 3, 4]
    assert sum("completions" in record for record in logged) == 3  # of the first batch, and of the last of each start
    first, second = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert b"reward/mean" in (first / f"run-{run_id}.wandb").read_bytes()
    assert b'"lr":0.001' in (second / f"run-{run_id}.wandb").read_bytes()
    assert len(list(first.glob("files/media/table/completions*.json"))) == 2


METRICS = "select metrics, step from metrics order by id"


def rows(file: Path, query: str) -> list[tuple[bytes, int]]:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.mark.slow
def test_adapters_are_not_resumed_on_another_model(tmp_path: Path, broker_url: str, run_id: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in MODEL.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    flags = config(tmp_path, run_id, broker_url, steps="2", lora__rank="2", model__path=str(model))
    with replica(tmp_path, run_id, broker_url, f"--model={model}"):
        train(flags)
        weights = model / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        done = run_trainer([*flags, "--steps=4"])
    assert done.returncode == 2
    assert re.search(
        r"model\.path .* has digest .*, but the adapters in .* restore it, or start a new run", done.stderr
    )


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so(tmp_path: Path, broker_url: str, run_id: str) -> None:
    (tmp_path / "blind.py").write_text("def score(completion, answer, *, prompt, extra):\n    return 0.0\n")
    with replica(tmp_path, run_id, broker_url):
        done = run_trainer(config(tmp_path, run_id, broker_url, reward__name="blind:score"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no answer gets more than an empty completion" in done.stderr
    assert done.stderr.count("batches in a row changed nothing") == 1
    assert "3 batches in a row changed nothing. In 4 of the last one's 4 groups all samples" in done.stderr

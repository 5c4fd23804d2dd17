"""`dvp-train up`: one command starts broker, replicas, monitor and trainer, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from dvp_rl.client import Client
from dvp_trainer import patience
from dvp_trainer.programs import program
from dvp_trainer.report.sinks import read_metrics
from tests.kit import forked, web
from tests.kit.forked import TRAINER, Service, service
from tests.kit.models import make_model
from tests.kit.processes import PYTHON, process
from tests.kit.runs import HELDOUT, config, run_trainer
from tests.kit.wait import WITHIN_S, until

FAKE = {"up__engine": "fake"}
"""An engine that starts without PyTorch. Its samples do not match their log-probs, so nothing is learned from them."""


class Up:
    """One `dvp-train up`."""

    def __init__(self, service: Service, out: Path, log: Path) -> None:
        self.service, self.out, self._log = service, out, log

    @property
    def output(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> None:
        def looked() -> bool:
            assert self.service.poll() is None or text in self.output, self.output
            return text in self.output

        until(looked, f"it says {text!r}")

    def url(self, name: str) -> str:
        found = re.search(rf"^ +{name} +(http://127.0.0.1:\d+)$", self.output, re.MULTILINE)
        assert found, self.output
        return found[1]

    def processes(self) -> list[psutil.Process]:
        """The trainer and all that it has started."""
        trainer = psutil.Process(self.service.pid)
        return [trainer, *trainer.children(recursive=True)]

    def replicas(self) -> dict[str, psutil.Process]:
        found = {}
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                found |= {word.partition("=")[2]: one for word in one.cmdline() if "--replica-id=" in word}
        return found


def flags(folder: Path, run_id: str, **overrides: str | None) -> list[str]:
    return config(folder, run_id, "", **{"broker__redis_url": None, **overrides})


@contextmanager
def up(folder: Path, run_id: str, **overrides: str | None) -> Iterator[Up]:
    log = folder / "up.log"
    log.touch()
    with service(TRAINER, ["up", *flags(folder, run_id, **overrides)], log) as started:
        yield Up(started, folder / "run", log)


def gone(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=WITHIN_S)[1] == []


@pytest.mark.slow
def test_one_command_trains_evaluates_and_goes_on(tmp_path: Path, run_id: str) -> None:
    options = {"data__heldout": str(HELDOUT), "evaluate__limit": "8"}
    first = run_trainer(["up", *flags(tmp_path, run_id, **options)])
    assert first.returncode == 0, first.stdout + first.stderr
    out = tmp_path / "run"
    assert f"{run_id}: finished, 6 of 6 steps" in first.stdout
    assert f"dvp-train up {out} --steps 12" in first.stdout
    assert re.search(rf"evaluate +\S*dvp-train up eval {out} --step last$", first.stdout, re.MULTILINE)
    # From now on by the run's own settings, each time with an empty broker.
    score = run_trainer(["up", "eval", str(out), "--step", "last"])
    assert score.returncode == 0, score.stdout + score.stderr
    assert re.search(r"^step 6\nheldout/score \d", score.stdout, re.MULTILINE), score.stdout
    second = run_trainer(["up", str(out), "--steps=8"])
    assert second.returncode == 0, second.stdout + second.stderr
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl")] == list(range(1, 9))
    consumed = [json.loads(line) for line in (out / "consumed.jsonl").read_text().splitlines()]
    trained = [entry["job_id"] for entry in consumed if entry["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == 8 * 4


@pytest.mark.slow
def test_a_replica_that_served_is_started_again(tmp_path: Path, run_id: str) -> None:
    options = {"steps": "1000000", "checkpoint__interval": "100", "up__options": '{"lease_s": 2}'}
    with up(tmp_path, run_id, **options) as run:
        run.says("replica-1 serves")
        run.says("step 2/")
        run.replicas()["replica-1"].kill()
        run.says("replica-1 is started again: replica-1 was killed by SIGKILL")
        num = len(read_metrics(run.out / "metrics.jsonl"))
        until(lambda: len(read_metrics(run.out / "metrics.jsonl")) > num + 20, "it trains on")
        run.service.send_signal(signal.SIGINT)
        assert run.service.wait() == 130
        assert f"{run_id}: stopped at step" in run.output


@pytest.mark.slow
def test_two_ranks_share_one_broker(tmp_path: Path, run_id: str) -> None:
    two = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dvp_trainer", "up"]
    log = tmp_path / "ranks.log"
    with process([*two, *flags(tmp_path, run_id, steps="3")], log) as ranks:
        assert ranks.wait(WITHIN_S) == 0, log.read_text()
    said = log.read_text()
    assert f"{run_id}: finished, 3 of 3 steps" in said
    assert "torchrun --nproc-per-node 2 -m dvp_trainer up" in said
    assert not (tmp_path / "run/broker/operator.url").exists()


@pytest.mark.slow
def test_people_can_look_at_monitor_replica_and_queue(tmp_path: Path, run_id: str) -> None:
    with up(tmp_path, run_id, **FAKE, steps="1000", up__show_completions="true") as run:
        run.says("replica-1 serves")
        with Client(run.url("replica-1")) as client:
            assert client.ready().status == "ok"
        until(
            lambda: web.get(run.url("monitor") + "/v1/completions").status_code == 200, "the monitor shows completions"
        )
        file = run.out / "broker/operator.url"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert f'DVP_QUEUE__REDIS_URL="$(cat {file})" {program("dvp-queue")} --run-id {run_id} status' in run.output
        health = forked.run("dvp_rl.monitor.cli", f"--run-id={run_id}", "status", DVP_QUEUE__REDIS_URL=file.read_text())
        assert "replica-1" in health.stdout, health.stdout + health.stderr
        second = run_trainer(["up", *flags(tmp_path, run_id, **FAKE)])
        assert (second.returncode, "another `dvp-train up` runs there" in second.stderr) == (2, True)
        everybody = run.processes()
        assert len(everybody) >= 4  # trainer, broker, replica, monitor
        run.service.send_signal(signal.SIGTERM)
        assert run.service.wait() == 143
        assert not file.exists()
    assert gone(everybody)
    assert "Traceback" not in run.output


PLAYED = {
    "steps": "3",
    "episodes__harness": "true",
    "reward__name": "given",
    "batch__groups": "2",
    "batch__max_staleness": "0",
    "up__environment": "tests.integration.harness.environments:Uneven",
    "up__harness_options": '{"workers": 3}',
}


@pytest.mark.slow
def test_episodes_are_played_in_the_users_environment(tmp_path: Path, run_id: str) -> None:
    model = make_model(tmp_path / "model", "qwen3", seed=1)
    with up(tmp_path, run_id, **PLAYED, model__path=str(model)) as run:
        run.says("harness    tests.integration.harness.environments:Uneven")
        (harness,) = [one for one in run.processes() if "dvp_rl.harness" in one.cmdline()]
        harness.kill()
        run.says("harness is started again: harness was killed by SIGKILL")
        assert run.service.wait() == 0, run.output
    records = read_metrics(run.out / "metrics.jsonl")
    assert [record["reward/mean"] for record in records] == [pytest.approx(1.01, abs=0.01)] * 3
    assert all(record["length/environment_mean"] > 0 for record in records)
    assert all(record["mismatch/k3_kl"] < 1e-6 for record in records)


def test_an_environment_that_cannot_be_ends_the_run_with_its_last_words(tmp_path: Path, run_id: str) -> None:
    absent = PLAYED | {"up__environment": "tests.integration.harness.environments:Absent"}
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, **absent)])
    assert done.returncode == 2
    assert "dvp-train: error: harness ended with exit code 2" in done.stderr
    assert "has no function 'Absent'" in done.stderr
    assert "Traceback" not in done.stderr


def be_impatient() -> None:
    patience.SILENCE_S = patience.LONGEST_SILENCE_S = 0.05


@pytest.mark.slow
def test_waits_are_told(tmp_path: Path, run_id: str) -> None:
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, steps="2")], be_impatient)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting for groups: 0 of 4 are ready, 0 s so far" in done.stderr


@pytest.mark.slow
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path, run_id: str) -> None:
    with up(tmp_path, run_id, **FAKE, steps="1000") as run:
        run.says("replica-1 serves")
        everybody = run.processes()
        run.service.kill()
        assert gone(everybody)


def test_a_replica_that_cannot_start_ends_the_run_with_its_last_words(tmp_path: Path, run_id: str) -> None:
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, up__options='{"max_bach": 3}')])
    assert done.returncode == 2
    assert "dvp-train: error: replica-1 ended with exit code 2" in done.stderr
    assert "--max-bach" in done.stderr
    assert "max_batch" in done.stderr or "--max-batch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_end_of_the_broker_ends_the_run(tmp_path: Path, run_id: str) -> None:
    with up(tmp_path, run_id, **FAKE, steps="1000") as run:
        run.says("replica-1 serves")
        (broker,) = [p for p in run.processes() if "valkey" in p.name() or "redis" in p.name()]
        everybody = run.processes()
        broker.kill()
        assert run.service.wait() == 2
        assert "the broker has ended, see" in run.output
    assert gone(everybody)


@pytest.mark.slow
def test_a_broker_of_ones_own_is_used(tmp_path: Path, run_id: str, broker_url: str) -> None:
    with up(tmp_path, run_id, **FAKE, steps="1000", broker__redis_url=broker_url) as run:
        run.says("on the broker of broker.redis_url")
        run.says("replica-1 serves")
        assert not (run.out / "broker").exists()
        health = forked.run("dvp_rl.monitor.cli", f"--redis-url={broker_url}", f"--run-id={run_id}", "status")
        assert "replica-1" in health.stdout, health.stdout + health.stderr


def test_replicas_get_their_gpus_and_options(tmp_path: Path, run_id: str) -> None:
    gpus = {"up__replicas": "3", "up__gpus": "4,5", "up__options": '{"max_batch": 9, "fp32_head": false}'}
    with up(tmp_path, run_id, **FAKE, **gpus, steps="1000") as run:
        # One that is just being started has no command line for a moment, and all are gone when the run is done.
        for number in (1, 2, 3):
            run.says(f"replica-{number} serves")
        found = run.replicas()
        seen = [found[f"replica-{number}"].environ()["CUDA_VISIBLE_DEVICES"] for number in (1, 2, 3)]
        assert seen == ["4", "5", "4"]
        words = found["replica-1"].cmdline()
        assert {"--device=cuda", "--max-batch=9", "--no-fp32-head", "--dtype=float32"} <= set(words)


def test_what_cannot_be_is_refused(tmp_path: Path, run_id: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, up__monitor_port=port)])
    assert (done.returncode, f"monitor: port {port} cannot be taken" in done.stderr) == (2, True), done.stderr
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, up__options='{"port": 8000, "replica-id": "a"}')])
    assert (done.returncode, "`dvp-train up` sets port, replica_id itself" in done.stderr) == (2, True), done.stderr
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, up__monitor_port="None", up__show_completions="true")])
    assert (done.returncode, "show_completions needs the monitor" in done.stderr) == (2, True), done.stderr
    (tmp_path / "file").touch()
    done = run_trainer(["up", *flags(tmp_path / "file", run_id, **FAKE)])
    assert (done.returncode, "error: out_dir: " in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, up__options='{"sglang.api-key": "x"}')])
    assert "is a secret, which would be written down; give it as DVP_ROLLOUT__SGLANG__API_KEY" in done.stderr
    done = run_trainer(["up", *flags(tmp_path, run_id, **PLAYED | {"up__harness_options": '{"token": "x"}'})])
    assert "is a secret, which would be written down; give it as DVP_HARNESS__TOKEN" in done.stderr
    done = run_trainer(["up", *flags(tmp_path, run_id, **PLAYED | {"up__environment": None})])
    assert "harness_options are for dvp-harness, which only plays in an environment" in done.stderr
    done = run_trainer(
        ["up", *flags(tmp_path, run_id, **PLAYED | {"episodes__harness": "false", "reward__name": "arithmetic"})]
    )
    assert "up.environment plays episodes, but there are none: episodes.harness is false" in done.stderr
    assert "up.engine" in run_trainer(["up", *flags(tmp_path, run_id, up__engine="sglagn")]).stderr
    done = run_trainer(["up", "doctor", *flags(tmp_path, run_id)])
    assert "`up` goes with CONFIG or eval" in done.stderr
    options = {"up__replicas": "2", "deterministic": "true", "batch__max_staleness": "0"}
    done = run_trainer(["up", *flags(tmp_path, run_id, **FAKE, **options)])
    assert (done.returncode, "deterministic needs up.replicas = 1" in done.stderr) == (2, True), done.stderr


CAPPED = {"up__options": '{"sglang.max-total-tokens": 65536}'}
SMALL = {"up__engine": "vllm", "up__options": '{"vllm.gpu-memory-utilization": 0.3}'}
MEMORY, NCCL = "limit its KV cache, e.g. up.options = {", "NCCL refuses two processes on one GPU"


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ({"model__device": "cuda"}, MEMORY),
        ({"model__device": "cuda"} | CAPPED, None),
        ({"model__device": "cuda", "weights__route": "distributed"} | CAPPED, NCCL),
        ({"model__device": "cuda", "weights__route": "distributed", "up__gpus": "1"}, None),
        ({"model__device": "cuda", "up__gpus": "1", "up__replicas": "2"}, MEMORY),
        ({"model__device": "cpu", "weights__route": "distributed"}, None),
        ({"model__device": "cuda", "up__engine": "vllm"}, '{ "vllm.gpu_memory_utilization" = '),
        ({"model__device": "cuda"} | SMALL, None),
    ],
)
def test_what_servers_cannot_share(tmp_path: Path, run_id: str, overrides: dict[str, str], refusal: str | None) -> None:
    done = run_trainer(["up", "--dry-run", *flags(tmp_path, run_id, **{"up__engine": "sglang"} | overrides)])
    assert done.returncode == (0 if refusal is None else 2), done.stderr
    assert refusal is None or refusal in done.stderr

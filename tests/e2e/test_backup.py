"""deploy/docker/backup.sh on a real engine: a run is saved while it continues, lost, and resumed elsewhere."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy.demo.run_folder import RunFolder
from deploy.demo.summary import reconcile
from dvp_rl.contract.errors import UnavailableError
from dvp_trainer.report.sinks import read_metrics

from .stack import BUILD_S, Stack, clone, require_engine, running

TRAINING_S = 600.0
SAVED_STEPS, MORE_STEPS = 12, 20
ENDLESS = 1_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * BUILD_S + 2 * TRAINING_S)]


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup whose original system no longer exists."""
    require_engine()
    folder = tmp_path_factory.mktemp("backup") / "saved"
    stack = Stack(clone(tmp_path_factory.mktemp("clone")), "first")
    stack.set_steps(ENDLESS)
    with running(stack):
        with stack.client() as client:
            job = client.submit(prompt="37+58=", n=1, sampling={"max_tokens": 6}, job_id="answered")
            client.wait(job)
        stack.compose("run", "--rm", "queue", "drain", "--no-wait", "--reason", "to be remembered")
        stack.compose("run", "--rm", "queue", "open")
        stack.wait_until(lambda: stack.step() >= SAVED_STEPS, f"step {SAVED_STEPS} is done", TRAINING_S)
        before = stack.step()
        stack.run("deploy/docker/backup.sh", "save", str(folder))
        stack.wait_until(lambda: stack.step() > before + 2, "the trainer goes on", TRAINING_S)
        assert stack.compose("exec", "-T", "trainer", "sh", "-c", "ls -A /runs /weights").split().count(".backup") == 0
    return folder


def has_result(stack: Stack) -> bool:
    """Whether the job's result is there; False while no replica answers."""
    with stack.client() as client:
        try:
            return client.job("answered").group is not None
        except UnavailableError:
            return False


def test_a_backup_is_for_its_owner_only(backup: Path) -> None:
    assert backup.stat().st_mode & 0o077 == 0
    assert not list(backup.parent.glob("*.partial"))


def test_what_was_saved_goes_on_elsewhere(backup: Path, tmp_path: Path) -> None:
    stack = Stack(clone(tmp_path / "clone"), "second")
    with tarfile.open(backup / "runs.tar") as runs:
        runs.extractall(tmp_path / "saved", filter="data")
    saved = RunFolder(tmp_path / "saved" / "demo")
    steps = saved.progress()["step"] + MORE_STEPS
    stack.set_steps(steps)
    try:
        stack.run("deploy/docker/backup.sh", "restore", str(backup), timeout=BUILD_S)
        # A version that the broker names may have been removed before it was saved. In the worst case all have.
        names = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "trainer", "-euc")
        assert "dvp-manifest.json" in stack.compose(*names, "ls /weights/*/*")
        stack.compose(*names, "rm -r /weights/*")
        stack.compose("up", "-d", "--build", timeout=BUILD_S)
        stack.wait_until(lambda: has_result(stack), "a replica has weights again, and the result", TRAINING_S)
        changes = json.loads(stack.compose("run", "--rm", "queue", "audit", "--json"))
        assert "to be remembered" in json.dumps(changes)
        (trainer,) = stack.containers("trainer")
        stack.wait_until(
            lambda: stack.inspect(trainer)["State"]["Status"] == "exited", "the trainer is done", TRAINING_S
        )
        assert stack.inspect(trainer)["State"]["ExitCode"] == 0
        stack.compose("cp", "trainer:/runs/demo", str(tmp_path))
        folder = RunFolder(tmp_path / "demo")
        progress = folder.progress()
        books = reconcile(folder.submitted(progress), folder.consumed(progress), progress["outstanding"])
        assert (progress["step"], len(books.lost), len(books.duplicated)) == (steps, 0, 0)
        before, after = read_metrics(saved.metrics), read_metrics(folder.metrics)
        trained = saved.progress()["step"]
        assert [record for record in after if record["step"] <= trained] == [
            record for record in before if record["step"] <= trained
        ]
        # Existing data is not overwritten.
        again = ["deploy/docker/backup.sh", "restore", str(backup)]
        refused(stack, again, "there are containers; docker compose down removes them")
        stack.compose("down", "--timeout=5")
        refused(stack, again, "is not empty; docker compose down --volumes empties all")
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout=5")


def refused(stack: Stack, command: list[str], message: str) -> None:
    done = subprocess.run(command, cwd=stack.folder, env=stack.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr

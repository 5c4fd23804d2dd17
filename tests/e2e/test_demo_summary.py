"""The demo's account of a run: books, figures and verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.demo.__main__ import TASKS, TaskName, run_demo
from deploy.demo.run_folder import RunFolder
from deploy.demo.summary import Books, Replica, Summary, find_faults, reconcile, summarize, to_table
from dvp_rl.contract.weights import WeightVersion
from dvp_trainer.config import TrainSettings

STEPS, GROUPS, N = 8, 4, 2
IDS = [f"demo:{position:09d}:0" for position in range(STEPS * GROUPS)]
AWAITED = [f"demo:{position:09d}:0" for position in range(STEPS * GROUPS, STEPS * GROUPS + 3)]
SERVING = [Replica(name, str(WeightVersion("demo", 9, "abc"))) for name in ("replica-1", "replica-2")]


def test_balanced_books() -> None:
    assert reconcile([*IDS, *AWAITED], IDS, AWAITED) == Books((), ())


@given(st.sets(st.integers(0, 40)), st.lists(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_books_against_counting(submitted: set[int], consumed: list[int], awaited: set[int]) -> None:
    asked, ended, waiting = ([str(i) for i in ids] for ids in (submitted, consumed, awaited))
    lost, duplicated = reconcile(asked, ended, waiting)
    for i in {*asked, *ended, *waiting}:
        difference = ended.count(i) + waiting.count(i) - asked.count(i)
        assert (lost.count(i), duplicated.count(i)) == (max(-difference, 0), max(difference, 0))


def write_run(folder: Path, *, consumed: list[str] = IDS, rewards: list[float] | None = None) -> RunFolder:
    """Writes the files that a trainer leaves behind."""
    rewards = rewards or [0.4 + 0.05 * step for step in range(STEPS)]
    records: list[dict[str, Any]] = [{"step": 0, "time": 0.0, "heldout/score": 0.4}]
    records += [
        {
            "step": step,
            "time": float(step),
            "reward/mean": reward,
            "pruned/share": 0.5,
            "mismatch/kl": 1e-3,
            "mismatch/ratio_min": 0.5,
            "mismatch/ratio_max": 1.5,
            "veto/total": 0.0,
            "mis/fraction": 0.0,
            "time/step_s": 0.5,
            "throughput/samples_per_second": GROUPS * N / 0.5,
            "episodes/tool_errors_mean": 1.0 - step / 10,
            "episodes/turns_mean": 1.0 + step / 10,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    records[-1]["heldout/score"] = 0.8
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lengths = {}
    for name, ids in {"submitted": [*IDS, *AWAITED], "consumed": consumed}.items():
        text = "".join(json.dumps({"job_id": id}) + "\n" for id in ids)
        lengths[f"{name}_length"] = len(text)
        (folder / f"{name}.jsonl").write_text(text + '{"job_id": "after:000000000:0"}\n{"job_id": "af')
    progress = {"step": STEPS, "samples": STEPS * GROUPS * N, "seq": STEPS + 1, "outstanding": AWAITED, **lengths}
    checkpoint = folder / "checkpoints" / f"step-{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    return RunFolder(folder)


@pytest.fixture
def finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The demo's exit code for a run whose training is already done."""

    def run(replicas: list[Replica] = SERVING, **files: Any) -> int:
        out = tmp_path / "run"

        def train(settings: TrainSettings, folder: RunFolder) -> list[Replica]:
            folder.logs.rmdir()
            write_run(folder.path, **files)
            return replicas

        monkeypatch.setattr("deploy.demo.__main__.train", train)
        task = TASKS[TaskName.SUMS]
        return run_demo(TrainSettings.load([f"--out-dir={out}"], task.config), task.title, Console(quiet=True))

    return run


def test_good_run_succeeds(finish: Callable[..., int], tmp_path: Path) -> None:
    assert finish() == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.pop("wall_s") >= 0
    assert summary == {
        "seed": 0,
        "steps": 8,
        "reward_first": pytest.approx(0.5),
        "reward_last": pytest.approx(0.65),
        "heldout_first": 0.4,
        "heldout_last": 0.8,
        "heldout_best": 0.8,
        "heldout_best_step": 8,
        "heldout_best_stderr": None,
        "heldout_best_correct": None,
        "turns_first": pytest.approx(1.3),
        "turns_last": pytest.approx(1.6),
        "tool_errors_first": pytest.approx(0.7),
        "tool_errors_last": pytest.approx(0.4),
        "log_min_p": -3.0,
        "pruned_share": pytest.approx(0.5),
        "kl": pytest.approx(1e-3),
        "largest_log_ratio": pytest.approx(math.log(2)),
        "veto": 0.0,
        "mis": 0.0,
        "samples_trained": 64,
        "versions_published": 9,
        "replicas": [{"id": f"replica-{i}", "last_version": "demo:9:abc"} for i in (1, 2)],
        "samples_per_second": pytest.approx(16.0),
        "lost": 0,
        "duplicated": 0,
    }
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_one_lost_and_one_duplicated_job_fail_the_demo(finish: Callable[..., int], tmp_path: Path) -> None:
    assert finish(consumed=[*IDS[1:], IDS[-1]]) != 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["lost"], summary["duplicated"]) == (1, 1)


def test_lost_job_alone_fails_the_demo(finish: Callable[..., int]) -> None:
    assert finish(consumed=IDS[1:]) != 0


def test_duplicated_job_alone_fails_the_demo(finish: Callable[..., int]) -> None:
    assert finish(consumed=[*IDS, IDS[3]]) != 0


def test_flat_reward_fails_the_demo(finish: Callable[..., int]) -> None:
    assert finish(rewards=[0.4] * STEPS) != 0


@pytest.mark.parametrize("version", ["", "demo:0:abc"])
def test_replica_that_never_served_pushed_weights_fails_the_demo(finish: Callable[..., int], version: str) -> None:
    assert finish(replicas=[SERVING[0], Replica("replica-2", version)]) != 0


def summary_of(tmp_path: Path) -> Summary:
    folder = write_run(tmp_path / "run")
    progress = folder.progress()
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return summarize(metrics, progress, Books((), ()), SERVING, seed=0, log_min_p=-3.0, wall_s=1.0)


def test_faults_are_named(tmp_path: Path) -> None:
    good = summary_of(tmp_path)
    assert find_faults(good) == []
    assert find_faults(replace(good, lost=2)) == ["2 jobs were submitted and never came back"]
    assert "replica-2" in find_faults(replace(good, replicas=(SERVING[0], Replica("replica-2", ""))))[0]
    assert "log_min_p" in find_faults(replace(good, pruned_share=0.01))[0]
    assert find_faults(good, zero_mismatch=True) == ["log-probs differ by up to 0.69, but should be identical"]
    assert find_faults(replace(good, largest_log_ratio=0.0), zero_mismatch=True) == []


def test_summary_of_no_step_is_a_fault(tmp_path: Path) -> None:
    progress = write_run(tmp_path / "run").progress() | {"step": 0, "samples": 0}
    summary = summarize([], progress, Books((), ()), SERVING, seed=0, log_min_p=-3.0, wall_s=1.0)
    assert "reward did not rise" in find_faults(summary)[0]


def test_table_names_every_figure(tmp_path: Path) -> None:
    console = Console(width=100, record=True, quiet=False, file=(tmp_path / "table.txt").open("w"))
    console.print(to_table(summary_of(tmp_path)))
    text = console.export_text()
    console.file.close()
    for figure in (
        "0.500",
        "0.650",
        "0.800",
        "e^-3",
        "50.0%",
        "1.00e-03",
        "0.69",
        "demo:9:abc",
        "0 / 0",
        "1.30",
        "1.60",
        "0.70",
        "0.40",
    ):
        assert figure in text

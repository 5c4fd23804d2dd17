from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.config import TrainSettings
from dvp_trainer.report.sinks import (
    JsonlSink,
    PlainSink,
    ProgressSink,
    Reporter,
    TensorboardSink,
    console_sink,
    headline,
    read_metrics,
    trackio_sink,
    wandb_sink,
)
from dvp_trainer.report.starts import Start, describe_start

ROOT = Path(__file__).parents[3]


def start() -> Start:
    argv = ["--run-id=mine", "--out-dir=out", "--steps=6", "--model.path=m", "--data.train=d.jsonl"]
    settings = TrainSettings.load([*argv, "--reward.name=math", "--optimizer.lr=3e-7", "--sampling.stop=x"])
    return describe_start(settings, step=0, model="0123456789abcdef", machine={})


def log_steps(path: Path, *steps: int, resumed_step: int | None = None) -> None:
    reporter = Reporter([JsonlSink(path, resumed_step=resumed_step)])
    for step in steps:
        reporter.log(step, {"reward/mean": step / 10})
    reporter.close()


def test_jsonl_has_one_object_per_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    log_steps(path, 1, 2, 3)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["reward/mean"]) for r in records] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert all(record["time"] > 1.6e9 for record in records)


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"reward/mean": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["step"] == 1
    sink.close()


def test_a_resumed_file_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 2, 3, 4)
    log_steps(path, 3, 4, 5, resumed_step=2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    log_steps(path, 3, resumed_step=2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_a_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    log_steps(tmp_path / "metrics.jsonl", 8, resumed_step=7)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [8]


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    log_steps(tmp_path / "metrics.jsonl", 1, 2)
    log_steps(tmp_path / "metrics.jsonl", 1)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl: line 2 is not JSON"):
        read_metrics(path)


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a/nan": math.nan, "a/inf": -math.inf, "a/one": 1.0})
    sink.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["a/nan"], record["a/inf"], record["a/one"]) == (None, None, 1.0)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resumed in [((1, 2, 3), None), ((3, 4), 2)]:
        sink = TensorboardSink(tmp_path, start(), resumed_step=resumed)
        for step in steps:
            sink.log(step, {"reward/mean": step / 8})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(step, step / 8) for step in (1, 2, 3, 4)]


def test_tensorboard_shows_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    TensorboardSink(tmp_path, start()).close()
    read = EventAccumulator(str(tmp_path)).Reload()
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["optimizer.lr"].number_value == 3e-7
    assert shown["sampling.stop"].string_value == '["x"]'
    assert shown["start.model"].string_value == "0123456789abcdef"
    assert "trace_url" not in shown


def test_a_tracker_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ConfigError, match=r"report\.wandb_project is 'mine', but .* pip install wandb, or leave it unset"
    ):
        wandb_sink("mine", start(), tmp_path)
    with pytest.raises(
        ConfigError, match=r"report\.trackio_project is 'mine', but .* pip install trackio, or leave it"
    ):
        trackio_sink("mine", start())


def test_a_tracker_that_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio

    def refuse(**_: object) -> None:
        raise RuntimeError("not logged in")

    monkeypatch.setattr(trackio, "init", refuse)
    with pytest.raises(ConfigError, match=r"report\.trackio_project 'mine': not logged in"):
        trackio_sink("mine", start())


def test_plain_lines_off_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    sink = console_sink(200, console)
    assert isinstance(sink, PlainSink)
    sink.log(12, {"reward/mean": 0.4321, "mismatch/kl": 3.14e-4, "other/key": 1.0})
    sink.close()
    assert console.file.getvalue() == "step 12/200  reward 0.432  kl 0.000314\n"


def test_a_live_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    sink = console_sink(200, console)
    assert isinstance(sink, ProgressSink)
    sink.log(11, {"reward/mean": 0.4, "heldout/score": 0.5})
    sink.log(12, {"reward/mean": 0.6})
    sink.close()
    shown = console.file.getvalue()
    assert "12/200" in shown
    assert "reward 0.6  held-out 0.5" in shown


def test_the_headline_leaves_out_what_is_missing() -> None:
    assert headline({}) == ""
    assert headline({"throughput/samples_per_second": 81.23, "reward/mean": 0.5}) == "reward 0.5  samples/s 81.2"
    assert headline({"throughput/samples_per_second": 1073.2}) == "samples/s 1,073"


class Memory:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_every_sink_gets_every_step_once() -> None:
    sinks = [Memory(), Memory()]
    reporter = Reporter(sinks)
    reporter.log(0, {"heldout/score": 0.1})
    reporter.log(1, {})
    with pytest.raises(AssertionError, match="step 1 logged after step 1"):
        reporter.log(1, {})
    reporter.close()
    assert all(sink.logged == [(0, {"heldout/score": 0.1}), (1, {})] and sink.closed for sink in sinks)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys; import dvp_trainer.report.sinks, dvp_trainer.report.page; "
        "import dvp_trainer.data.prompts, dvp_trainer.data.reward_pool; "
        "heavy = ['torch', 'tensorboard', 'matplotlib', 'jinja2', 'datasets', 'pyarrow', 'pandas', 'math_verify']; "
        "sys.exit(str([name for name in heavy if name in sys.modules] or ''))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == ""

"""`dvp-train check MODEL` reports what a run would report, and how far a replica's log-probs are from the trainer's."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.kit.families import write_small_model
from tests.kit.forked import TRAINER, run
from tests.kit.replicas import ReplicaProcess
from tests.kit.runs import MODEL

WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


def check(*argv: str) -> CompletedProcess[str]:
    return run(TRAINER, "check", *argv, "--threads=1")


def table(done: CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.split(" {2,}", line, maxsplit=1) for line in done.stdout.splitlines())


def seconds(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) s\b", text)]


def test_a_model_that_needs_nothing_special() -> None:
    found = table(check(str(MODEL)))
    assert found["model"].startswith("Qwen3ForCausalLM, 0.3 M")
    assert found["windows and chunks"] == "none"
    assert found["rope"] == "does not change"
    assert re.fullmatch(r"hidden states differ by \de-0[678] standard deviations", found["packed"])
    assert found["a run's micro-batches"] == "packed, in float32"
    assert found["transformers engine"] == "serves it"
    assert len(seconds(found["took"])) == 2


def test_a_model_with_windows(tmp_path: Path) -> None:
    found = table(check(str(write_small_model(tmp_path, "gemma3_text", **WINDOWS))))
    assert found["windows and chunks"] == "16"
    assert "would differ by" in found["packed"]
    assert found["a run's micro-batches"] == "padded, in float32"
    assert found["transformers engine"].startswith("refuses it: ")
    assert "set max_context to 16" in found["transformers engine"]


def test_what_a_run_refuses_is_refused_with_its_words(tmp_path: Path) -> None:
    done = check(str(write_small_model(tmp_path, "bert")))
    assert done.returncode == 2
    assert re.search(r"dvp-train: error: model type bert cannot be trained: .* as in an encoder", done.stderr)
    assert "weights" in done.stdout  # earlier findings were printed
    assert "micro-batches" not in done.stdout


@pytest.mark.parametrize(
    ("dtype", "shape", "low", "high"),
    [("float32", None, 0, 1e-5), ("bfloat16", None, 1e-4, 0.3), ("float32", "4x64", 0, 0)],
)
def test_how_far_a_replica_is(tmp_path: Path, dtype: str, shape: str | None, low: float, high: float) -> None:
    fixed = [] if shape is None else [f"--fixed-shape={shape}"]
    with ReplicaProcess(tmp_path, f"--model={MODEL}", f"--dtype={dtype}", "--threads=1", *fixed) as replica:
        model = [] if shape is None else [f"--model.fixed-shape={shape}"]
        found = table(check(str(MODEL), f"--replica={replica.url}", "--sampling.log-min-p=-3", *model))
    assert found["replica"].startswith("transformers ")
    assert found["replica"].endswith(f", {dtype}")
    outside, total = map(int, re.findall(r"\d+", found["its tokens outside our safe set"]))
    assert 0 <= outside < total / 4
    mean, largest = map(float, re.findall(r"\d\.\de[-+]\d\d", found["its log-probs against ours"]))
    assert low <= mean <= largest <= high


def test_a_replica_of_other_weights(tmp_path: Path) -> None:
    other = write_small_model(tmp_path / "other", "qwen3")
    with ReplicaProcess(tmp_path / "replica", f"--model={other}", "--threads=1") as replica:
        done = check(str(MODEL), f"--replica={replica.url}")
    assert done.returncode == 2
    assert re.search(rf"replica = '{replica.url}' serves weights \w+, which are not those of {MODEL}", done.stderr)


def test_a_replica_that_does_not_answer() -> None:
    done = check(str(MODEL), "--replica=http://127.0.0.1:9")
    assert done.returncode == 2
    assert "http://127.0.0.1:9: ConnectError" in done.stderr

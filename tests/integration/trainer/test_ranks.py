"""1, 2 and 4 ranks train alike: same update, same metrics, and state and weights that any number of ranks can read."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dvp_rl.weights.folder import read_canary
from dvp_trainer.resume.ledger import read_ledger
from tests.kit.families import write_small_model
from tests.kit.models import make_model
from tests.kit.processes import PYTHON, process, run
from tests.kit.runs import config, replica
from tests.kit.runs import train as train_alone
from tests.kit.wait import WITHIN_S
from tests.unit.trainer.golden import make_batch
from tests.unit.trainer.test_canary import check

from .ranked import FORKED_TOKENS, LR, STEPS, with_forks

SIZES = (1, 2, 4)
# AdamW divides by the root of the second moment, so rounding of a gradient near zero becomes a fraction of lr.
TOLERANCE = 1e-6

pytestmark = pytest.mark.slow


def torchrun(size: int, module: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return run([*command, "-m", f"tests.integration.trainer.{module}", *map(str, options)])


def train(out_dir: Path, model: Path, size: int, *options: str) -> Path:
    out_dir.mkdir()
    done = torchrun(size, "ranked", out_dir, "--model", model, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    return out_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=3, spread=2.0, tied=True)


@pytest.fixture(scope="module")
def outcomes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {size: train(root / str(size), model, size) for size in SIZES}


def weights_of(out_dir: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in (out_dir / "weights").glob("*.safetensors") for k, v in load_file(file).items()}


def check_canary(out_dir: Path, model: Path) -> None:
    """The canary that was written with the weights is theirs."""
    folder = out_dir / "weights"
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    canary = read_canary(folder)
    assert canary is not None
    check(folder, canary)


@pytest.mark.parametrize("size", SIZES[1:])
def test_many_ranks_make_the_update_of_one(outcomes: dict[int, Path], model: Path, size: int) -> None:
    start, alone, together = load_file(model / "model.safetensors"), *(weights_of(outcomes[n]) for n in (1, size))
    assert alone.keys() == together.keys() == start.keys()
    for name, weight in alone.items():
        moved = (weight - start[name]).abs().max()
        assert moved > LR / 2, name
        difference = (weight - together[name]).abs()
        assert float(difference.max()) <= 2 * STEPS * LR, name
        assert float(difference.mean()) <= TOLERANCE, (name, float(difference.mean()), float(moved))
    check_canary(outcomes[size], model)


@pytest.mark.parametrize("size", SIZES[1:])
def test_metrics_are_those_of_the_whole_batch(outcomes: dict[int, Path], size: int) -> None:
    alone, together = (json.loads((outcomes[n] / "metrics.json").read_text()) for n in (1, size))
    for one, many in zip(alone, together, strict=True):
        assert one["optimizer/updates"] == 1
        assert many == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_two_ranks_train_alike_in_bfloat16(model: Path, tmp_path: Path) -> None:
    """Layers are gathered and their gradients computed in bfloat16; gradients are summed in float32."""
    results = []
    for size in (1, 2):
        out_dir = train(tmp_path / str(size), model, size, "--compute-dtype", "bfloat16")
        results.append(json.loads((out_dir / "metrics.json").read_text()))
        assert all(weight.dtype == torch.float32 for weight in weights_of(out_dir).values())
    for alone, together in zip(*results, strict=True):
        for name in ("grad/norm", "mismatch/kl", "pruned/mass"):
            assert together[name] == pytest.approx(alone[name], rel=0.05), name


def test_two_ranks_train_adapters_alike_and_go_on_from_those_of_one(model: Path, tmp_path: Path) -> None:
    start, lora = load_file(model / "model.safetensors"), ("--lora-rank", "4")
    alone, together = (train(tmp_path / str(size), model, size, *lora) for size in (1, 2))
    on = train(tmp_path / "on", model, 2, *lora, "--resume", str(alone / "state"))
    for name, weight in weights_of(alone).items():
        assert torch.equal(weight, start[name]) is ("_proj" not in name)
        assert float((weight - weights_of(together)[name]).abs().mean()) <= TOLERANCE, name
    check_canary(together, model)
    assert any(not torch.equal(weight, weights_of(alone)[name]) for name, weight in weights_of(on).items())


def test_ranks_agree_on_the_forwards_of_episodes_with_forks(model: Path, tmp_path: Path) -> None:
    """Some episodes exceed the limit of a micro-batch and take several forwards, on one rank and not on another."""
    rng = np.random.default_rng(0)
    sizes = [[episode.num_tokens for episode in with_forks(make_batch(rng)).episodes()] for _ in range(STEPS)]
    assert any(min(batch) <= FORKED_TOKENS < max(batch) for batch in sizes)
    options = ("--forked", "--gradient-checkpointing")
    alone, together = (train(tmp_path / str(size), model, size, *options) for size in (1, 3))
    first, second = (json.loads((folder / "metrics.json").read_text()) for folder in (alone, together))
    for one, many in zip(first, second, strict=True):
        assert one["episodes/forks_mean"] == one["optimizer/updates"] == 1
        assert many == pytest.approx(one, rel=1e-3, abs=1e-5)
    start, others = load_file(model / "model.safetensors"), weights_of(together)
    for name, weight in weights_of(alone).items():
        assert float((weight - others[name]).abs().mean()) <= TOLERANCE, name
        assert not torch.equal(weight, start[name])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_two_ranks_publish_experts_as_they_are_saved(tmp_path: Path, model_type: str) -> None:
    """Gradient checkpointing recomputes layers too, which gathers their parameters a second time."""
    model = write_small_model(tmp_path / "model", model_type)
    alone = train(tmp_path / "alone", model, 1)
    together = train(tmp_path / "together", model, 2, "--gradient-checkpointing")
    start, weights, others = load_file(model / "model.safetensors"), weights_of(alone), weights_of(together)
    assert weights.keys() == others.keys() == start.keys()
    for name, weight in weights.items():
        assert float((weight - others[name]).abs().mean()) <= TOLERANCE, name
        assert "experts" not in name or not torch.equal(weight, start[name])
    folder = together / "weights"
    assert all(load_file(file) for file in folder.glob("*.safetensors"))
    check_canary(together, model)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == others.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in others.items())


def test_each_rank_holds_its_part(outcomes: dict[int, Path]) -> None:
    sizes = {n: [int((outcomes[n] / f"bytes-{rank}").read_text()) for rank in range(n)] for n in SIZES}
    whole = sizes[1][0]
    for n in SIZES[1:]:
        assert max(sizes[n]) < 1.1 * whole / n, sizes


def test_ranks_take_turns(tmp_path: Path) -> None:
    done = torchrun(3, "turns", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    turns = [[float(time) for time in (tmp_path / f"turn-{rank}").read_text().split()] for rank in range(3)]
    for (_, end), (begin, _) in pairwise(turns):
        assert end <= begin


def test_ranks_that_wait_for_their_turn_do_not_outlive_another(tmp_path: Path) -> None:
    done = torchrun(3, "turns", tmp_path, "--dies", 1)
    assert done.returncode != 0
    assert [file.name for file in tmp_path.iterdir()] == ["turn-0"]


def test_weights_of_many_ranks_are_a_model_folder(outcomes: dict[int, Path], model: Path) -> None:
    folder = outcomes[2] / "weights"
    assert len(list(folder.glob("*.safetensors"))) == 2
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, weight in weights_of(outcomes[2]).items():
        assert torch.equal(loaded[name], weight), name


def test_another_number_of_ranks_goes_on_from_the_same_state(
    outcomes: dict[int, Path], model: Path, tmp_path: Path
) -> None:
    state = str(outcomes[2] / "state")
    alone = train(tmp_path / "alone", model, 1, "--resume", state)
    together = train(tmp_path / "together", model, 2, "--resume", state)
    for name, weight in weights_of(alone).items():
        assert float((weight - weights_of(together)[name]).abs().mean()) <= TOLERANCE, name
    assert any(not torch.equal(w, weights_of(outcomes[2])[name]) for name, w in weights_of(alone).items())


def test_two_ranks_train_on_the_queue_and_one_goes_on(tmp_path: Path, broker_url: str, run_id: str) -> None:
    """The whole path of a sample, with checkpoints and weights that a replica loads."""
    flags = config(tmp_path, run_id, broker_url, steps="4")
    two = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dvp_trainer"]
    log = tmp_path / "ranks.log"
    with replica(tmp_path, run_id, broker_url):
        with process([*two, *flags], log) as ranks:
            assert ranks.wait(WITHIN_S) == 0, log.read_text()
        train_alone([flag if flag != "--steps=4" else "--steps=6" for flag in flags])
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    trained = [e["job_id"] for e in read_ledger(tmp_path / "run" / "consumed.jsonl") if e["outcome"] == "trained"]
    assert len(trained) == len(set(trained)) == 6 * 4


def test_a_rank_that_dies_ends_the_others(model: Path, tmp_path: Path) -> None:
    """A missing resume folder is an error of the leader while the other rank waits for its order."""
    with pytest.raises(AssertionError, match="missing"):
        train(tmp_path / "out", model, 2, "--resume", str(tmp_path / "missing"))


def test_what_the_leader_alone_finds_wrong_is_said_in_a_line_each(tmp_path: Path, run_id: str) -> None:
    """There is no broker; the other rank never connects to one."""
    flags = config(tmp_path, run_id, "redis://127.0.0.1:1/0", steps="1", broker__stall_timeout_s="0.1")
    log = tmp_path / "ranks.log"
    with process(
        [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dvp_trainer", *flags], log
    ) as ranks:
        assert ranks.wait(WITHIN_S) != 0
    said = log.read_text()
    assert "dvp-train: error: " in said
    assert "127.0.0.1:1" in said
    assert said.count("Traceback") <= 1, "torchrun's own"
    assert "RuntimeError" not in said

"""Only the newest trainer can write checkpoints, and a checkpoint is read only if no bit of it has changed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dvp_rl.contract.errors import ConfigError, LeaseLostError
from dvp_trainer.learn.state import Reader
from dvp_trainer.resume import checkpoint
from dvp_trainer.resume.checkpoint import Checkpoints, Progress
from tests.kit.processes import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def write_state(folder: Path) -> None:
    (folder / "ranks").mkdir(parents=True)
    (folder / ".metadata").write_bytes(bytes(range(256)))
    (folder / "ranks" / "0").write_bytes(random.Random(1).randbytes(3_000_000))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.claim(1)
    for step in (1, 2):
        checkpoints.save(Progress(step=step, outstanding=("a",)), write_state)
    return checkpoints


def test_the_folder_remembers_the_highest_token(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=1).newest_token() == 0
    for token in (7, 12):
        Checkpoints(tmp_path, keep=1).claim(token)
        assert Checkpoints(tmp_path, keep=1).newest_token() == token


def test_a_trainer_that_wakes_up_before_its_claim_takes_nothing_from_its_successor(tmp_path: Path) -> None:
    successor = Checkpoints(tmp_path, keep=1)
    successor.claim(12)
    with pytest.raises(LeaseLostError, match="another trainer took over"):
        Checkpoints(tmp_path, keep=1).claim(7)
    successor.save(Progress(step=3), write_state)
    assert successor.steps() == [3]


def test_what_was_saved_is_loaded(saved: Checkpoints) -> None:
    progress, state = saved.load() or pytest.fail("nothing there")
    assert progress == Progress(step=2, outstanding=("a",))
    assert state == saved.folder(2) / "state"
    if shutil.which("sha256sum"):
        checked = run(["sh", "-c", f"cd {saved.folder(2)} && sha256sum --check --strict SHA256SUMS"])
        assert checked.stdout.count(": OK") == 3, checked.stderr


def test_a_checkpoint_of_an_earlier_version_is_loaded(saved: Checkpoints) -> None:
    """Those have `updates` for `weight_steps`, and `counters`."""
    folder = saved.folder(2)
    fields = json.loads((folder / "progress.json").read_text())
    fields |= {"updates": 7, "counters": {}}
    del fields["weight_steps"]
    (folder / "progress.json").write_text(json.dumps(fields))
    (folder / "SHA256SUMS").write_text(checkpoint._sums(folder))
    progress, _ = saved.load() or pytest.fail("nothing there")
    assert progress == Progress(step=2, weight_steps=7, outstanding=("a",))


@pytest.mark.parametrize("name", ["progress.json", "SHA256SUMS", "state/.metadata", "state/ranks/0"])
@pytest.mark.parametrize("place", [0.0, 0.33, 0.71, 1.0])
def test_one_bit_that_flipped_is_refused(saved: Checkpoints, name: str, place: float) -> None:
    file = saved.folder(2) / name
    data = bytearray(file.read_bytes())
    for bit in range(8):
        at = int(place * (len(data) - 1))
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(ConfigError, match=r"step-00000002: unreadable checkpoint .* the one before"):
            saved.load()
    shutil.move(saved.folder(2), saved.root.parent)
    assert (saved.load() or pytest.fail("nothing there"))[0].step == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "state/ranks/0").unlink(), "state/ranks/0"),
        (lambda folder: (folder / "state/ranks/1").touch(), "state/ranks/1"),
        (lambda folder: (folder / "progress.json").unlink(), "progress.json"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS"),
        (lambda folder: os.truncate(folder / "state/.metadata", 0), "state/.metadata"),
    ],
    ids=["missing", "added", "no progress", "no sums", "empty"],
)
def test_a_folder_that_changed_is_refused_by_name(
    saved: Checkpoints, damage: Callable[[Path], object], named: str
) -> None:
    damage(saved.folder(2))
    with pytest.raises(ConfigError, match=f"unreadable checkpoint .*{named}"):
        saved.load()


class _Runs:
    """An object that makes its pickle run `call` when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize(
    "call", [(os.system, "touch {}"), (eval, "__import__('os').mkdir('{}')"), (Path.touch, Path("{}"))]
)
def test_an_index_runs_nothing(tmp_path: Path, call: tuple[Any, Any]) -> None:
    trace = tmp_path / "trace"
    crafted = _Runs(call[0], type(call[1])(str(call[1]).format(trace)))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(crafted))
    with pytest.raises(pickle.UnpicklingError, match="not allowed in an index of tensors"):
        Reader(tmp_path).read_metadata()
    assert not trace.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert trace.exists(), "this would have run"


def test_a_tensor_that_says_it_is_bytes_runs_nothing(tmp_path: Path) -> None:
    trace, tensors = tmp_path / "trace", {"rng": torch.zeros(3)}
    save({"rng": _Runs(os.system, f"touch {trace}")}, checkpoint_id=tmp_path, no_dist=True)
    index = FileSystemReader(tmp_path).read_metadata()
    assert isinstance(index.state_dict_metadata["rng"], BytesStorageMetadata)
    with pytest.raises(CheckpointException, match="BytesStorageMetadata"):
        load(dict(tensors), storage_reader=Reader(tmp_path), no_dist=True)
    assert not trace.exists()
    load(dict(tensors), checkpoint_id=tmp_path, no_dist=True, planner=DefaultLoadPlanner())
    assert trace.exists(), "this would have run"


def test_an_index_is_what_pytorch_reads(tmp_path: Path) -> None:
    save(
        {"a": {"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, "c": torch.tensor(1)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    ours, theirs = Reader(tmp_path).read_metadata(), FileSystemReader(tmp_path).read_metadata()
    assert isinstance(ours, Metadata)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data

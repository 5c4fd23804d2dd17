"""Folders that the trainer cannot write to, and files that other users must be able to read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dvp_rl.contract.errors import ConfigError
from dvp_trainer.disk import writing
from dvp_trainer.learn.weight_files import save_tensors
from dvp_trainer.resume.checkpoint import Checkpoints
from dvp_trainer.resume.ledger import Ledger

NOBODY = 65534


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=1)


def ledger(folder: Path) -> Ledger:
    return Ledger(folder / "consumed.jsonl")


@pytest.fixture
def not_ours(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process cannot write to, even if it was started as root."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(user)


@pytest.mark.parametrize(("make", "below"), [(checkpoints, "run"), (ledger, "."), (ledger, "run")])
def test_a_folder_that_is_not_ours_is_named(not_ours: Path, make: Callable[[Path], object], below: str) -> None:
    with pytest.raises(ConfigError, match=r"^out_dir: .*theirs.* by user \d+ .*Permission denied"):
        make(not_ours / below)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can give a folder to somebody else")
def test_a_folder_of_checkpoints_that_belongs_to_somebody_else_is_named(not_ours: Path) -> None:
    with pytest.raises(ConfigError, match=r"^out_dir: .*theirs.* by user \d+ .*(not permitted|Permission denied)"):
        checkpoints(not_ours)


def test_a_folder_of_checkpoints_that_was_closed_is_opened(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    checkpoints(tmp_path).claim(1)


@pytest.mark.parametrize("make", [checkpoints, ledger])
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, make: Callable[[Path], object]) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"^out_dir: .*run.* Name a folder"):
        make(tmp_path / "run")


def test_a_folder_that_there_is_no_room_to_make(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoints"
    with (
        pytest.raises(ConfigError, match=rf"^out_dir could not be written .*No space left.* free in {tmp_path}\. Make"),
        writing("out_dir", folder),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_tensors_are_for_those_that_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors({"x": torch.zeros(1)}, tmp_path / "x.safetensors", format="pt")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_too_few_open_files_are_no_lack_of_room(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Too many open files.*ulimit"), writing("out_dir", tmp_path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can become somebody else")
def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    written = Checkpoints(tmp_path / "checkpoints", keep=1)
    (written.root / "step-00000003").mkdir()
    os.seteuid(NOBODY)
    try:
        for look in (written.steps, written.load, written.newest_token):
            with pytest.raises(
                ConfigError, match=r"^out_dir: .*checkpoints cannot be read by user .*Permission denied"
            ):
                look()
    finally:
        os.seteuid(0)
    assert written.steps() == [3]
